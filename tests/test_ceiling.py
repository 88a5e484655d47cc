"""The token ceiling: each size runs the graph that is right for it, and nothing compiles twice."""

from __future__ import annotations

from inspect import signature

import inputs
import pytest
import spellings
import torch
from tracing import Tracer

from moe_fusion import FusionConfig

pytestmark = pytest.mark.usefixtures("fake_group")

CEILING = 32
SIZES = (16, 24, 64, 20, 100)


class Model(torch.nn.Module):
    """A tail over [T, H] or [B, S, H] rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(inputs.make().norm_weight)

    def forward(self, rows, weights, index, residual):
        y = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual + y.view(residual.shape)
        return spellings.norm_a(total, self.weight), total


def arguments(tokens, batch=None):
    data = inputs.make(tokens=tokens, missing=True)
    residual = data.residual if batch is None else data.residual.view(batch, -1, inputs.H)
    return data.rows, data.weights, data.index, residual


def run(tracer, model, sizes, mark=None, batch=None):
    """Which sizes called the op; numbers are checked against eager."""
    fused = []
    for size in sizes:
        args = arguments(size, batch)
        if mark is not None:
            mark(args)
        calls = tracer.op_calls
        output = tracer(*args).output
        fused += [size] * (tracer.op_calls - calls)
        with torch.no_grad():
            eager = model(*args)
        for got, want in zip(output, eager, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    return fused


def mark_tokens(**limits):
    def mark(args):
        for tensor in args[1:]:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2, **limits)
        torch._dynamo.mark_dynamic(args[0], 0)

    return mark


@pytest.mark.parametrize("sizes", [SIZES, tuple(reversed(SIZES)), (4096, 4)])
@pytest.mark.parametrize("mark", [None, mark_tokens()], ids=["dynamic", "marked"])
def test_each_side_of_the_ceiling_compiles_once(sizes, mark):
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING), dynamic=None if mark else True)
    fused = run(tracer, model, sizes, mark)
    assert fused == [size for size in sizes if size <= CEILING]
    assert len(tracer.after) == 2
    assert tracer.fusion.report.fused == 1
    (reason,) = tracer.fusion.report.refusals
    assert reason.startswith("token ceiling: expected at most 32 tokens, got s")


def test_static_shapes_compare():
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING), dynamic=False)
    assert run(tracer, model, (16, 32, 33)) == [16, 32]
    assert len(tracer.after) == 3
    reason = "token ceiling: expected at most 32 tokens, got 33"
    assert dict(tracer.fusion.report.refusals) == {reason: 1}


def test_automatic_dynamic_shapes():
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING))
    assert run(tracer, model, SIZES) == [16, 24, 20]
    assert len(tracer.after) == 3  # the first size static, then one graph for each side


def test_tokens_are_batch_times_sequence():
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING), dynamic=True)
    assert run(tracer, model, (16, 64, 24), batch=2) == [16, 24]
    assert len(tracer.after) == 2


@pytest.mark.parametrize(
    ("declared", "fused"),
    [((2, 32), [16, 24]), ((2, 128), [16, 24, 64]), ((33, 128), [])],
    ids=["below", "across", "above"],
)
def test_a_declared_range_is_never_narrowed(declared, fused):
    """A guard inside the declared range would be a ConstraintViolationError."""
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING))
    low, high = declared
    sizes = [size for size in (16, 24, 64) if low <= size <= high]
    assert run(tracer, model, sizes, mark_tokens(min=low, max=high)) == fused
    assert len(tracer.after) == 1


def test_a_ceiling_of_zero_fuses_nothing():
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=0))
    assert run(tracer, model, (16,)) == []
    assert tracer.fusion.report.fused == 0


def mark_unbacked(**limits):
    def mark(args):
        for tensor in args[1:]:
            torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="tokens", **limits)
        torch._dynamo.decorators.mark_unbacked(args[0], 0)

    return mark


unbacked = pytest.mark.skipif(
    not {"shape_id", "max"} <= {*signature(torch._dynamo.decorators.mark_unbacked).parameters},
    reason="this torch cannot say that two unbacked sizes are the same, or which they are",
)


@unbacked
def test_an_unbacked_size_is_for_the_op_to_decide():
    """No guard can be recorded on it, and its hint is not read: one graph serves every size."""
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING))
    assert run(tracer, model, SIZES, mark_unbacked()) == list(SIZES)
    assert len(tracer.after) == 1
    assert tracer.fusion.report.sites[0].num_tokens.startswith("u")


@unbacked
@pytest.mark.parametrize(
    ("declared", "fused"),
    [((2, 32), [16, 24]), ((2, 128), [16, 24, 64]), ((33, 128), [])],
    ids=["below", "across", "above"],
)
def test_an_unbacked_size_with_a_range_is_decided_by_it(declared, fused):
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING))
    low, high = declared
    sizes = [size for size in (16, 24, 64) if low <= size <= high]
    assert run(tracer, model, sizes, mark_unbacked(min=low, max=high)) == fused
    assert len(tracer.after) == 1


def finalized(rows, residual, weight):
    """A tail over [B, S, H] without a finalize: T is B * S."""
    y = spellings.functional(rows.reshape(-1, inputs.H))
    total = residual + y.view(residual.shape)
    return spellings.norm_a(total, weight), total


def run_batches(tracer, sizes, mark):
    """Which of these (batch, sequence) called the op; numbers are checked against eager."""
    fused = []
    for batch, sequence in sizes:
        data = inputs.make(tokens=batch * sequence)
        args = [t.view(batch, sequence, inputs.H) for t in (data.shared, data.residual)]
        for tensor in args:
            mark(tensor)
        args.append(data.norm_weight)
        calls = tracer.op_calls
        output = tracer(*args).output
        fused += [(batch, sequence)] * (tracer.op_calls - calls)
        for got, want in zip(output, finalized(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    return fused


@pytest.mark.parametrize(
    ("batch", "sequence", "sizes", "fused"),
    [
        ((2, 4), (2, 8), [(2, 3), (4, 8)], [(2, 3), (4, 8)]),
        ((2, 4), (2, 64), [(2, 3), (3, 40)], [(2, 3), (3, 40)]),
        ((4, 8), (9, 64), [(4, 9), (8, 64)], []),
    ],
    ids=["below", "across", "above"],
)
def test_the_bounds_of_a_product_decide(batch, sequence, sizes, fused):
    """B and S have ranges of their own; the ceiling of 32 is compared with those of B * S."""

    def mark(tensor):
        for dim, (low, high) in enumerate((batch, sequence)):
            torch._dynamo.mark_dynamic(tensor, dim, min=low, max=high)

    tracer = Tracer(finalized, FusionConfig(token_ceiling=CEILING))
    assert run_batches(tracer, sizes, mark) == fused
    assert len(tracer.after) == 1


def test_a_marked_product_is_guarded():
    def mark(tensor):
        torch._dynamo.mark_dynamic(tensor, (0, 1))

    tracer = Tracer(finalized, FusionConfig(token_ceiling=CEILING))
    sizes = [(2, 3), (4, 9), (4, 8), (9, 4), (3, 7)]
    assert run_batches(tracer, sizes, mark) == [(2, 3), (4, 8), (3, 7)]
    assert len(tracer.after) == 2


@pytest.mark.skipif(
    "hint_override" not in signature(torch._dynamo.mark_dynamic).parameters,
    reason="this torch has no such hints",
)
@pytest.mark.parametrize("hint", [4, 4096])
def test_a_hint_decides_nothing(hint):
    """A guard would be evaluated with the user's hint, whichever size is there: the op decides."""
    model = Model()
    tracer = Tracer(model, FusionConfig(token_ceiling=CEILING))
    assert run(tracer, model, (16, 64), mark_tokens(hint_override=hint)) == [16, 64]
    assert len(tracer.after) == 1
