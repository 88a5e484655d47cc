"""The token ceiling: each size runs the graph that is right for it, and nothing compiles twice."""

from __future__ import annotations

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
