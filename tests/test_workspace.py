"""Workspaces are built by all ranks or by none; re-creation, capture and lost peers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import workspace_ranks as ranks
from rank_pool import interpreting, interpreting_pool
from tail_cases import assert_close
from workspace_ranks import CEILING, SMALL


@pytest.fixture
def pool():
    pool = interpreting_pool()
    yield pool
    pool.run(ranks.leave)


def call(pool, folder, case=SMALL, name=None, group="0", **options):
    """One call on every rank of the world; the reasons, outputs, seconds and logs, by rank."""
    outcomes = pool.run(ranks.call, str(folder), group, case, options)
    return [list(column) for column in zip(*outcomes, strict=True)]


def test_the_first_call_builds_and_later_calls_find_the_workspace(pool, tmp_path):
    pool.run(ranks.join, str(tmp_path), "store")
    for seed in (70, 71, 72, 73):
        case = replace(SMALL, seed=seed)
        reasons, outputs, _, _ = call(pool, tmp_path, case)
        assert reasons == [None] * 4
        for got in outputs:
            assert_close(case, got, 4)
    assert pool.run(ranks.number_of_workspaces, "0") == [1] * 4


@pytest.mark.parametrize("norm", [True, False])
def test_the_composite_path_of_one_rank_alone_needs_no_group(norm):
    case = replace(SMALL, seed=75, norm=norm)
    (got,) = interpreting_pool().run(ranks.composite_alone, case, ranks=[0])
    assert_close(case, got, 1)


@pytest.mark.parametrize("fault", ["allocation", "rendezvous", "self-test"])
def test_one_ranks_failure_puts_every_rank_on_the_composite_path(pool, tmp_path, fault):
    """Within 10 s, with one reason on all ranks, and with the right answer."""
    pool.run(ranks.join, str(tmp_path), "store")
    reasons, outputs, seconds, logs = call(pool, tmp_path, faults={2: fault})
    assert len(set(reasons)) == 1
    assert reasons[0].startswith(f"rank 2: {fault}: expected success, got ")
    assert max(seconds) < 10.0
    for got in outputs:
        assert_close(SMALL, got, 4)
    for lines in logs:
        assert lines == [f"group '0' uses the composite path: {reasons[0]}"]
    again, _, seconds, logs = call(pool, tmp_path)
    assert again == reasons  # decided once
    assert logs == [[]] * 4
    assert max(seconds) < 1.0


def test_a_configuration_that_differs_puts_every_rank_on_the_composite_path(pool, tmp_path):
    pool.run(ranks.join, str(tmp_path), "store")
    reasons, outputs, seconds, _ = call(pool, tmp_path, faults={1: "configuration"})
    assert len(set(reasons)) == 1
    assert reasons[0].startswith("config.peer_timeout_s: expected the same on every rank, got ")
    assert "7.0 on rank 1" in reasons[0]
    assert "30.0 on rank" in reasons[0]
    assert max(seconds) < 10.0
    assert_close(SMALL, outputs[1], 4)


def test_strided_subgroups_build_their_own_workspaces(pool, tmp_path):
    names = pool.run(ranks.join, str(tmp_path), "store", [[0, 2], [1, 3]])
    for members in ([0, 2], [1, 3]):
        folder = tmp_path / str(members[0])
        folder.mkdir()
        name = names[members[0]]
        outcomes = pool.run(ranks.call, str(folder), name, SMALL, ranks=members)
        assert [reason for reason, *_ in outcomes] == [None, None]
        for _, got, _, _ in outcomes:
            assert_close(SMALL, got, 2)


def test_a_group_made_again_under_the_same_name_gets_a_new_workspace(pool, tmp_path):
    pool.run(ranks.join, str(tmp_path), "first")
    call(pool, tmp_path)
    pool.run(ranks.leave)
    pool.run(ranks.join, str(tmp_path), "second")
    assert pool.run(ranks.number_of_workspaces, "0") == [1] * 4  # the old one
    reasons, outputs, _, _ = call(pool, tmp_path)
    assert reasons == [None] * 4
    assert_close(SMALL, outputs[3], 4)
    assert pool.run(ranks.number_of_workspaces, "0") == [1] * 4  # the new one alone


def test_every_batch_up_to_twice_the_ceiling_is_answered(pool, tmp_path):
    """Fused up to the ceiling, for which the workspace has room, and composite above it."""
    pool.run(ranks.join, str(tmp_path), "store")
    for num_tokens in range(1, 2 * CEILING + 1):
        case = replace(SMALL, num_tokens=num_tokens, seed=100 + num_tokens)
        reasons, outputs, _, _ = call(pool, tmp_path, case)
        fused = num_tokens <= CEILING
        over = f"token ceiling: expected at most {CEILING} tokens, got {num_tokens}"
        assert reasons == [None if fused else over] * 4
        if fused:
            assert_close(case, outputs[0], 4)
        else:  # gloo rounds after every step of its own reduction
            assert torch.isfinite(outputs[0][0]).all()


def test_a_wider_layer_gets_a_workspace_beside_the_first(pool, tmp_path):
    """Nothing is grown in place: a captured graph may hold the first one's addresses."""
    pool.run(ranks.join, str(tmp_path), "store")
    for hidden_dim, expected in ((64, 1), (48, 1), (128, 2), (64, 2)):
        case = replace(SMALL, hidden_dim=hidden_dim)
        reasons, outputs, _, _ = call(pool, tmp_path, case)
        assert reasons == [None] * 4
        assert_close(case, outputs[2], 4)
        assert pool.run(ranks.number_of_workspaces, "0") == [expected] * 4


def test_a_first_call_inside_graph_capture_says_what_to_call_before(pool, tmp_path):
    pool.run(ranks.join, str(tmp_path), "store")
    for message in pool.run(ranks.capture_first, "0"):
        assert "call moe_fusion.prepare(group, hidden_dim, dtype)" in message


def test_a_rank_that_dies_is_named_by_check_and_by_the_next_call(tmp_path):
    pool = interpreting(2)
    try:
        pool.run(ranks.join, str(tmp_path), "store")
        options = {"config": {"peer_timeout_s": 1.0}}
        assert call(pool, tmp_path, **options)[0] == [None, None]
        pool.pipes[1].send((ranks.die, 2, (1,)))
        pool.processes[1].join(10.0)
        [(poisoned, errors)] = pool.run(
            ranks.call_until_the_peer_is_missed, str(tmp_path), "0", SMALL, ranks=[0]
        )
        assert poisoned
        assert errors == [(0, (1,)), (0, (1,))]
    finally:
        pool.close()
