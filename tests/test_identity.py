"""The pass's identity in compile caches: what makes another graph, and when nothing is cached."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from conftest import make_fake_group
from installed import (
    CONFIG,
    OTHER,
    Counting,
    WithoutIdentity,
    compile_and_check,
)
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import moe_fusion
from moe_fusion import FusionConfig, MoEFusionPass
from moe_fusion.passes import identity
from moe_fusion.passes.install import ChainedPass
from moe_fusion.roll_call import Verdict
from moe_fusion.topology import Topology

pytestmark = pytest.mark.usefixtures("fake_group", "empty_slot")


def uuid(config=CONFIG):
    return MoEFusionPass(config).uuid()


def test_the_uuid_is_the_same_for_the_same_configuration():
    assert (
        uuid() == uuid(FusionConfig(token_ceiling=64)) == MoEFusionPass(CONFIG, render=True).uuid()
    )
    assert isinstance(uuid(), bytes)
    assert len(uuid()) == 32


def test_the_uuid_covers_every_field_of_the_configuration():
    configurations = [
        CONFIG,
        OTHER,
        FusionConfig(token_ceiling=64, fuse=("finalized",)),
        FusionConfig(token_ceiling=64, fuse=("finalized", "unfinalized")),
        FusionConfig(token_ceiling=64, strict=True),
        FusionConfig(),
    ]
    assert len({uuid(config) for config in configurations}) == len(configurations)


def test_the_uuid_covers_the_sizes_that_are_served():
    """Of a symbolic T a graph has no guard where they are told."""
    told = [MoEFusionPass(CONFIG, served=served).uuid() for served in (None, range(1, 9), range(9))]
    assert len(set(told)) == 3


def test_the_uuid_covers_groups_and_their_sizes():
    identities = [uuid()]
    for world_size in (4, 8):
        dist.destroy_process_group()
        identities.append(uuid())
        make_fake_group(world_size)
        identities.append(uuid())
    dist.new_group([0, 2])
    identities.append(uuid())
    assert identities[1] == identities[3]  # no group at all, both times
    assert len(set(identities)) == len(identities) - 1


def topologies(monkeypatch):
    """Other answers of the probe, one after the other."""
    for changes in (
        {},
        {"one_host": False},
        {"device_name": "another"},
        {"peers_reachable": False},
    ):
        found = Topology(2, "cpu", **changes)
        monkeypatch.setattr(identity, "probe", lambda group, found=found: found)
        yield found


def test_the_uuid_covers_the_topology(monkeypatch):
    seen = {uuid() for _ in topologies(monkeypatch)}
    assert len(seen) == 4


def test_the_uuid_covers_whether_the_ranks_agree_but_not_the_reason(monkeypatch):
    seen = []
    for reason in (None, "rank 1: none", "torch: expected the same on every rank"):
        monkeypatch.setattr(identity.roll_call, "look", lambda *_, r=reason: Verdict(r))
        seen.append(uuid())
    assert seen[0] != seen[1]
    assert seen[1] == seen[2]


@pytest.fixture
def unanswered(monkeypatch):
    """Some rank has not answered; ranks have no moment to."""
    monkeypatch.setattr(identity.roll_call, "look", lambda *_: None)
    monkeypatch.setattr(identity.limits, "ANSWER_GRACE_S", 0.0)


@pytest.mark.usefixtures("unanswered")
def test_while_a_rank_has_not_answered_there_is_no_uuid():
    assert uuid() is None
    assert chain(Counting()) is None
    dist.destroy_process_group()
    make_fake_group(3)  # which never fuses, so that nobody has to answer
    assert isinstance(uuid(), bytes)


@pytest.mark.usefixtures("unanswered")
def test_while_a_rank_has_not_answered_nothing_is_cached():
    """The pass runs each time; it waits for the ranks of the tails that it finds."""
    with fresh_cache():
        for _ in range(2):
            report, hits, bypassed = compiled_with(CONFIG)
            assert (report.graphs, report.fused, hits) == (1, 1, 0)
            assert bypassed >= 1


@pytest.fixture
def fresh_versions():
    identity.versions.cache_clear()
    yield identity.versions
    identity.versions.cache_clear()


@pytest.fixture
def copied_package(tmp_path, monkeypatch, fresh_versions):
    """A copy of the package's sources, laid out as a checkout, that the hash reads."""
    root = Path(moe_fusion.__file__).parent
    copy = tmp_path / "moe_fusion"
    skip = shutil.ignore_patterns("__pycache__", "passes")
    shutil.copytree(root, copy, ignore=skip)
    shutil.copytree(root / "passes", tmp_path / "passes", ignore=skip)
    (copy / "passes").symlink_to("../passes")
    monkeypatch.setattr(moe_fusion, "__file__", str(copy / "__init__.py"))
    return copy


