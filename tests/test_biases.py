"""A vector that is added to every row after the reduction, as a row-parallel layer's bias is."""

from __future__ import annotations

import inputs
import pytest
import torch
from arithmetic import BIASED
from checks import assert_fused, assert_untouched
from spellings import functional as reduce
from spellings import norm_a as norm
from spellings import where_masked as finalize
from tracing import trace

pytestmark = pytest.mark.usefixtures("fake_group")


def tail(case, *, finalized=False):
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(shared @ shared.T @ shared if finalized else finalize(rows, weights, index))
        total = BIASED[case](y.view(residual.shape), residual, shared, norm_weight - 0.5)
        return norm(total, norm_weight), total

    return function


@pytest.mark.parametrize("finalized", [False, True], ids=["routed", "finalized"])
@pytest.mark.parametrize("tokens", [1, 10])
@pytest.mark.parametrize("mode", ["static", "marked", "dynamic"])
def test_a_bias_of_any_batch(mode, tokens, finalized):
    """Of one token, a bias and the residual have the same elements in a row."""
    data = inputs.make(tokens=tokens)
    if tokens > 1:
        data.residual, data.shared = data.residual.view(2, 5, -1), data.shared
    if mode == "marked" and tokens > 1:
        for tensor in (data.weights, data.index, data.shared):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(data.residual, 1)
    if mode == "dynamic":
        for tensor in data.args():
            torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    function = tail("residual + (y + b)", finalized=finalized)
    assert_fused(function, data, residual="bfloat16", dynamic=mode == "dynamic" or None)


def test_a_bias_without_a_residual_is_no_residual():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = reduce(finalize(rows, weights, index)) + norm_weight
        return norm(total, norm_weight), total

    assert_fused(function, inputs.make(), residual="none", shared="after the all_reduce")


def test_biases_of_two_sums_that_become_one():
    def function(rows, weights, index, shared, residual, norm_weight):
        routed, other = reduce(finalize(rows, weights, index)), reduce(shared)
        total = residual + ((routed + norm_weight) + (other + norm_weight))
        return norm(total, norm_weight), total

    traced = assert_fused(function, inputs.make(), residual="bfloat16")
    assert traced.report.sites[0].shared == "its own all_reduce and after the all_reduce"


def test_a_bias_that_is_a_sum_of_its_own_is_no_second_partial():
    """It has another shape, and its collective stays."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + (reduce(finalize(rows, weights, index)) + reduce(shared[0]))
        return norm(total, norm_weight), total

    data = inputs.make()
    traced = trace(function, *data.args())
    assert [site.shared for site in traced.report.sites] == ["after the all_reduce"]
    assert traced.report.all_reduces_after == 1
    for got, want in zip(traced.output, function(*data.args()), strict=True):
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_a_bias_in_fp32_is_refused():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index)) + norm_weight.float() * 1.001
        total = residual.float() + y
        wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return norm_weight * wide.to(rows.dtype), total

    reason = "what is added after the reduction is torch.float32: expected torch.bfloat16"
    assert_untouched(function, reason, inputs.make(missing=True))


@pytest.mark.parametrize("column", [False, True], ids=["number", "column"])
def test_one_number_for_a_row_or_for_all_is_refused(column):
    def function(rows, weights, index, shared, residual, norm_weight):
        addend = residual[:, :1] if column else norm_weight[0]
        total = residual + (reduce(finalize(rows, weights, index)) + addend)
        return norm(total, norm_weight), total

    data = inputs.make(missing=True)
    traced = trace(function, *data.args())
    assert traced.reasons == ["aten.add.Tensor comes between the all_reduce and the norm"]
    for got, want in zip(traced.output, function(*data.args()), strict=True):
        assert torch.equal(got, want)
