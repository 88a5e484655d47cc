"""The pass beside what else users do with torch.compile: threads, export, AOT, time of install."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import inputs
import pytest
import spellings
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from tracing import Tracer

import moe_fusion
from moe_fusion import FusionConfig, UnfusedTailError, op, reference
from moe_fusion.config import active_config

pytestmark = pytest.mark.usefixtures("fake_group")

CONFIG = FusionConfig(token_ceiling=64)
OTHER = FusionConfig(token_ceiling=8)
TOKENS = 16


@pytest.fixture(autouse=True)
def empty_slot():
    """Nothing is installed before and after, nothing is cached, and no kernels are generated."""
    settings = {"force_disable_caches": True, "fallback_by_default": True}
    with inductor_config.patch(post_grad_custom_pre_pass=None, **settings):
        yield
        moe_fusion.uninstall()
    assert active_config() == FusionConfig()


class Tail(torch.nn.Module):
    """An all_reduce, the residual and the norm."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(inputs.make().norm_weight, requires_grad=False)

    def forward(self, rows, residual):
        total = residual + spellings.functional(rows)
        return spellings.norm_a(total, self.weight), total


def arguments(tokens=TOKENS):
    data = inputs.make(tokens=tokens)
    return data.shared, data.residual


def check(function, tokens=TOKENS):
    """Call ``function`` and compare with eager."""
    with torch.no_grad():
        got, want = function(*arguments(tokens)), Tail()(*arguments(tokens))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1.6e-2, atol=1e-5)


# When what is called.


def test_what_was_compiled_before_install_stays_until_the_reset():
    compiled = torch.compile(Tail(), fullgraph=True)
    check(compiled)
    report = moe_fusion.install(CONFIG)
    check(compiled)
    assert report.graphs == 0
    torch._dynamo.reset()
    check(compiled)
    assert (report.graphs, report.fused) == (1, 1)


def test_torch_compile_before_install_and_the_first_call_after_it():
    compiled = torch.compile(Tail(), fullgraph=True)
    report = moe_fusion.install(CONFIG)
    check(compiled)
    assert report.fused == 1


def test_what_was_compiled_fused_stays_fused_after_uninstall():
    report = moe_fusion.install(CONFIG)
    compiled = torch.compile(Tail(), fullgraph=True, dynamic=False)
    check(compiled)
    moe_fusion.uninstall()
    check(compiled)
    check(compiled, tokens=8)  # another graph, to which the pass is not applied
    assert (report.graphs, report.fused) == (1, 1)


def test_each_reset_compiles_through_the_pass_again():
    report = moe_fusion.install(CONFIG)
    compiled = torch.compile(Tail(), fullgraph=True)
    for count in (1, 2, 3):
        torch._dynamo.reset()
        check(compiled)
        assert (report.graphs, report.fused) == (count, count)


# Threads.


