"""The slot, the pass's identity in compile caches, and the report that a user gets."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import inputs
import pytest
import spellings
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from conftest import make_fake_group
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from tracing import Tracer

import moe_fusion
from moe_fusion import FusionConfig, MoEFusionPass, reference
from moe_fusion.config import active_config
from moe_fusion.contract import TailArguments
from moe_fusion.passes import identity
from moe_fusion.passes.install import ChainedPass
from moe_fusion.roll_call import Verdict
from moe_fusion.topology import Topology

pytestmark = pytest.mark.usefixtures("fake_group")

CONFIG = FusionConfig(token_ceiling=64)
OTHER = FusionConfig(token_ceiling=8)


def slot():
    return inductor_config.post_grad_custom_pre_pass


@pytest.fixture(autouse=True)
def empty_slot():
    """Each test starts and ends with nothing installed."""
    with inductor_config.patch(post_grad_custom_pre_pass=None):
        yield
        moe_fusion.uninstall()
        inductor_config.post_grad_custom_pre_pass = None
    assert active_config() == FusionConfig()


@pytest.mark.parametrize("wrong", ["a string", {"token_ceiling": 8}, 8])
def test_what_is_no_configuration_is_an_error_and_leaves_the_slot_alone(wrong):
    expected = f"config: expected a FusionConfig or None, got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=expected):
        moe_fusion.install(wrong)
    with pytest.raises(TypeError, match=expected), moe_fusion.fusing(wrong):
        pass
    assert slot() is None


class Counting(CustomGraphPass):
    """Somebody else's pass: counts its calls and the all_reduces that it saw."""

    identity = b"counting"

    def __init__(self):
        self.all_reduces = []

    def __call__(self, graph):
        names = [str(node.target) for node in graph.nodes]
        self.all_reduces.append(sum("all_reduce" in name for name in names if "c10d" in name))

    def uuid(self):
        return self.identity


class WithoutIdentity(Counting):
    identity = None


# torch 2.13 has such passes, torch 2.11 has not.
AWARE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class InferenceAware(AWARE or CustomGraphPass):
    def __init__(self):
        self.seen = []

    def __call__(self, graph, is_inference):
        self.seen.append(is_inference)

    def uuid(self):
        return b"aware"


def tail(rows, residual, norm_weight):
    total = residual + spellings.functional(rows)
    return spellings.norm_a(total, norm_weight), total


def tensors(tokens=16, rank=0):
    data = inputs.make(tokens=tokens, rank=rank)
    return data.shared, data.residual, data.norm_weight


def settings(*, cached=False):
    """Without generated kernels: the C++ compiler takes longer than all the rest."""
    return inductor_config.patch(force_disable_caches=not cached, fallback_by_default=True)


def compile_and_check(function=tail, tokens=16, *, cached=False):
    """Compile ``function`` afresh, run it, and compare the numbers with the reference."""
    torch._dynamo.reset()
    rows, residual, norm_weight = tensors(tokens)
    with torch.no_grad(), settings(cached=cached):
        outputs = torch.compile(function, fullgraph=True)(rows, residual, norm_weight)
    args = TailArguments(rows, residual=residual, norm_weight=norm_weight, eps=spellings.EPS)
    wanted = reference.tail([args])[0]
    # the unfused graph rounds its norm before the weight
    for got, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-5)
    return outputs


def test_an_empty_slot_holds_the_pass_itself():
    report = moe_fusion.install(CONFIG)
    assert type(slot()) is MoEFusionPass
    assert slot().config is CONFIG
    assert slot().report is report
    assert active_config() is CONFIG
    compile_and_check()
    assert (report.fused, report.graphs) == (1, 1)
    moe_fusion.uninstall()
    assert slot() is None
    assert active_config() == FusionConfig()


def in_a_list(*passes):
    return list(passes)


def in_a_tuple(*passes):
    return passes


def test_a_callable_in_the_slot_runs_after_ours():
    seen = []
    theirs = lambda graph: seen.append(sum("all_reduce" in n.name for n in graph.nodes))  # noqa: E731
    inductor_config.post_grad_custom_pre_pass = theirs
    with moe_fusion.fusing(CONFIG) as report:
        compile_and_check()
        assert report.fused == 1
        assert len(seen) == 1
    assert slot() is theirs


