"""The decode step that is measured is the whole model's, with all of its tails fused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import decode_ranks
import pytest
import torch
from distributed import run_ranks

from moe_fusion import reference

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decode_step.py"
BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_ranks_compiled_step_is_the_whole_models(dtype):
    for counts, got, want in run_ranks(2, decode_ranks.step, dtype):
        assert counts == (2 * decode_ranks.SHAPE.layers, 0)
        for one, exact in zip(got, want, strict=True):
            assert one.dtype == dtype
            assert reference.relative_error(one, exact) <= BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_step_is_measured_and_right(tmp_path):
    saved = tmp_path / "decode.json"
    options = ["--world-sizes", "2", "--tokens", "1", "--layers", "2", "--repeats", "5"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(saved)]
    subprocess.run(command, check=True, timeout=240)
    (figure,) = json.loads(saved.read_text())
    assert 0.0 < figure["fused_us"] < 10_000.0
    assert 0.0 < figure["unfused_us"] < 10_000.0
    assert 0.0 < figure["error"] <= 2 * figure["eager_error"] < 0.1