def in_threads(*functions):
    """What each returns or raises, run at the same time."""
    outcomes = [None] * len(functions)

    def run(index):
        try:
            outcomes[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def _seen_by_another_thread():
    with inductor_config.patch(post_grad_custom_pre_pass=print):
        return in_threads(lambda: inductor_config.post_grad_custom_pre_pass)[0] is print


a_slot_for_each_thread = pytest.mark.skipif(
    _seen_by_another_thread(), reason="this torch has one slot for all threads"
)


@a_slot_for_each_thread
def test_blocks_of_two_threads_do_not_meet():
    """Open at the same time and closed in the order in which they were opened."""
    meet = threading.Barrier(2, timeout=60.0)
    opened, closed = threading.Event(), threading.Event()

    def first():
        with moe_fusion.fusing(CONFIG) as report:
            opened.set()
            meet.wait()
            assert active_config() is CONFIG
            settings = {"force_disable_caches": True, "fallback_by_default": True}
            with inductor_config.patch(**settings):
                check(torch.compile(Tail(), fullgraph=True))
        closed.set()
        assert active_config() == FusionConfig()
        return report

    def second():
        model = Tail()

        def another(rows, residual):  # Dynamo would find the first thread's code for Tail
            return model(rows, residual)

        assert opened.wait(60.0)
        with moe_fusion.fusing(OTHER) as report:
            meet.wait()
            assert closed.wait(60.0)
            assert active_config() is OTHER
            settings = {"force_disable_caches": True, "fallback_by_default": True}
            with inductor_config.patch(**settings):
                check(torch.compile(another, fullgraph=True))
        assert active_config() == FusionConfig()
        return report

    fused, refused = in_threads(first, second)
    assert (fused.graphs, fused.fused) == (1, 1)
    reason = f"token ceiling: expected at most 8 tokens, got {TOKENS}"
    assert (refused.fused, dict(refused.refusals)) == (0, {reason: 1})
    assert inductor_config.post_grad_custom_pre_pass is None


@a_slot_for_each_thread
def test_install_is_for_its_thread_and_its_configuration_for_all():
    """Another thread may call what this one compiled, and compiles unfused until it installs."""
    report = moe_fusion.install(CONFIG)
    compiled = torch.compile(Tail(), fullgraph=True)
    check(compiled)

    def another():
        assert active_config() is CONFIG
        assert inductor_config.post_grad_custom_pre_pass is None
        check(compiled)
        moe_fusion.uninstall()  # what it has not installed
        assert active_config() is CONFIG
        own = moe_fusion.install(CONFIG)
        assert inductor_config.post_grad_custom_pre_pass.config is CONFIG
        return own

    (own,) = in_threads(another)
    assert (report.graphs, own.graphs) == (1, 0)


# Ahead of time.


def test_an_exported_program_is_fused_when_it_is_compiled():
    exported = torch.export.export(Tail(), arguments())
    with moe_fusion.fusing(CONFIG) as report:
        check(torch.compile(exported.module(), fullgraph=True))
    assert report.fused == 1


def test_an_exported_program_keeps_its_range_of_sizes():
    tokens = torch.export.Dim("tokens", min=2, max=256)
    shapes = ({0: tokens}, {0: tokens})
    program = torch.export.export(Tail(), arguments(), dynamic_shapes=shapes).module()
    with moe_fusion.fusing(CONFIG) as report:
        compiled = torch.compile(program, fullgraph=True, dynamic=True)
        for size in (16, 64, 100):
            check(compiled, tokens=size)
    assert (report.graphs, report.fused) == (2, 1)
    (reason,) = report.refusals
    assert reason.startswith("token ceiling: expected at most 64 tokens, got s")


def ahead_of_time(config):
    """A tail of a MoE producer, as the pass sees it under AOTInductor; a package takes too long."""

    def function(rows, weights, index, residual, norm_weight):
        y = spellings.functional(spellings.where_masked(rows, weights, index))
        return spellings.norm_a(residual + y, norm_weight)

    data = inputs.make()
    args = (data.rows, data.weights, data.index, data.residual, data.norm_weight)
    tracer = Tracer(function, config)

    def packaged(graph):
        with V.set_aot_compilation(True):
            tracer.fusion(graph)

    tracer.passes = (packaged,)
    return tracer(*args), function(*args)


def test_what_is_compiled_ahead_of_time_stays_unfused():
    traced, eager = ahead_of_time(CONFIG)
    (reason,) = traced.report.refusals
    assert reason == (
        "the graph is compiled ahead of time (AOTInductor): its package runs without Python, which "
        "the op needs"
    )
    assert traced.before == traced.after
    torch.testing.assert_close(traced.output, eager, rtol=1.6e-2, atol=1e-5)


def test_strict_says_why_a_package_would_not_be_fused():
    with pytest.raises(BackendCompilerFailed) as caught:
        ahead_of_time(FusionConfig(token_ceiling=64, strict=True))
    error = caught.value.inner_exception
    assert isinstance(error, UnfusedTailError)
    assert "runs without Python" in str(error)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "load_compiled_function"),
    reason="this torch cannot save a function",
)
def test_a_function_that_dynamo_compiled_ahead_of_time_is_fused_when_it_is_loaded(tmp_path):
    """It is Python and needs the op's registration, and torch wants its caches for it."""
    path, model = str(tmp_path / "tail.bin"), Tail()
    with (
        fresh_cache(),
        inductor_config.patch(force_disable_caches=False),
        torch._dynamo.config.patch(enable_aot_compile=True),
        moe_fusion.fusing(CONFIG) as report,
        torch.no_grad(),
    ):
        compiled = torch.compile(model.forward, fullgraph=True)
        compiled.aot_compile((arguments(), {})).save_compiled_function(path)
    assert (report.graphs, report.fused) == (1, 1)
    with Path(path).open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    with op_calls() as calls:
        check(lambda *args: loaded(model, *args))
    assert calls == [TOKENS]


@contextmanager
def op_calls():
    """The number of tokens of each call of the op in the block."""
    calls, partial = [], reference.partial

    def counting(args):
        calls.append(args.num_tokens)
        return partial(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op.reference, "partial", counting)
        yield calls