def test_the_uuid_covers_the_sources_on_both_sides_of_the_symlink(
    copied_package, fresh_versions, monkeypatch
):
    copied = uuid()
    monkeypatch.undo()
    fresh_versions.cache_clear()
    assert copied == uuid()
    monkeypatch.setattr(moe_fusion, "__file__", str(copied_package / "__init__.py"))
    seen = {copied}
    for name in ("reference.py", "passes/tail.py", "cli/__init__.py"):
        with (copied_package / name).open("a") as file:
            file.write("# one more line\n")
        fresh_versions.cache_clear()
        seen.add(uuid())
    assert len(seen) == 4


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_the_uuid_covers_versions(monkeypatch, fresh_versions, package):
    before = uuid()
    fresh_versions.cache_clear()
    if package == "torch":
        monkeypatch.setattr(torch, "__version__", "2.14.0")
    else:
        version = identity.importlib.metadata.version
        fake = lambda name: "99.0" if name == "triton" else version(name)  # noqa: E731
        monkeypatch.setattr(identity.importlib.metadata, "version", fake)
    assert uuid() != before


def chain(*theirs):
    return ChainedPass(MoEFusionPass(CONFIG), theirs).uuid()


def test_a_chains_uuid_holds_every_identity():
    other = Counting()
    other.identity = b"another"
    assert chain(Counting()) == (uuid(), b"counting")
    assert chain(Counting(), other) == (uuid(), b"counting", b"another")
    assert chain(Counting()) != chain(other)
    assert chain(Counting(), other) != chain(other, Counting())


@pytest.mark.parametrize("theirs", [WithoutIdentity(), print], ids=["None", "no uuid"])
def test_a_pass_without_identity_turns_caching_off(theirs):
    assert chain(theirs) is None
    assert chain(Counting(), theirs) is None


def compiled_with(config):
    """The report of a compile that may use the caches, its numbers checked."""
    counters.clear()
    with moe_fusion.fusing(config) as report:
        compile_and_check(cached=True)
    found = counters["inductor"]
    return report, found["fxgraph_cache_hit"], found["fxgraph_cache_bypass"]


def test_another_ceiling_is_another_cached_graph():
    """T = 16: refused at a ceiling of 8, fused at 64, and each is a hit the second time."""
    with fresh_cache():
        small, hits, _ = compiled_with(OTHER)
        assert (small.graphs, small.fused, hits) == (1, 0, 0)
        large, hits, _ = compiled_with(CONFIG)
        assert (large.graphs, large.fused, hits) == (1, 1, 0)
        for config in (OTHER, CONFIG):
            again, hits, bypassed = compiled_with(config)
            assert (again.graphs, hits, bypassed) == (0, 1, 0)
            assert "one that comes from the compile cache does not" in str(again)


def test_another_group_size_is_another_cached_graph():
    with fresh_cache():
        first, hits, _ = compiled_with(CONFIG)
        assert (first.fused, hits) == (1, 0)
        dist.destroy_process_group()
        make_fake_group(4)
        second, hits, _ = compiled_with(CONFIG)
        assert (second.fused, hits) == (1, 0)
        assert second.sites[0].world_size == 4


def test_a_pass_without_identity_beside_ours_is_never_cached():
    theirs = WithoutIdentity()
    inductor_config.post_grad_custom_pre_pass = theirs
    with fresh_cache():
        for count in (1, 2):
            report, hits, bypassed = compiled_with(CONFIG)
            assert (report.fused, hits) == (1, 0)
            assert bypassed >= 1
            assert len(theirs.all_reduces) == count
