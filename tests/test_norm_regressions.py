"""Faults that were found in which norm is taken, with which weight and which eps."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused, assert_untouched
from regressions import (
    H,
    T,
    both_dtypes,
    each,
    finalize,
    norm,
    reduce,
    tail,
    wide,
)
from torch_versions import OLD_TORCH

pytestmark = pytest.mark.usefixtures("fake_group")


LATE_WEIGHTS = {
    "view": lambda w: w.view(1, -1),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "computed": lambda w: (w * 1.5).view(1, -1),
    "a constant added": lambda w: (w + 0.25).view(1, -1),
    "of rank 1": lambda w: w * 1.5,
}


@pytest.mark.parametrize(
    ("batched", "dtype"),
    [(False, torch.bfloat16), (True, torch.float32)],
    ids=["[T, H] bf16", "[B, S, H] fp32"],
)
@each(LATE_WEIGHTS)
def test_a_norm_weight_that_is_made_after_the_sum_precedes_the_op(case, batched, dtype):
    """The reshape of the weight was put before the node that makes the weight: lint failed."""

    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index))
        if batched:
            y, residual = y.view(2, T // 2, H), residual.view(2, T // 2, H)
        total = residual + y
        weight = LATE_WEIGHTS[case](norm_weight)
        return norm(total, weight.unsqueeze(0) if batched and weight.dim() > 1 else weight), total

    assert_fused(function, inputs.make(dtype, missing=True), finalize="permuted rows")


SCALAR_WEIGHTS = {
    "an element": lambda w: w[0],
    "a sum": lambda w: w.sum(),
    "a maximum, computed late": lambda w: w.max() * 1.5,
    "one element, of rank 2": lambda w: w[:1].view(1, 1),
}


@both_dtypes
@each(SCALAR_WEIGHTS)
def test_a_norm_weight_of_one_element_stays_outside_the_op(case, dtype):
    """A 0-d factor of the normalised rows was unpacked as a shape: ValueError."""
    function = tail(close=lambda total, w: norm(total, SCALAR_WEIGHTS[case](w)))
    assert_fused(function, inputs.make(dtype, missing=True), norm="no weight")


@pytest.mark.parametrize(
    ("leading", "dtype"), [((1, 1), torch.bfloat16), ((1, 1, 1), torch.float32)], ids=str
)
def test_a_weight_of_more_dimensions_gives_the_norm_its_own_shape(leading, dtype):
    """A [1, 1, H] weight makes [1, T, H] rows; the fused ones were [T, H]."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        return norm(total, norm_weight.view(*leading, H)), total

    traced = assert_fused(function, inputs.make(dtype, missing=True))
    assert traced.output[0].shape == (*leading[1:], T, H)


def _taller(dim, fill):
    def close(total, norm_weight):
        x = wide(total)
        eps = torch.full(fill, 1e-3) if fill else 1e-3
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (norm_weight * ((x if dim is None else x.unsqueeze(dim)) * inverse)).to(total.dtype)

    return close


TALLER = {
    "the rows have one more dimension": _taller(1, None),
    "eps has more rows": _taller(None, (2, 1, 1)),
}


@each(TALLER)
def test_a_norm_with_more_rows_than_the_sum_is_refused(case):
    """A norm that broadcasts its rows was fused, and its output had the rows of the sum."""
    reason = "the norm's output has more rows than the sum"
    assert_untouched(tail(close=TALLER[case]), reason, inputs.make(torch.float32, missing=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_a_norm_weight_that_is_no_float_stays_outside_the_op(dtype):
    """An integer vector was passed as ``norm_weight``: TypeError."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        return norm(total, torch.arange(H).to(dtype)), total

    data = inputs.make(torch.float32, missing=True)
    assert_fused(function, data, finalize="permuted rows", norm="no weight")


def with_eps(eps):
    def close(total, norm_weight):
        x = wide(total)
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps(x, norm_weight))
        return (norm_weight * (x * inverse)).to(total.dtype)

    return tail(close=close)


EPS_OF_THE_SUM = {
    "maximum": lambda x, w: x.abs().max() * 1e-3,
    "mean": lambda x, w: x.pow(2).mean() * 1e-3,
    "element": lambda x, w: x[0, 0].abs(),
}


@each(EPS_OF_THE_SUM)
def test_an_eps_that_is_computed_from_the_sum_is_refused(case):
    """The op would have read its own output: a cycle, and an AssertionError."""
    reason = "the norm's eps is computed from the sum"
    assert_untouched(with_eps(EPS_OF_THE_SUM[case]), reason, inputs.make(missing=True))


@pytest.mark.parametrize(
    ("eps", "dtype"), [(-1e-6, torch.bfloat16), (-0.5, torch.float32)], ids=str
)
def test_a_negative_constant_eps_is_refused(eps, dtype):
    """The op does not take it: ValueError when the graph was compiled."""
    reason = (
        "the RMSNorm is not one that is known: expected x * rsqrt(mean(x ** 2, -1) + eps), eps >= 0"
    )
    assert_untouched(with_eps(lambda x, w: eps), reason, inputs.make(dtype, missing=True))


EPS_TENSORS = {
    "negative": lambda x, w: w[0] * -1e-6,
    "converted to int": lambda x, w: (w[0].abs() * 0.7).int(),
    "converted to int, above one": lambda x, w: (w[0].abs() * 2.9).int(),
    "rounded to fp16": lambda x, w: (w[0].abs() * 1234.567).half().float(),
    "rounded to bf16": lambda x, w: (w[0].abs() * 1234.567).bfloat16().float(),
    "read from an integer": lambda x, w: torch.full((), 3, dtype=torch.int64) * w[0].abs(),
}


@each([case for case in EPS_TENSORS if not (OLD_TORCH and "rounded" in case)])
def test_an_eps_tensor_is_passed_as_the_graph_makes_it(case):
    """A conversion that changes it was dropped; a negative one raised when the op was called."""
    assert_fused(with_eps(EPS_TENSORS[case]), inputs.make(torch.float32, missing=True))


BIASES = {
    "ones + element": lambda w: torch.ones(H, dtype=w.dtype) + w[:1],
    "element + ones": lambda w: w[:1] + torch.ones(H, dtype=w.dtype),
    "full + 0-d": lambda w: torch.full((H,), 0.5, dtype=w.dtype) + w[0],
    "zeros + element": lambda w: torch.zeros(H, dtype=w.dtype) + w[:1],
}


@each(BIASES)
def test_a_constant_vector_plus_one_element_is_the_weight_itself(case):
    """It was taken for a one-element weight with a bias: ValueError."""
    function = tail(close=lambda total, w: norm(total, BIASES[case](w)))
    data = inputs.make(torch.float32, missing=True)
    assert ", 0, 1, 1, 0)" in assert_fused(function, data).after[0]


FIRST_NORMS = {
    "its output is wide": lambda x, w: w * x,
    "its weight is a matrix": lambda x, w: x * x.sin(),
}


@each(FIRST_NORMS)
def test_of_two_norms_the_one_that_the_op_can_express_is_found(case):
    """Only the first was looked at, and what is wrong with it was the reason for a refusal."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        x = wide(total)  # with an eps of its own, lest both norms be one in part
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        first = FIRST_NORMS[case](x, norm_weight.to(x.dtype))
        return first, norm(total, norm_weight), total

    assert_fused(function, inputs.make(missing=True), slack=1.1, finalize="permuted rows")
