"""Norm ops of other libraries, with and without the residual's add, functional and mutating."""

from __future__ import annotations

import re

import inputs
import pytest
import spellings
import torch
from custom_checks import assert_fused, assert_left, clones
from custom_dialect import OPS
from tracing import trace

import moe_fusion

pytestmark = pytest.mark.usefixtures("fake_group", "registered_ops")

EPS = spellings.EPS
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


@pytest.fixture(params=[True, False], ids=["v2", "v1"])
def functionalized(request):
    """Both ways in which torch wraps an op that mutates its arguments."""
    with torch._inductor.config.patch(enable_auto_functionalized_v2=request.param):
        yield request.param


def routed(rows, weights, index):
    return spellings.functional(spellings.where_masked(rows, weights, index))


def out_variant(x, weight, eps):
    result = torch.empty_like(x)
    OPS.rms_norm_out(result, x, weight, eps)
    return result


def without_weight(x, weight, eps):
    return OPS.rms_norm(x, None, eps)


def weight_plus_one(x, weight, eps):
    return OPS.rms_norm(x, weight + 1.0, eps)


NORMS = {
    "functional": (OPS.rms_norm, "0, 1, 1, 0)"),
    "out variant": (out_variant, "0, 1, 1, 0)"),
    "no weight": (without_weight, "None, 1e-06, 0, 1, 1, 0)"),
    "1 + weight in the op": (OPS.gemma_rms_norm, "1e-06, 1, 1, 1, 0)"),
    "1 + weight before the op": (weight_plus_one, "1e-06, 1, 1, 1, 0)"),
}


@DTYPES
@pytest.mark.parametrize("name", NORMS)
def test_a_registered_norm(name, dtype):
    norm, arguments = NORMS[name]

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + routed(rows, weights, index)
        return norm(total, norm_weight, EPS), total

    traced = assert_fused(function, inputs.make(dtype, missing=True))
    assert arguments in traced.after[0]
    assert "dialect" not in traced.after[0]


@pytest.mark.usefixtures("functionalized")
@pytest.mark.parametrize("name", ["functional", "out variant"])
def test_a_registered_norm_of_a_view(name):
    norm, _ = NORMS[name]

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual.view(2, 3, -1) + routed(rows, weights, index).view(2, 3, -1)
        return norm(total.view(-1, inputs.H), norm_weight, EPS), total

    assert_fused(function, inputs.make(missing=True))


def mutating(x, residual, weight):
    OPS.fused_add_rms_norm(x, residual, weight, EPS)
    return x, residual


def functional(x, residual, weight):
    return OPS.add_rms_norm(x, residual, weight)


def gemma(x, residual, weight):
    total, normed = OPS.gemma_add_rms_norm(x, residual, weight, epsilon=EPS)
    return normed, total


ADDS = {"mutating": mutating, "functional": functional, "gemma": gemma}


