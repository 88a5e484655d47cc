"""Faults that were found in how sums are added, scaled and rounded."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused, assert_untouched
from regressions import (
    HALVES,
    H,
    K,
    each,
    finalize,
    norm,
    reduce,
    sum_in_fp32,
    wide,
)
from torch._dynamo import mark_dynamic
from torch_versions import NEW_TORCH_ONLY

pytestmark = pytest.mark.usefixtures("fake_group")


WIDE_ADDENDS = {
    "scaled": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) * 0.001 + wide(d.shared)) * 0.3
    ),
    "two": lambda d: (
        wide(d.residual)
        + (wide(reduce(d.shared.flip(1))) + wide(d.shared) + wide(d.shared.flip(0)))
    ),
    "subtracted and scaled": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) - wide(d.shared)) * 0.3
    ),
    "scaled, widened by the add": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) + d.shared) * 0.3
    ),
    "scaled by alpha, widened by the add": lambda d: torch.add(
        wide(d.residual) + reduce(d.shared.flip(1)), d.shared, alpha=0.3
    ),
    "two, widened by the add": lambda d: (
        wide(d.residual) + reduce(d.shared.flip(1)) + d.shared + d.shared.flip(0)
    ),
}


@HALVES
@each(WIDE_ADDENDS)
def test_addends_that_the_graph_sums_in_fp32_are_not_summed_in_less(case, dtype):
    """They were scaled and added up in the activation dtype: a thousand times the error."""
    data = inputs.make(dtype, tokens=256)
    reason = "addends are scaled or summed in torch.float32"
    assert_untouched(sum_in_fp32(WIDE_ADDENDS[case]), reason, data)


@pytest.mark.parametrize("first", [False, True], ids=["scaled second", "scaled first"])
def test_a_scaled_partial_is_rounded_no_more_than_its_sum(first):
    """The second was scaled in the activation dtype, where the graph scales its sum in fp32."""

    def total_of(data):
        scaled = reduce(data.shared) if first else None
        plain = reduce(data.shared.flip(0) * 0.05)
        scaled = reduce(data.shared) if scaled is None else scaled
        return wide(data.residual) + torch.add(wide(plain), wide(scaled), alpha=0.3).to(plain.dtype)

    data = inputs.make(tokens=256)
    traced = assert_fused(sum_in_fp32(total_of), data, shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2


KEPT_WHOLE = {
    "the residual, scaled": lambda d, y, z: (wide(d.residual) + wide(z)) * 0.5 + y,
    "the residual, of three": lambda d, y, z: wide(d.residual) + (wide(d.shared.sin()) + z) + y,
    "in fp32, rounded": lambda d, y, z: (
        wide(d.residual) + (y + ((wide(z) + wide(d.shared.sin())) * 0.5).to(y.dtype))
    ),
}


@HALVES
@each(KEPT_WHOLE)
def test_an_addend_of_which_nothing_is_merged_stays_whole(case, dtype):
    """The terms of a sum that has a reduced sum in it were added apart, which was then refused."""

    def total_of(data):
        return KEPT_WHOLE[case](data, reduce(data.shared), reduce(data.shared.flip(0)))

    data = inputs.make(dtype, tokens=256)
    left = {"the sum is an operand of another tail, which is reduced apart": 1}
    traced = assert_fused(sum_in_fp32(total_of), data, left=left)
    assert traced.report.all_reduces_before == 2


def test_an_addend_with_several_factors_is_rounded_once():
    """Each of its factors rounded it, where the graph multiplies in fp32."""

    def total_of(data):
        y = wide(reduce(data.shared.flip(0) * 0.05) + data.shared)
        one, two = wide(data.norm_weight[0]).exp(), wide(data.norm_weight[1]).sin()
        return wide(data.residual) * 0.01 + y * one * two * 0.3

    data = inputs.make(tokens=256)
    assert_fused(sum_in_fp32(total_of), data, shared="after the all_reduce")


WIDE_PARTIALS = {
    "scaled": lambda d: (finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared)) * 0.3,
    "two": lambda d: (
        finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared) + wide(d.shared.flip(0))
    ),
    "divided": lambda d: finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared) / 3.0,
    "scaled, widened by the add": lambda d: (
        (finalize(wide(d.rows), wide(d.weights), d.index) + d.shared) * 0.3
    ),
    "scaled, widened by the weights": lambda d: (
        (finalize(d.rows, wide(d.weights), d.index) + d.shared) * 0.3
    ),
    "two, widened by the add": lambda d: (
        finalize(wide(d.rows), wide(d.weights), d.index) + d.shared + d.shared.flip(0)
    ),
}


@HALVES
@each(WIDE_PARTIALS)
def test_a_partial_that_is_summed_in_fp32_is_rounded_once(case, dtype):
    """Shared addends were scaled and added up in the activation dtype before the op rounded."""

    def total_of(data):
        partial = WIDE_PARTIALS[case](data).to(data.shared.dtype)
        return wide(data.residual) + wide(reduce(partial))

    data = inputs.make(dtype, tokens=256, missing=True)
    assert_fused(sum_in_fp32(total_of), data, finalize="finalized", shared="none")


def test_a_single_wide_addend_is_still_taken():
    """What is only widened is the same number in the activation dtype."""

    def total_of(data):
        partial = finalize(wide(data.rows), wide(data.weights), data.index) + wide(data.shared)
        return wide(data.residual) + wide(reduce(partial.to(data.shared.dtype)))

    assert_fused(
        sum_in_fp32(total_of),
        inputs.make(tokens=256, missing=True),
        finalize="permuted rows",
        shared="before the all_reduce",
    )


OVERFLOWS_AFTER = {
    "one factor": lambda y, shared: (y + shared * -499) * 200.0,
    "two factors": lambda y, shared: ((y + shared * -499) * 20.0) * 10.0,
    "a division": lambda y, shared: (y + shared * -499) / 0.005,
    "subtracted": lambda y, shared: (y - shared * 499) * 200.0,
}


@each(OVERFLOWS_AFTER)
def test_a_factor_that_could_overflow_an_addend_after_the_reduction_is_refused(case):
    """fp16: the factor was distributed, each addend overflowed, and inf - inf is NaN."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + OVERFLOWS_AFTER[case](reduce(shared * 500), shared)
        return norm(total, norm_weight), total

    reason = "an addend that is scaled up alone could overflow float16"
    data = inputs.make(torch.float16, tokens=256)
    assert torch.isfinite(function(*data.args())[1]).all()
    assert_untouched(function, reason, data)


