"""The examples, as a user starts them: under torchrun, on two gloo ranks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 240.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # a graph from the cache reaches no pass, and the report would count nothing
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "HF_HUB_OFFLINE": "1",
}


def output_of(name):
    command = [*TORCHRUN, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tokens_of(output, *names):
    """The generated token ids that the example printed under each name."""
    found = [re.search(rf"^{name}: (\[.*\])$", output, re.MULTILINE) for name in names]
    assert all(found), output
    return [ast.literal_eval(match[1]) for match in found]


def assert_same_text(*texts):
    """Eight tokens, and not the same one over and over, which any model would agree on."""
    assert {len(text) for text in texts} == {8}
    assert len(set(texts[0])) >= 4
    assert all(text == texts[0] for text in texts)


@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_a_decoder_of_our_own():
    output = output_of("own_decoder")
    assert_same_text(*tokens_of(output, "one process", "tensor-parallel", "compiled"))
    report = output[output.index("moe-fusion:") :]
    assert report.strip() == (
        "moe-fusion: fused 0 tails in 1 graph, all_reduces 0 -> 0; "
        "4 tails closed by the model itself"
    )


@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_an_unmodified_transformers_model():
    output = output_of("transformers_generate")
    assert_same_text(*tokens_of(output, "unfused", "fused"))
    assert "moe-fusion: fused 3 tails in 2 graphs, all_reduces 6 -> 3" in output
    assert output.count("  fused all_reduce") == output.count(" [1, 64] float32") == 3
    assert output.count("permuted rows [1, 64] float32, top-2") == 1
    assert output.count("token ceiling: expected at most 4 tokens, got 12") == 3


@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_tensor_parallelism_by_hand():
    output = output_of("gpt_fast_style")
    assert_same_text(*tokens_of(output, "unfused", "fused"))
    assert "moe-fusion: fused 4 tails in 1 graph, all_reduces 4 -> 0" in output
    assert output.count("finalized [1, 64] float32; shared") == 2
    assert output.count("token-major rows [1, 64] float32, top-2") == 2