@pytest.mark.parametrize("container", [None, in_a_list, in_a_tuple])
def test_the_passes_of_others_run_after_ours_and_get_their_slot_back(container):
    theirs = [Counting(), Counting()][: 1 if container is None else 2]
    held = theirs[0] if container is None else container(*theirs)
    inductor_config.post_grad_custom_pre_pass = held
    with moe_fusion.fusing(CONFIG) as report:
        assert type(slot()) is ChainedPass
        compile_and_check()
        assert report.fused == 1
    assert slot() is held
    for each in theirs:  # our op's name holds "all_reduce" too, the collective's namespace does not
        assert each.all_reduces == [0]


@pytest.mark.parametrize("held", [[], ()])
def test_an_empty_container_is_given_back(held):
    inductor_config.post_grad_custom_pre_pass = held
    with moe_fusion.fusing(CONFIG) as report:
        compile_and_check()
    assert report.fused == 1
    assert slot() is held


@pytest.mark.skipif(AWARE is None, reason="this torch does not tell passes")
def test_a_pass_that_asks_whether_the_graph_is_for_inference_is_told():
    theirs = InferenceAware()
    inductor_config.post_grad_custom_pre_pass = theirs
    with moe_fusion.fusing(CONFIG) as report:
        compile_and_check()
        for name in ("primals_1", "tangents_1", "arg0_1"):  # as AOTAutograd names them
            graph = torch.fx.Graph()
            graph.output(graph.placeholder(name))
            slot()(graph)
    assert report.fused == 1
    assert theirs.seen == [True, False, False, True]


def test_an_exception_restores_the_slot():
    theirs = Counting()
    inductor_config.post_grad_custom_pre_pass = theirs
    with pytest.raises(KeyError), moe_fusion.fusing(CONFIG):
        raise KeyError
    assert slot() is theirs
    assert active_config() == FusionConfig()


def test_nested_blocks_each_take_our_place_and_give_it_back():
    theirs = Counting()
    inductor_config.post_grad_custom_pre_pass = theirs
    with moe_fusion.fusing(CONFIG) as outer:
        outer_slot = slot()
        with moe_fusion.fusing(OTHER) as inner:
            assert slot().theirs == (theirs,)
            assert active_config() is OTHER
            compile_and_check(tokens=8)
        assert slot() is outer_slot
        assert active_config() is CONFIG
        assert (outer.fused, inner.fused) == (0, 1)
        compile_and_check(tokens=16)
    assert slot() is theirs
    assert (outer.fused, inner.fused) == (1, 1)
    assert theirs.all_reduces == [0, 0]


def test_installing_twice_keeps_the_second_and_what_was_there_before_the_first():
    theirs = Counting()
    inductor_config.post_grad_custom_pre_pass = theirs
    first = moe_fusion.install(OTHER)
    second = moe_fusion.install(CONFIG)
    assert slot().theirs == (theirs,)
    assert active_config() is CONFIG
    compile_and_check(tokens=16)
    assert (first.graphs, second.fused) == (0, 1)
    moe_fusion.uninstall()
    assert slot() is theirs
    moe_fusion.uninstall()
    assert slot() is theirs


def test_installing_again_finds_our_pass_among_others():
    """A library that puts its pass beside ours in a list does not leave two of ours."""
    first = moe_fusion.install(CONFIG)
    theirs, last = Counting(), Counting()
    inductor_config.post_grad_custom_pre_pass = [slot(), theirs]
    second = moe_fusion.install(CONFIG)
    assert slot().theirs == (theirs,)
    inductor_config.post_grad_custom_pre_pass = [slot(), last]
    third = moe_fusion.install(CONFIG)
    assert slot().theirs == (theirs, last)
    compile_and_check()
    assert (first.graphs, second.graphs, third.fused) == (0, 0, 1)
    assert theirs.all_reduces == last.all_reduces == [0]