OVERFLOWS_BEFORE = {
    "one factor": lambda routed, shared: (routed + shared * 199) * 1000.0,
    "two factors": lambda routed, shared: ((routed + shared * 199) * 50.0) * 20.0,
    "a division": lambda routed, shared: (routed + shared * 199) / 0.001,
    "subtracted": lambda routed, shared: (routed - shared * -199) * 1000.0,
}


@each(OVERFLOWS_BEFORE)
def test_a_factor_that_could_overflow_the_shared_addend_is_left_to_the_graph(case):
    """fp16: the sum of routed and shared cancels, what each was scaled to does not."""

    def partial(rows, weights, index, shared):
        spread = (shared * -100).unsqueeze(1).expand(-1, K, -1).reshape(-1, H)
        routed = (spread.view(-1, K, H) * (weights / weights).unsqueeze(-1)).sum(1)
        return OVERFLOWS_BEFORE[case](routed, shared)

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(partial(rows, weights, index, shared))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16, tokens=256)
    assert torch.isfinite(function(*data.args())[1]).all()
    assert_fused(function, data, ranks=1, finalize="finalized", shared="none")


@pytest.mark.parametrize("scale", [50.0 * 0.01, -0.75])
def test_a_factor_of_at_most_one_is_still_distributed(scale):
    """fp16: no addend grows by it."""

    def function(rows, weights, index, shared, residual, norm_weight):
        partial = (finalize(rows, weights, index) * 0.5 + shared * 0.25) * scale
        total = residual + reduce(partial)
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16, tokens=64, missing=True)
    assert_fused(function, data, finalize="permuted rows", shared="before the all_reduce")


SPREAD_BY_ADDCMUL = {
    "added to a residual": lambda y, residual, half: torch.addcmul(residual, y, half),
    "added to itself": lambda y, residual, half: torch.addcmul(y, y, half),
}


@NEW_TORCH_ONLY
@each(SPREAD_BY_ADDCMUL)
def test_an_addcmul_by_a_constant_that_broadcasts_is_no_sum_of_rows(case):
    """``full((2, 1, 1), 0.5)`` doubles the rows; with symbolic T half of each output was lost."""

    def function(rows, weights, index, shared, residual, norm_weight):
        half = torch.full((2, 1, 1), 0.5, dtype=shared.dtype)
        total = SPREAD_BY_ADDCMUL[case](reduce(shared), residual, half)
        return norm(total, norm_weight), total

    data = inputs.make(torch.float32)
    for tensor in (data.shared, data.residual):
        mark_dynamic(tensor, 0)
    assert_untouched(function, "aten.addcmul comes between the all_reduce and the norm", data)
