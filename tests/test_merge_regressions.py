"""Faults that were found in which all_reduces become one."""

from __future__ import annotations

import inputs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from checks import assert_exact, assert_fused, assert_untouched
from regressions import (
    HALVES,
    both_dtypes,
    each,
    finalize,
    norm,
    reduce,
    sum_in_fp32,
    wide,
)
from torch_versions import NEW_TORCH_ONLY
from tracing import trace

pytestmark = pytest.mark.usefixtures("fake_group")


KEPT_WIDE = {
    "up to the residual": lambda d, y, z: wide(d.residual) + wide(z) + wide(y),
    "up to the residual, widened by the add": lambda d, y, z: wide(d.residual) + z + y,
    "twice, then in fp32": lambda d, y, z: (wide(d.norm_weight) + (z + z) + y).to(y.dtype),
    "a bf16 sum, then in fp32": lambda d, y, z: wide(d.residual) + (z + d.shared.sin()) + y,
    "three sums, rounded once": lambda d, y, z: (
        wide(d.residual) + (wide(y) + wide(z) + wide(reduce(d.residual))).to(y.dtype)
    ),
    "scaled, then rounded": lambda d, y, z: (
        wide(d.residual) + (wide(y) * 0.3 + wide(z)).to(y.dtype)
    ),
    "their sum scaled, then rounded": lambda d, y, z: (
        wide(d.residual) + ((wide(y) + wide(z)) * 0.3).to(y.dtype)
    ),
}


KEPT_APART = ("three sums, rounded once", "their sum scaled, then rounded")  # nothing is fused


@HALVES
@each(KEPT_WIDE)
def test_sums_that_the_graph_adds_in_fp32_are_not_merged(case, dtype):
    """Two reductions became one whose sum of partials was rounded to the activation dtype."""

    def total_of(data):
        return KEPT_WIDE[case](data, reduce(data.shared), reduce(data.shared.flip(0)))

    data = inputs.make(dtype, tokens=256)
    traced = trace(sum_in_fp32(total_of), *data.args())
    fused = traced.report.fused
    assert traced.report.all_reduces_after == traced.report.all_reduces_before - fused
    assert fused == (case not in KEPT_APART)
    if case.startswith("up to the residual"):
        assert traced.reasons == ["the sum is an operand of another tail, which is reduced apart"]
    assert_exact(traced.output, sum_in_fp32(total_of), data)


OVERFLOWING = {
    "halved": lambda one, two: one * 0.5 + two * 0.5,
    "unequally": lambda one, two: one * 0.75 + two * 0.25,
}