@DTYPES
@pytest.mark.parametrize("name", ADDS)
@pytest.mark.usefixtures("functionalized")
def test_an_op_that_adds_the_residual(name, dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        return ADDS[name](routed(rows, weights, index), residual, norm_weight)

    traced = assert_fused(function, inputs.make(dtype, missing=True), top_k=2, shared="none")
    assert "dialect" not in traced.after[0]


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.usefixtures("functionalized")
def test_the_addends_swapped(name):
    def function(rows, weights, index, shared, residual, norm_weight):
        return ADDS[name](residual + 0.5, routed(rows, weights, index), norm_weight)

    assert_fused(function, inputs.make(missing=True))


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.usefixtures("functionalized")
def test_views_scales_and_replicated_addends_before_the_op(name):
    def function(rows, weights, index, shared, residual, norm_weight):
        y = 0.25 * (routed(rows, weights, index).view(2, 3, -1) + shared.view(2, 3, -1))
        normed, total = ADDS[name](y, residual.sin().view(2, 3, -1), norm_weight)
        return normed.view(-1, inputs.H), total

    traced = assert_fused(function, inputs.make(), shared="after the all_reduce")
    assert "0.25, 0)" in traced.after[0]


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.usefixtures("functionalized")
def test_the_sum_that_nothing_reads(name):
    def function(rows, weights, index, shared, residual, norm_weight):
        return (ADDS[name](routed(rows, weights, index), residual + 0.5, norm_weight)[0],)

    assert_fused(function, inputs.make(missing=True))


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.usefixtures("functionalized")
def test_a_second_all_reduce_as_the_residual_or_before_it(name):
    def function(rows, weights, index, shared, residual, norm_weight):
        y = OPS.all_reduce(shared, "0") + routed(rows, weights, index)
        return ADDS[name](y, residual, norm_weight)

    assert_fused(function, inputs.make(), shared="its own all_reduce")


@pytest.mark.parametrize("name", ADDS)
@pytest.mark.parametrize("shape", ["[T, H]", "[B, S, H]"])
@pytest.mark.usefixtures("functionalized")
def test_symbolic_shapes(name, shape):
    def function(rows, weights, index, shared, residual, norm_weight):
        y = routed(rows, weights, index).view(residual.shape)
        return ADDS[name](y, residual, norm_weight)

    data = inputs.make(tokens=10, missing=True)
    if shape == "[B, S, H]":
        data.residual = data.residual.view(2, 5, inputs.H)
    for tensor in data.args():
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    eager = function(*clones(data))
    args = clones(data)
    for tensor in args:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    traced = trace(function, *args, dynamic=True)
    assert traced.report.fused == 1, str(traced.report)
    for got, want in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("functionalized")
def test_an_argument_of_the_graph_is_overwritten():
    """The caller's residual holds the sum afterwards."""

    def function(rows, weights, index, shared, residual, norm_weight):
        return mutating(routed(rows, weights, index), residual, norm_weight)[0]

    data = inputs.make(missing=True)
    args, plain = clones(data), clones(data)
    traced = trace(function, *args)
    want = function(*plain)
    assert traced.report.fused == 1
    torch.testing.assert_close(traced.output, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(args[4], plain[4], rtol=2e-2, atol=2e-2)
    assert not torch.equal(args[4], data.residual)


def test_an_fp32_residual():
    def function(rows, weights, index, shared, residual, norm_weight):
        wide = residual if residual.dtype == torch.float64 else residual.float()
        return functional(routed(rows, weights, index), wide * 1.001, norm_weight)

    assert_fused(function, inputs.make(missing=True), residual="float32")


def left(function, reason):
    assert_left(function, inputs.make(missing=True), reason)


@pytest.mark.usefixtures("functionalized")
def test_an_op_that_is_not_registered_is_named():
    moe_fusion.unregister_op(OPS.fused_add_rms_norm)

    def function(rows, weights, index, shared, residual, norm_weight):
        return mutating(routed(rows, weights, index), residual, norm_weight)

    left(function, "dialect.fused_add_rms_norm comes between the all_reduce and the norm")


def test_an_op_that_overwrites_a_part():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = routed(rows, weights, index)
        OPS.fused_add_rms_norm(y[:3], residual[:3], norm_weight, EPS)
        return y, residual

    left(function, "the op overwrites a part of wait_tensor")


@pytest.mark.usefixtures("functionalized")
def test_the_sum_before_the_op_read_elsewhere():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = routed(rows, weights, index)
        return *functional(y, residual, norm_weight), y * 2

    what = "aten.mul.Tensor"
    reason = (
        "an intermediate is read elsewhere: "
        f"_c10d_functional.wait_tensor (wait_tensor) is also read by {what}"
    )
    left(function, reason)


def test_an_op_that_adds_the_sum_to_itself():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = routed(rows, weights, index)
        return functional(y, y, norm_weight)

    left(function, "dialect.add_rms_norm is called without a residual of its own")


def test_rows_that_nothing_reads():
    def function(rows, weights, index, shared, residual, norm_weight):
        return (functional(routed(rows, weights, index), residual, norm_weight)[1],)

    left(function, "nothing reads the rows that dialect.add_rms_norm normalises")


def test_an_average_before_the_op():
    import torch.distributed._functional_collectives as funcol

    def function(rows, weights, index, shared, residual, norm_weight):
        y = funcol.all_reduce(spellings.where_masked(rows, weights, index), "avg", "0")
        return functional(y, residual, norm_weight)

    left(function, "the reduction is 'avg': expected 'sum'")


def test_a_weight_that_is_not_one_row():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + routed(rows, weights, index)
        return OPS.rms_norm(total, shared, EPS), total

    left(function, "dialect.rms_norm's weight is not one row")


def test_an_argument_that_is_required():
    """A call is the norm that was registered only where the argument has that value."""
    moe_fusion.unregister_op(OPS.rms_norm)
    moe_fusion.register_rms_norm(
        OPS.rms_norm, input="input", weight=None, eps=2, requires={"weight": None}
    )

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + routed(rows, weights, index)
        return OPS.rms_norm(total, None, EPS), total

    assert_fused(function, inputs.make())

    def weighted(rows, weights, index, shared, residual, norm_weight):
        total = residual + routed(rows, weights, index)
        return OPS.rms_norm(total, norm_weight, EPS), total

    (reason,) = trace(weighted, *inputs.make().args()).reasons
    assert re.fullmatch(r"dialect.rms_norm's weight is arg\d_1: expected None", reason)
    assert_left(weighted, inputs.make(), reason)


def test_an_argument_that_is_required_has_to_exist():
    moe_fusion.unregister_op(OPS.rms_norm)
    with pytest.raises(TypeError, match="requires: expected a mapping, got list"):
        moe_fusion.register_rms_norm(
            OPS.rms_norm, input="input", weight="weight", eps=2, requires=["size"]
        )
    with pytest.raises(ValueError, match=r"requires: expected one of .*, got 'size'"):
        moe_fusion.register_rms_norm(
            OPS.rms_norm, input="input", weight="weight", eps=2, requires={"size": None}
        )
