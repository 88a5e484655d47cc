"""Real ranks compile: all of a group fuse or none, whichever of them differs, is late or away."""

from __future__ import annotations

import agreement_ranks as ranks
import pytest
from rank_pool import interpreting_pool

WORLD = [["0"]] * 4
ROUNDING = 0.07  # the unfused graph rounds the norm before the weight


@pytest.fixture
def pool():
    pool = interpreting_pool()
    yield pool
    pool.run(ranks.leave)


def compile_tails(pool, folder, layouts=(), names=None, **options):
    """What each rank did; every rank's numbers are right."""
    own = pool.run(ranks.join, str(folder), layouts)
    outcomes = pool.run(ranks.compile_tails, names or own, options)
    for outcome in outcomes:
        assert outcome.error <= ROUNDING
    return outcomes, own


def assert_unfused(outcomes, reason):
    """On all of these ranks, and each said so once."""
    for outcome in outcomes:
        assert outcome.fused == []
        assert outcome.reasons == [f"the ranks disagree: {reason}"]
        (line,) = outcome.warnings
        assert line.endswith(f"stays unfused: the ranks disagree: {reason}")


def test_ranks_that_agree_fuse(pool, tmp_path):
    outcomes, _ = compile_tails(pool, tmp_path, names=WORLD)
    for outcome in outcomes:
        assert (outcome.fused, outcome.reasons, outcome.warnings) == (["0"], [], [])


DIFFERENCES = {
    "config.token_ceiling": ({"config": {2: {"token_ceiling": 64}}}, "8", "64"),
    "config.fuse": (
        {"config": {2: {"fuse": ()}}},
        "['unfinalized', 'finalized']",
        "[]",
    ),
    "moe_fusion sources": ({"faults": {2: "sources"}}, None, "'another'"),
    "topology.device_name": ({"faults": {2: "probe"}}, "''", "'odd'"),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_one_rank_that_differs_leaves_every_rank_unfused(pool, tmp_path, field):
    """Also where that rank would not fuse anyway; and at once, not in the minute allowed."""
    options, usual, odd = DIFFERENCES[field]
    outcomes, _ = compile_tails(pool, tmp_path, names=WORLD, **options)
    for outcome in outcomes:
        (reason,) = outcome.reasons
        assert f"{field}: expected the same on every rank, got " in reason
        assert f"{odd} on rank 2" in reason
        assert usual is None or f"{usual} on rank " in reason
        assert outcome.seconds < 40.0
        assert_unfused([outcome], reason.removeprefix("the ranks disagree: "))


def test_of_two_strided_groups_only_the_one_that_differs_is_unfused(pool, tmp_path):
    layout = [[[0, 2], [1, 3]]]
    outcomes, names = compile_tails(pool, tmp_path, layout, faults={2: "sources"})
    for rank in (1, 3):
        assert (outcomes[rank].fused, outcomes[rank].warnings) == (names[rank], [])
    for rank in (0, 2):
        (reason,) = outcomes[rank].reasons
        assert outcomes[rank].fused == []
        assert "'another' on rank 2" in reason
        assert len(outcomes[rank].warnings) == 1


def test_a_model_over_two_groups_fuses_the_tails_of_those_that_agree(pool, tmp_path):
    """Tensor-parallel and expert-parallel groups that cross: rank 3 is in one of each."""
    layouts = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    outcomes, names = compile_tails(pool, tmp_path, layouts, faults={3: "sources"})
    expected = [names[0], names[1][:1], names[2][1:], []]
    assert [outcome.fused for outcome in outcomes] == expected
    assert [len(outcome.warnings) for outcome in outcomes] == [0, 1, 1, 2]


def test_replicas_with_another_configuration_do_not_meet(pool, tmp_path):
    layout = [[[0, 1], [2, 3]]]
    other = {"token_ceiling": 2}
    outcomes, names = compile_tails(pool, tmp_path, layout, config={2: other, 3: other})
    for rank in (0, 1):
        assert (outcomes[rank].fused, outcomes[rank].reasons) == (names[rank], [])
    for rank in (2, 3):
        reasons = ["token ceiling: expected at most 2 tokens, got 4"]
        assert (outcomes[rank].fused, outcomes[rank].reasons) == ([], reasons)
    assert [outcome.warnings for outcome in outcomes] == [[]] * 4


def test_a_later_pipeline_stage_is_not_waited_for(pool, tmp_path):
    """It compiles when the first stage's output arrives, which is after that has compiled."""
    layout = [[[0, 1], [2, 3]]]
    stages = {0: (None, 2), 1: (None, 3), 2: (0, None), 3: (1, None)}
    outcomes, names = compile_tails(pool, tmp_path, layout, stages=stages)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.fused, outcome.warnings) == (names[rank], [])
        assert outcome.seconds < 40.0


def test_a_rank_that_shows_up_too_late_obeys_those_that_gave_up(pool, tmp_path):
    config = {rank: {"peer_timeout_s": 2.0} for rank in range(4)}
    outcomes, _ = compile_tails(pool, tmp_path, names=WORLD, config=config, late={3: 7.0})
    assert_unfused(outcomes, "rank 3: expected an answer within 2 s, got none")


def test_a_rank_that_finds_its_graph_in_a_cache_and_one_that_compiles_agree(pool, tmp_path):
    """The peer of a rank that compiles never runs the pass, and is not waited for in vain."""
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    for folder in (cold, warm):
        folder.mkdir()
    pool.run(ranks.join, str(cold))
    for graphs, fused, hits, error in pool.run(ranks.compile_cached, "0", str(tmp_path), ()):
        assert (graphs, fused, hits) == (1, 1, 0)
        assert error <= ROUNDING
    pool.run(ranks.join, str(warm))
    outcomes = pool.run(ranks.compile_cached, "0", str(tmp_path), (0, 3))
    assert [outcome[:3] for outcome in outcomes] == [(1, 1, 0), (0, 0, 1), (0, 0, 1), (1, 1, 0)]
    assert max(outcome[3] for outcome in outcomes) <= ROUNDING


def test_what_was_cached_among_ranks_that_agreed_is_not_served_to_ranks_that_do_not(pool, tmp_path):
    """Rank 1 has cached a fused graph under the very configuration that it has again."""
    agreed, parted = tmp_path / "agreed", tmp_path / "parted"
    for folder in (agreed, parted):
        folder.mkdir()
    pool.run(ranks.join, str(agreed))
    for graphs, fused, _, _ in pool.run(ranks.compile_cached, "0", str(tmp_path), ()):
        assert (graphs, fused) == (1, 1)
    pool.run(ranks.join, str(parted))
    outcomes = pool.run(ranks.compile_cached, "0", str(tmp_path), (), {0: "sources"})
    for graphs, fused, hits, error in outcomes:
        assert (graphs, fused, hits) == (1, 0, 0)
        assert error <= ROUNDING