@pytest.mark.parametrize("around", [False, True], ids=["instead", "around ours"])
def test_uninstalling_leaves_what_another_has_put_in_our_place(around):
    """It was thrown away: the slot was set to what was there before us."""
    moe_fusion.install(CONFIG)
    theirs = inductor_config.post_grad_custom_pre_pass = Wrapped(slot()) if around else Counting()
    moe_fusion.uninstall()
    assert slot() is theirs
    assert active_config() == FusionConfig()


def test_uninstalling_after_a_patch_of_the_slot_does_not_bring_it_back():
    theirs = Counting()
    with inductor_config.patch(post_grad_custom_pre_pass=theirs):
        moe_fusion.install(CONFIG)
    assert slot() is None
    moe_fusion.uninstall()
    assert slot() is None


class Wrapped(Counting):
    """Another library's pass that calls ours."""

    def __init__(self, ours):
        super().__init__()
        self.ours = ours


@pytest.mark.parametrize("held", [None, Counting()], ids=["empty", "theirs"])
def test_uninstalling_what_is_not_installed_changes_nothing(held):
    inductor_config.post_grad_custom_pre_pass = held
    moe_fusion.uninstall()
    assert slot() is held
    with moe_fusion.fusing(CONFIG):
        inside = slot()
        moe_fusion.uninstall()
        assert slot() is inside
    assert slot() is held


def test_install_then_a_block_then_uninstall():
    theirs = Counting()
    inductor_config.post_grad_custom_pre_pass = theirs
    moe_fusion.install(CONFIG)
    installed = slot()
    with moe_fusion.fusing(OTHER):
        assert slot() is not installed
    assert slot() is installed
    assert active_config() is CONFIG
    moe_fusion.uninstall()
    assert slot() is theirs


def test_an_install_inside_a_block_goes_with_the_block():
    theirs = Counting()
    inductor_config.post_grad_custom_pre_pass = theirs
    with moe_fusion.fusing(OTHER):
        moe_fusion.install(CONFIG)
        assert active_config() is CONFIG
    assert slot() is theirs
    moe_fusion.uninstall()
    assert slot() is theirs
    assert active_config() == FusionConfig()


def test_an_uninstall_inside_a_block_ends_with_the_block():
    moe_fusion.install(CONFIG)
    installed = slot()
    with moe_fusion.fusing(OTHER):
        moe_fusion.uninstall()
        assert slot() is None
    assert slot() is installed
    assert active_config() is CONFIG
    moe_fusion.uninstall()
    assert slot() is None


def test_the_pass_as_an_option_of_one_compile():
    fusion = MoEFusionPass(CONFIG)
    rows, residual, norm_weight = tensors()
    with torch.no_grad(), settings():
        options = {"post_grad_custom_pre_pass": fusion}
        compiled = torch.compile(tail, options=options, fullgraph=True)
        norm_out, residual_out = compiled(rows, residual, norm_weight)
    assert fusion.report.fused == 1
    assert slot() is None
    assert torch.equal(residual_out, residual + rows)
    assert torch.isfinite(norm_out).all()


# The identity of the pass in cache keys.


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


# Compile caches.


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


# The report.


