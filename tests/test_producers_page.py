"""The snippets of docs/producers.md, run as one program."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "producers.md"


def test_snippets():
    names = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(snippet, str(PAGE), "exec"), names)
    hidden, residual, norm = names["hidden"], names["residual"], names["norm"]
    torch.testing.assert_close(hidden, torch.nn.functional.rms_norm(residual, (64,), eps=norm.eps))
    assert not torch.isnan(residual).any()
    output, weights, rows = names["output"], names["expert_weights"], names["rows"]
    want = (rows.view(64, 2, 64)[:6].double() * weights.double().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(output.finalize(), want.to(torch.bfloat16), rtol=2**-7, atol=1e-6)


def test_weights_that_old_versions_of_flashinfer_label_as_fp32():
    """The page's expression, on a buffer of fp32 whose first half holds bf16."""
    (expression,) = re.findall(r"`(expert_weights\.view\(.*)` reads them", PAGE.read_text())
    held = torch.rand(6, 2, dtype=torch.bfloat16)
    buffer = torch.zeros(6, 2)
    buffer.view(torch.bfloat16).flatten()[:12] = held.flatten()
    got = eval(expression, {"torch": torch, "expert_weights": buffer, "T": 6, "K": 2})
    assert torch.equal(got, held)
