"""The slot of Inductor that the pass is put into, and what others keep in it."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from installed import (
    CONFIG,
    OTHER,
    Counting,
    compile_and_check,
    settings,
    slot,
    tail,
    tensors,
)
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

import moe_fusion
from moe_fusion import FusionConfig, MoEFusionPass
from moe_fusion.config import active_config
from moe_fusion.passes.install import ChainedPass

pytestmark = pytest.mark.usefixtures("fake_group", "empty_slot")


@pytest.mark.parametrize("wrong", ["a string", {"token_ceiling": 8}, 8])
def test_what_is_no_configuration_is_an_error_and_leaves_the_slot_alone(wrong):
    expected = f"config: expected a FusionConfig or None, got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=expected):
        moe_fusion.install(wrong)
    with pytest.raises(TypeError, match=expected), moe_fusion.fusing(wrong):
        pass
    assert slot() is None


# torch 2.13 has such passes, torch 2.11 has not.
AWARE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class InferenceAware(AWARE or CustomGraphPass):
    def __init__(self):
        self.seen = []

    def __call__(self, graph, is_inference):
        self.seen.append(is_inference)

    def uuid(self):
        return b"aware"


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
