"""Producers, the pass and the op ask one function, and one slot holds what it admits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import make_fake_group

import moe_fusion
from moe_fusion import FusionConfig, admits
from moe_fusion.admission import capacity_bytes, token_ceiling
from moe_fusion.buffers import Workspace
from moe_fusion.config import set_active_config
from moe_fusion.passes.guards import refuse
from moe_fusion.topology import Topology
from moe_fusion.workspace import Backend, workspace_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def default_configuration():
    previous = set_active_config(None)
    yield
    set_active_config(previous)


def a_workspace(topology, hidden, dtype, config):
    """One as it is built for this kind of call; it has no memory."""
    return Workspace(
        rank=0,
        world_size=topology.world_size,
        dtype=dtype,
        capacity_bytes=capacity_bytes(hidden, dtype, topology, config),
        peers=None,
        state=None,
        square_sums=None,
        multiprocessors=0,
        error_word=None,
        peer_timeout_s=1.0,
        global_ranks=tuple(range(topology.world_size)),
        memory=None,
    )


WIDTHS = (16, 64, 200, 1000, 2048, 2880, 5120, 7168, 8200, 16384)


@pytest.mark.parametrize("ceiling", [None, 1, 33])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_one_slot_holds_whatever_is_admitted(world_size, dtype, ceiling):
    """For every T up to twice the ceiling; by the table one workspace is for every H."""
    make_fake_group(world_size)
    config = FusionConfig(token_ceiling=ceiling)
    set_active_config(config)
    topology = Topology(world_size, "cpu")
    shared = a_workspace(topology, 16384, dtype, config)
    for hidden in WIDTHS:
        highest = token_ceiling(hidden, dtype, topology, config)
        own = a_workspace(topology, hidden, dtype, config)
        admitted = [
            tokens for tokens in range(2 * highest + 1) if admits(tokens, hidden, dtype, "0")
        ]
        assert admitted == list(range(highest + 1))
        assert all(own.holds(tokens, hidden) for tokens in admitted)
        if ceiling is None:
            assert own.capacity_bytes == shared.capacity_bytes


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("ceiling", [None, 0, 6])
def test_producers_the_pass_and_the_op_give_one_answer(world_size, ceiling):
    """Each finds the same sizes admissible, for widths that are and that are not."""
    make_fake_group(world_size)
    config = FusionConfig(token_ceiling=ceiling)
    set_active_config(config)
    group = dist.group.WORLD
    backend = Backend("cpu", lambda: None, lambda *_: None)
    for hidden, tokens in itertools.product((64, 68, 16392), (1, 6, 7, 512, 513)):
        rows = torch.empty(tokens, hidden, dtype=BF16)
        tail = SimpleNamespace(
            kind="finalized",
            anchor=SimpleNamespace(group="0", input=SimpleNamespace(meta={"val": rows})),
            hidden_dim=hidden,
            dtype=BF16,
            top_k=None,
            num_tokens=tokens,
        )
        by_producer = admits(tokens, hidden, BF16, "0")
        by_pass = refuse(tail, config, {})
        by_op = workspace_for(tokens, hidden, BF16, group, backend=backend)
        assert (by_pass is None) is by_producer, (hidden, tokens)
        if by_pass is None:  # the op went on to build, which a fake group cannot
            assert "store" in by_op.reason
        else:
            assert by_op == by_pass


def test_a_block_wins_over_install_and_install_over_the_environment(monkeypatch):
    """And the environment over the table: what producers, the pass and the op take is the same."""
    make_fake_group(2)

    def ceiling():
        return max(tokens for tokens in range(600) if admits(tokens, 7168, BF16, "0"))

    found = [ceiling()]
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "5")
    found.append(ceiling())
    moe_fusion.install(FusionConfig(token_ceiling=6))
    try:
        found.append(ceiling())
        with moe_fusion.fusing(FusionConfig(token_ceiling=7)):
            found.append(ceiling())
        with moe_fusion.fusing():
            found.append(ceiling())
        found.append(ceiling())
    finally:
        moe_fusion.uninstall()
    assert found == [146, 5, 6, 7, 5, 6]