@each(OVERFLOWING)
def test_in_fp16_no_rank_adds_two_partials_before_the_reduction(case):
    """Their sum overflowed on each rank; that of all ranks, scaled or cancelled, does not."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + OVERFLOWING[case](reduce(shared), reduce(shared.flip(0)))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16)
    data.shared.fill_(40000.0)
    left = {"the sum is an operand of another tail, which is reduced apart": 1}
    traced = assert_fused(function, data, left=left, shared="after the all_reduce")
    assert traced.output[1].isfinite().all()


REDUCED_TWICE = {
    "another all_reduce": (2, lambda routed: reduce(routed) - reduce(routed) * 0.5),
    "the same": (1, lambda routed: reduce(routed + routed)),
    "the same, alpha": (1, lambda routed: reduce(torch.add(routed, routed, alpha=-0.5))),
}


@each(REDUCED_TWICE)
def test_a_finalize_that_is_an_addend_too_is_not_computed_twice(case):
    """The op had it to compute and read it, as finalized, as well."""
    count, reduced = REDUCED_TWICE[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduced(finalize(rows, weights, index))
        return norm(total, norm_weight), total

    traced = assert_fused(function, inputs.make(missing=True), slack=1.1, finalize="finalized")
    assert traced.report.all_reduces_before == count


UNMERGED = {
    "a tensor scales one": (2, lambda a, b, s, t: a + s * b),
    "a tensor scales each": (2, lambda a, b, s, t: s * a + t * b),
    "a tensor scales one, by addcmul": (2, lambda a, b, s, t: torch.addcmul(a, b, s)),
    "three": (3, lambda a, b, c, s, t: (a + s * b) + t * c),
}


@each(UNMERGED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_without_a_finalize_that_stay_apart_do_not_yield_to_each_other(case, dtype):
    """To match one of them looks at the others, which must not look back."""
    count, sum_of = UNMERGED[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        sums = [reduce(shared * place) for place in range(1, count + 1)]
        total = residual + sum_of(*sums, norm_weight[0] * 0.75, norm_weight[1] * 0.5)
        return norm(total, norm_weight), total

    data = inputs.make(dtype)
    traced = trace(function, *data.args())
    assert [site.shared for site in traced.report.sites] == ["after the all_reduce"]
    assert traced.report.all_reduces_before == count
    assert traced.report.all_reduces_after == count - 1
    assert_exact(traced.output, function, data)


ITSELF = {
    "y + y": lambda y, shared: y + y,
    "add, alpha": lambda y, shared: torch.add(y, y, alpha=2),
    "sub, alpha": lambda y, shared: torch.sub(y, y, alpha=0.25),
    "views of a copy": lambda y, shared: (y + y).view(1, *y.shape).squeeze(0),
    "(y - shared / 2) twice": lambda y, shared: (z := y - shared * 0.25) + z,
}


@each(ITSELF)
@pytest.mark.parametrize("finalized", [False, True], ids=["routed", "finalized"])
@both_dtypes
def test_a_sum_that_is_added_to_itself_is_reduced_once(case, finalized, dtype):
    """It is twice the sum, not a second partial."""

    def partial(rows, weights, index):
        return finalize(rows, weights, index) * 0.25

    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(shared * 0.5 if finalized else partial(rows, weights, index) + shared)
        total = residual + ITSELF[case](y, shared)
        return norm(total, norm_weight), total

    form = "finalized" if finalized else "permuted rows"
    traced = assert_fused(function, inputs.make(dtype, missing=True), slack=1.1, finalize=form)
    assert traced.report.all_reduces_before == 1
    assert "its own" not in traced.report.sites[0].shared


@NEW_TORCH_ONLY
def test_a_sum_that_is_added_to_a_multiple_of_itself_by_a_tensor_is_refused():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index))
        total = residual + torch.addcmul(y, y, norm_weight[0])
        return norm(total, norm_weight), total

    reason = "aten.addcmul comes between the all_reduce and the norm"
    assert_untouched(function, reason, inputs.make(missing=True))


SCALED_PARTIALS = {
    "alike": (1.0, 1.0),
    "apart": (1.0, 0.5),
    "both": (-0.5, 0.25),
}


@each(SCALED_PARTIALS)
@pytest.mark.parametrize("shared_in", ["neither", "first", "second"])
@both_dtypes
def test_of_two_finalized_partials_the_second_is_taken_as_it_is(case, shared_in, dtype):
    """Its own scale is in it already."""
    first_scale, second_scale = SCALED_PARTIALS[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        first = finalize(rows, weights, index) * 0.25
        second = finalize(rows, weights * 0.5, index) * -0.75
        first = first + shared if shared_in == "first" else first
        second = second - shared if shared_in == "second" else second
        total = residual + (reduce(first) * first_scale + second_scale * reduce(second))
        return norm(total, norm_weight), total

    data = inputs.make(dtype, missing=True)
    traced = assert_fused(function, data, slack=1.2, finalize="permuted rows")
    assert traced.report.all_reduces_before == 2


@both_dtypes
def test_a_second_sum_that_is_added_twice_counts_twice(dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        other = reduce(shared)
        total = residual + (reduce(finalize(rows, weights, index) * 0.5) + (other + other))
        return norm(total, norm_weight), total

    data = inputs.make(dtype, missing=True)
    traced = assert_fused(function, data, slack=1.1, shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2


PARALLEL_BLOCKS = {
    "after the residual": lambda residual, dense, routed: (residual + dense) + routed,
    "first": lambda residual, dense, routed: residual + (dense + routed),
    "last": lambda residual, dense, routed: residual + (routed - dense),
}


@each(PARALLEL_BLOCKS)
@both_dtypes
def test_a_sum_over_another_group_leaves_the_norm_to_the_one_with_the_finalize(case, dtype):
    """Attention's, over the tensor-parallel group, took the tail of the experts of another one."""
    group = dist.new_group([0, 1]).group_name

    def function(rows, weights, index, shared, residual, norm_weight):
        dense = reduce(shared)
        routed = funcol.all_reduce(finalize(rows, weights, index), "sum", group)
        total = PARALLEL_BLOCKS[case](residual, dense, routed)
        return norm(total, norm_weight), total

    left = {"another all_reduce of the same sum has the finalize": 1}
    expected = {"finalize": "permuted rows", "group": group}
    traced = assert_fused(function, inputs.make(dtype, missing=True), left=left, **expected)
    assert traced.report.all_reduces_before == 2
