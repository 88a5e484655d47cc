"""The probe: it never raises, and what it gives is hashable and alike on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_fusion.topology import Topology, probe, probe_cuda


def test_the_probe_of_a_group_that_cannot_communicate_raises_nothing(fake_group):
    topology = probe(dist.group.WORLD)
    assert topology.world_size == fake_group
    assert topology.one_host
    assert hash(topology) == hash(probe(dist.group.WORLD))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine lacks")
def test_a_machine_without_cuda_has_nothing_to_offer(fake_group):
    assert probe(dist.group.WORLD) == Topology(2, "cpu")
    assert probe(dist.group.WORLD, "cuda") == Topology(2, "cuda", peers_reachable=False)


@pytest.mark.parametrize(
    ("local_world_size", "one_host"), [("2", True), ("1", False), ("0", True), ("many", True)]
)
def test_the_launcher_says_whether_ranks_share_a_host(
    fake_group, monkeypatch, local_world_size, one_host
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert probe(dist.group.WORLD).one_host is one_host


def test_a_symmetric_memory_that_raises_is_none(monkeypatch):
    from moe_fusion import topology

    def broken(device):
        raise RuntimeError("no driver")

    monkeypatch.setattr(topology.symm_mem, "get_backend", broken)
    assert topology._symmetric_memory_backend.__wrapped__(0) is None


def test_a_compiled_producer_takes_the_probe_as_a_constant():
    def produce(x):
        return x + probe_cuda(4).world_size

    compiled = torch.compile(produce, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
