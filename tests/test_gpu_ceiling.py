"""Under CUDA graphs the ceiling holds for each captured size."""

from __future__ import annotations

import captured_sizes
import pytest
import torch
from captured_sizes import CEILING, SIZES
from rank_pool import RankPool

BELOW = {size: True for size in SIZES if size <= CEILING}
EACH_SIDE = {size: size <= CEILING for size in SIZES}
ERROR = 2e-2  # the unfused tail rounds its norm before the weight
# A guard gives each side a graph, of which only one holds the op; in a declared range there is one
# graph, whose op chooses when a size is captured.
CASES = [
    pytest.param({}, (2, 1), BELOW, id="guarded"),
    pytest.param({"min": 2, "max": 64}, (1, 1), EACH_SIDE, id="declared"),
]


def check(outcome, graphs_and_fused, admitted):
    graphs, fused, skipped, found, error = outcome
    assert (graphs, fused) == graphs_and_fused
    assert skipped == 0
    assert found == admitted
    assert error <= ERROR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("limits", "graphs_and_fused", "admitted"), CASES)
def test_each_captured_size_takes_the_path_of_its_side(
    fake_group, limits, graphs_and_fused, admitted
):
    """One process for both ranks: the op's composite path, whose all_reduce changes nothing."""
    check(captured_sizes.call_each_size(0, **limits), graphs_and_fused, admitted)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(("limits", "graphs_and_fused", "admitted"), CASES)
def test_each_captured_size_on_two_gpus(tmp_path, limits, graphs_and_fused, admitted):
    """The fused kernel below the ceiling, NCCL above it."""
    pool = RankPool(2)
    try:
        outcomes = pool.run(captured_sizes.on_nccl, str(tmp_path), limits)
    finally:
        pool.close()
    for outcome in outcomes:
        check(outcome, graphs_and_fused, admitted)
