"""What the tests of faults that were found have in common: tails, and how cases are named."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch

T, K, H = inputs.T, inputs.K, inputs.H
finalize = spellings.where_masked
reduce = spellings.functional
norm = spellings.norm_a
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def each(cases):
    return pytest.mark.parametrize("case", cases)


def wide(x):
    """In fp32, or in fp64 for the oracle."""
    return x if x.dtype == torch.float64 else x.float()


def tail(partial=finalize, after=lambda y, shared: y, close=norm):
    """The usual tail, with another partial, something after the reduction, or another norm."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + after(reduce(partial(rows, weights, index)), shared)
        return close(total, norm_weight), total

    return function


def normed(total, norm_weight):
    """A norm in fp32 of a sum in any dtype; its output has the weight's dtype."""
    x = wide(total)
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spellings.EPS)
    return (norm_weight * (x * inverse)).to(norm_weight.dtype)


def sum_in_fp32(total_of):
    """A norm in fp32 of the sum that ``total_of`` makes of the inputs."""

    def function(*tensors):
        data = inputs.Inputs(*tensors)
        total = total_of(data)
        return normed(total, data.norm_weight), total

    return function
