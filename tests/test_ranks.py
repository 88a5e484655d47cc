"""The ranks that the commands start: results by rank, and an end for every failure."""

from __future__ import annotations

import multiprocessing
import time

import pytest
from distributed import run_ranks
from rank_functions import dies_on_one, hangs_on_one, raises_on_one, total

from moe_fusion.cli import ranks
from moe_fusion.errors import RankFailedError, RankTimeoutError


def test_results_come_by_rank_and_progress_from_rank_0():
    lines = []
    results = ranks.run_ranks(total, 2, 10, time_limit_seconds=60, on_progress=lines.append)
    assert [result[:3] for result in results] == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert [result[3].item() for result in results] == [21, 21]
    assert lines == ["adding on 0"]


def test_a_rank_that_raises_ends_the_run_with_its_traceback():
    with pytest.raises(RankFailedError, match="rank 1 failed") as caught:
        run_ranks(2, raises_on_one)
    assert "ZeroDivisionError: the divisor of rank 1" in str(caught.value)
    assert "rank_functions.py" in str(caught.value)


def test_a_rank_that_dies_ends_the_run():
    with pytest.raises(RankFailedError, match=r"rank 1 failed: its process died with exit code 7"):
        run_ranks(2, dies_on_one)


def test_a_rank_that_hangs_ends_the_run_and_leaves_no_process():
    before = set(multiprocessing.active_children())  # pools that tests of this process share
    started = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"within 12 s, got none from .*1\]"):
        run_ranks(2, hangs_on_one, time_limit_seconds=12)
    assert time.monotonic() - started < 30
    assert set(multiprocessing.active_children()) <= before


def test_world_size_is_checked():
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        run_ranks(0, total)
