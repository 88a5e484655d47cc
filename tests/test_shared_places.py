"""A shared expert's output in each place, on two ranks that have different ones.

A partial taken for a replicated addend, or the other way round, gives a wrong sum and no error; on
ranks whose shared outputs differ it shows.
"""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from shared_places import PLACES, run_places

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, run_places, DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_a_place(results, name, dtype):
    ranks = [result[name, dtype] for result in results]
    for rank in ranks:
        assert rank["found"] == [PLACES[name][1]], rank["report"]
        for error, unfused in zip(rank["errors"], rank["unfused"], strict=True):
            assert error <= 1.05 * unfused + 1e-6
    for mine, other in zip(*(rank["outputs"] for rank in ranks), strict=True):
        assert torch.equal(mine, other)
