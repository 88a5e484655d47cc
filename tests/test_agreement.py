"""Ranks agree, or none fuses: the vote, its time limit, and that late ranks obey."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from moe_fusion.agreement import Ballot, _Poll, vote


def hold(store, ballots, delays=None, timeout_s=5.0):
    """One vote with a thread for each rank; None stands for a rank that never votes."""
    results = [None] * len(ballots)

    def run(rank):
        time.sleep((delays or {}).get(rank, 0.0))
        poll = _Poll(store, "test", rank, len(ballots))
        results[rank] = poll.run(ballots[rank], timeout_s)

    threads = [
        threading.Thread(target=run, args=(rank,))
        for rank, ballot in enumerate(ballots)
        if ballot is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return results


@pytest.fixture(params=["file", "hash"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    return dist.FileStore(str(tmp_path / "store"), 4)


def test_equal_ballots_without_a_problem_pass(store):
    assert hold(store, [Ballot(facts={"W": 4})] * 4) == [None] * 4


def test_one_ranks_problem_is_every_ranks_reason(store):
    ballots = [Ballot(), Ballot("allocation: expected success, got OutOfMemoryError"), Ballot()]
    expected = "rank 1: allocation: expected success, got OutOfMemoryError"
    assert hold(store, ballots) == [expected] * 3


def test_a_fact_that_differs_is_named_with_both_values(store):
    ballots = [Ballot(facts={"a": 1, "config.token_ceiling": 8}) for _ in range(2)]
    ballots.append(Ballot(facts={"a": 1, "config.token_ceiling": 64}))
    reasons = hold(store, ballots)
    expected = "config.token_ceiling: expected the same on every rank, got 8 on {} and 64 on rank 2"
    # ranks 0 and 1 hold the same: the two that differ and were seen first are named, to all alike
    assert reasons[0] in (expected.format("rank 0"), expected.format("rank 1"))
    assert reasons == [reasons[0]] * 3


def test_a_fact_that_one_rank_lacks_differs(store):
    reasons = hold(store, [Ballot(facts={"a": 1}), Ballot()])
    assert reasons == ["a: expected the same on every rank, got 1 on rank 0 and None on rank 1"] * 2


def test_a_rank_that_does_not_vote_is_named_within_the_time_limit(store):
    begun = time.monotonic()
    reasons = hold(store, [Ballot(), None, Ballot()], timeout_s=0.3)
    assert time.monotonic() - begun < 5.0
    assert reasons[0] == "rank 1: expected a vote within 0.3 s, got none"
    assert reasons[2] == reasons[0]


def test_a_problem_is_decided_without_waiting_for_the_others(store):
    begun = time.monotonic()
    reasons = hold(store, [Ballot("no device"), None], timeout_s=60.0)
    assert time.monotonic() - begun < 5.0
    assert reasons[0] == "rank 0: no device"


def test_a_rank_that_comes_after_the_decision_obeys_it(store):
    """It sees all ballots and would have agreed, but the others have gone."""
    reasons = hold(store, [Ballot(), Ballot()], delays={1: 1.0}, timeout_s=0.2)
    assert reasons == ["rank 1: expected a vote within 0.2 s, got none"] * 2


def test_a_group_without_a_store_gives_a_reason_and_raises_nothing(fake_group):
    reason = vote(dist.group.WORLD, Ballot(), timeout_s=0.1)
    assert reason is not None