def test_the_report_of_one_fused_tail_and_one_refused():
    def function(rows, residual, norm_weight):
        normed, total = tail(rows, residual, norm_weight)
        other = spellings.functional(normed)
        return normed, total, other

    rows, residual, norm_weight = tensors()
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        settings(),
        moe_fusion.fusing(CONFIG, render=True) as report,
    ):
        normed, total, other = torch.compile(function, fullgraph=True)(rows, residual, norm_weight)
    assert torch.equal(total, residual + rows)
    assert torch.equal(other, normed)
    assert (report.graphs, report.fused) == (1, 1)
    assert (report.all_reduces_before, report.all_reduces_after) == (2, 1)
    (site,) = report.sites
    assert (site.num_tokens, site.hidden_dim, site.top_k) == ("16", inputs.H, None)
    assert (site.dtype, site.residual, site.finalize) == ("bfloat16", "bfloat16", "finalized")
    assert (site.shared, site.group, site.world_size) == ("none", "0", 2)
    assert "c10d.all_reduce(" in site.before
    assert "moe_fusion.finalize_allreduce_rms_norm(" in site.after
    reason = "no RMSNorm reads the sum"
    assert dict(report.refusals) == {reason: 1}
    (left,) = report.left
    assert (left.anchor, left.graph, left.reason) == ("all_reduce_1", 0, reason)
    assert left.node == "wait_tensor_1 = _c10d_functional.wait_tensor"
    path, _, line = left.source.rpartition(":")
    assert "all_reduce" in Path(path).read_text().splitlines()[int(line) - 1]
    assert str(report) == "\n".join(
        [
            "moe-fusion: fused 1 tail in 1 graph, all_reduces 2 -> 1",
            (
                f"  fused {site.anchor}: finalized [16, 64] bfloat16; shared: none; "
                f"norm: {site.norm}; residual: bfloat16; group 0 of 2"
            ),
            f"  left all_reduce_1: {reason}; stopped at {left.node} ({left.source})",
        ]
    )
    found = json.loads(json.dumps(report.as_dict()))
    assert {name: found[name] for name in ("graphs", "fused", "refusals")} == {
        "graphs": 1,
        "fused": 1,
        "refusals": {reason: 1},
    }
    assert (found["all_reduces_before"], found["all_reduces_after"]) == (2, 1)
    assert found["sites"] == json.loads(json.dumps([dataclasses.asdict(site)]))
    assert found["left"] == json.loads(json.dumps([dataclasses.asdict(left)]))


def test_the_report_of_a_tail_that_a_guard_refused():
    """Nothing stopped the match, so that only the all_reduce's own line is named."""
    tracer = Tracer(tail, OTHER)
    tracer(*tensors(16))
    (left,) = tracer.fusion.report.left
    assert left.node == ""
    assert str(left) == (
        f"all_reduce: token ceiling: expected at most 8 tokens, got 16 ({left.source})"
    )
    assert Path(left.source.rpartition(":")[0]).name == "spellings.py"


def test_an_empty_report():
    report = MoEFusionPass(CONFIG).report
    assert str(report) == (
        "moe-fusion: no graph reached the pass; one that comes from the compile cache does "
        "not (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles anew)"
    )
    assert report.as_dict() == {
        "graphs": 0,
        "all_reduces_before": 0,
        "all_reduces_after": 0,
        "called": 0,
        "fused": 0,
        "sites": [],
        "refusals": {},
        "left": [],
    }


def test_graphs_are_numbered_and_unasked_text_is_not_kept():
    with moe_fusion.fusing(CONFIG) as report:
        compile_and_check(tokens=8)
        compile_and_check(tokens=16)
    assert [(site.graph, site.num_tokens) for site in report.sites] == [(0, "8"), (1, "16")]
    assert {site.before + site.after for site in report.sites} == {""}


def test_one_log_line_for_each_graph(caplog):
    reason = "token ceiling: expected at most 8 tokens, got 16"
    tracer = Tracer(tail, OTHER, dynamic=False)
    with caplog.at_level(logging.INFO, "moe_fusion"):
        for tokens in (8, 16, 8):
            tracer(*tensors(tokens))
    lines = [record.getMessage() for record in caplog.records if record.name == "moe_fusion"]
    assert lines == [
        "graph 0: fused 1 tail, all_reduces 1 -> 0",
        f"graph 1: fused 0 tails, all_reduces 1 -> 1; left: {reason}",
    ]


def test_nothing_is_logged_below_warning_by_default(caplog):
    with caplog.at_level(logging.WARNING, "moe_fusion"), moe_fusion.fusing(CONFIG):
        compile_and_check()
    assert not [record for record in caplog.records if record.name == "moe_fusion"]


def test_install_reads_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "8")
    report = moe_fusion.install()
    assert slot().config == OTHER
    compile_and_check(tokens=8)
    assert report.fused == 1
    monkeypatch.setenv("MOE_FUSION_CEILING", "8")
    before = slot()
    for enter in (moe_fusion.install, lambda: moe_fusion.fusing().__enter__()):
        with pytest.raises(moe_fusion.ConfigError, match="got 'MOE_FUSION_CEILING'"):
            enter()
    assert slot() is before
    monkeypatch.undo()
