"""Ranks agree whenever each gets there; who only answers never waits; all obey one verdict."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from moe_fusion.roll_call import RollCall, Verdict, look, wait

ONE, OTHER = {"config.token_ceiling": 8, "torch": "2.13"}, {
    "config.token_ceiling": 64,
    "torch": "2.13",
}  # fmt: skip
LONG_S = 60.0


@pytest.fixture(params=["file", "hash"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    return dist.FileStore(str(tmp_path / "store"), 4)


def together(*functions):
    """What each returns, all called at once; and the seconds that it took."""
    results = [None] * len(functions)

    def run(index):
        results[index] = functions[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return results, time.monotonic() - begun


def calls(store, *facts, ranks=None):
    """One roll call for each rank, by default 0, 1, ..."""
    ranks = ranks or tuple(range(len(facts)))
    return [RollCall(store, 1, ranks, rank, f) for rank, f in zip(ranks, facts, strict=True)]


def waiting(call, timeout_s=LONG_S, delay_s=0.0):
    def run():
        time.sleep(delay_s)
        return call.wait(timeout_s)

    return run


def test_the_last_to_answer_knows_and_so_do_the_others_when_they_look(store):
    first, second, third = calls(store, ONE, ONE, ONE)
    assert first.look() is None
    assert second.look() is None
    assert third.look() == Verdict()
    assert first.look() == second.look() == Verdict()


def test_a_rank_that_waits_needs_only_the_answers_of_those_that_do_not(store):
    """As when one rank compiles what its peer finds in a cache."""
    compiles, hits = calls(store, ONE, ONE)
    (verdict, seen), seconds = together(waiting(compiles), hits.look)
    assert verdict == Verdict()
    assert seen in (None, Verdict())
    assert seconds < 5.0


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_wait_for_each_other_with_other_facts_know_at_once(store, odd):
    asked = calls(store, *(OTHER if rank == odd else ONE for rank in range(3)))
    verdicts, seconds = together(*map(waiting, asked))
    assert seconds < 5.0
    for rank, verdict in enumerate(verdicts):
        assert verdict.reason.startswith("config.token_ceiling: expected the same on every rank")
        assert f"64 on rank {odd}" in verdict.reason
        assert verdict == asked[rank].look()
    assert len({v.reason for rank, v in enumerate(verdicts) if rank != odd}) == 1


def test_ranks_are_named_as_in_the_world(store):
    asked = calls(store, ONE, OTHER, ranks=(4, 6))
    verdicts, _ = together(*map(waiting, asked))
    reason = (
        "config.token_ceiling: expected the same on every rank, got 8 on rank 4 and 64 on rank 6"
    )
    assert verdicts == [Verdict(reason)] * 2


def test_a_fact_that_only_one_rank_has_differs(store):
    verdicts, _ = together(*map(waiting, calls(store, {}, {"host": "a"})))
    reason = "host: expected the same on every rank, got None on rank 0 and 'a' on rank 1"
    assert verdicts == [Verdict(reason)] * 2


def test_a_rank_that_never_shows_up_is_named_and_obeys_when_it_does(store):
    here, missing, also_here = calls(store, ONE, ONE, ONE)
    verdicts, seconds = together(waiting(here, 0.3), waiting(also_here, 0.3))
    assert seconds < 5.0
    assert verdicts == [Verdict("rank 1: expected an answer within 0.3 s, got none")] * 2
    assert missing.look() == verdicts[0]
    assert missing.wait(LONG_S) == verdicts[0]


def test_a_rank_that_has_other_facts_and_does_not_wait_is_named_with_the_field(store):
    here, elsewhere = calls(store, ONE, OTHER)
    assert elsewhere.look() is None
    assert here.wait(0.2).reason.startswith("config.token_ceiling: expected the same")


def test_a_slow_rank_is_waited_for(store):
    one, two = calls(store, ONE, ONE)
    verdicts, seconds = together(waiting(one), waiting(two, delay_s=0.5))
    assert verdicts == [Verdict()] * 2
    assert seconds >= 0.5


def test_a_rank_that_is_ahead_with_its_next_facts_does_not_disturb(store):
    """It has answered to the first, and its peer is still at them: that is no disagreement."""
    ahead, ahead_next = (RollCall(store, 1, (0, 1), 0, f) for f in (ONE, OTHER))
    behind, behind_next = (RollCall(store, 1, (0, 1), 1, f) for f in (ONE, OTHER))
    ahead.look()

    def later():
        time.sleep(0.3)
        return behind.wait(LONG_S), behind_next.wait(LONG_S)

    (first, second), _ = together(waiting(ahead_next), later)
    assert first == Verdict()
    assert second == (Verdict(), Verdict())


def test_groups_of_one_store_do_not_mix(store):
    one, _ = calls(store, ONE, ONE, ranks=(0, 1))
    other, both = calls(store, ONE, ONE, ranks=(0, 2))
    assert one.look() is None
    assert other.look() is None
    assert both.look() == Verdict()
    assert one.look() is None


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order_and_whoever_waits_ranks_hear_one_verdict(seed):
    generator = random.Random(seed)
    store = dist.HashStore()
    kinds = [ONE, OTHER, {"torch": "2.11"}]
    plans = []
    for _ in range(3):
        order = generator.sample(range(3), generator.choice((2, 3, 3)))
        plans.append([(kind, generator.random() * 0.1, generator.random()) for kind in order])

    def follow(rank):
        heard = {}
        for kind, delay, patience in plans[rank]:
            time.sleep(delay)
            call = RollCall(store, 1, (0, 1, 2), rank, kinds[kind])
            heard[kind] = call.wait(0.3) if patience < 0.7 else call.look()
        return heard

    heard, _ = together(*(lambda rank=rank: follow(rank) for rank in range(3)))
    for kind in range(3):
        known = {each[kind] for each in heard if each.get(kind) is not None}
        assert len(known) <= 1, (kind, plans, heard)
    assert any(verdict is not None for each in heard for verdict in each.values())


def test_a_group_of_which_this_process_plays_every_rank_agrees(fake_group):
    assert look(dist.group.WORLD, ONE) == wait(dist.group.WORLD, OTHER, 0.0) == Verdict()


def planted(call, *_, decide=RollCall._decide):
    return decide(call, "planted")


def test_a_group_that_is_created_anew_on_the_same_store_asks_anew():
    """What was refused, or agreed, in its former life is not what its ranks say now."""
    store = dist.HashStore()
    for expected in (Verdict("planted"), Verdict()):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with pytest.MonkeyPatch.context() as patch:
            if expected.reason is not None:
                patch.setattr(RollCall, "_decide", planted)
            assert wait(dist.group.WORLD, ONE, LONG_S) == expected
        assert look(dist.group.WORLD, ONE) == expected
        dist.destroy_process_group()


def test_a_group_without_a_store_gives_a_reason_and_raises_nothing(caplog):
    class Lost(dist.Store):
        pass

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    dist.distributed_c10d._world.pg_map[group] = ("gloo", Lost())
    reason = "the group's store: expected answers, got RuntimeError"
    assert wait(group, ONE, LONG_S) == Verdict(reason)
    assert look(group, ONE) == Verdict(reason)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"group '0' stays unfused: the ranks disagree: {reason}"]
