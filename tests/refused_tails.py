"""Tails that are refused, each with its reason."""

from __future__ import annotations

import inputs
import spellings
import torch
import torch.distributed._functional_collectives as funcol

finalize = spellings.where_masked
reduce = spellings.functional
norm = spellings.norm_a

CASES = {}


def case(reason):
    def register(function):
        CASES[function.__name__] = (function, reason)
        return function

    return register


def reduced(rows, weights, index):
    return reduce(finalize(rows, weights, index))


@case("the reduction is 'avg': expected 'sum'")
def average(rows, weights, index, shared, residual, norm_weight):
    total = residual + funcol.all_reduce(finalize(rows, weights, index), "avg", "0")
    return norm(total, norm_weight), total


@case("the reduction is 'max': expected 'sum'")
def maximum(rows, weights, index, shared, residual, norm_weight):
    total = residual + funcol.all_reduce(finalize(rows, weights, index), "max", "0")
    return norm(total, norm_weight), total


@case("the all_reduce is of a single number: expected rows, [T, H]")
def number(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduce(shared.mean())
    return norm(total, norm_weight), total


@case("what the all_reduce feeds is read several times (aten.add.Tensor, aten.mul.Tensor)")
def all_reduce_read_elsewhere(rows, weights, index, shared, residual, norm_weight):
    y = reduced(rows, weights, index)
    total = residual + y
    return norm(total, norm_weight), y * 2


@case("what the all_reduce feeds is read several times (aten.add.Tensor)")
def all_reduce_returned(rows, weights, index, shared, residual, norm_weight):
    y = reduced(rows, weights, index)
    total = residual + y
    return norm(total, norm_weight), y


@case(
    "an intermediate is read elsewhere: "
    "aten.sum.dim_IntList (sum_1) is also read by aten.mul.Tensor"
)
def finalize_read_elsewhere(rows, weights, index, shared, residual, norm_weight):
    routed = finalize(rows, weights, index)
    total = residual + reduce(routed)
    return norm(total, norm_weight), routed * 2


@case("an intermediate is read elsewhere: aten.sum.dim_IntList (sum_1) is also read by output")
def finalize_returned(rows, weights, index, shared, residual, norm_weight):
    routed = finalize(rows, weights, index)
    total = residual + reduce(routed)
    return norm(total, norm_weight), routed


@case("the norm comes before the residual add")
def norm_before_residual(rows, weights, index, shared, residual, norm_weight):
    total = residual + norm(reduced(rows, weights, index), norm_weight)
    return total, total * 2


@case("a LayerNorm reads the sum: expected an RMSNorm")
def layer_norm(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    return torch.nn.functional.layer_norm(total, (inputs.H,), norm_weight), total


@case("a LayerNorm reads the sum: expected an RMSNorm")
def layer_norm_by_hand(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    centred = total.float() - total.float().mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return norm_weight * (centred * torch.rsqrt(variance + 1e-6)).to(total.dtype), total


@case("the all_reduce comes before the finalize")
def reduced_before_the_sum_over_experts(rows, weights, index, shared, residual, norm_weight):
    each = reduce(rows[: index.numel()] * weights.reshape(-1, 1))
    total = residual + each.view(*index.shape, -1).sum(1)
    return norm(total, norm_weight), total


@case("a slice comes between the all_reduce and the norm")
def slice_between(rows, weights, index, shared, residual, norm_weight):
    total = residual[:3] + reduced(rows, weights, index)[:3]
    return norm(total, norm_weight), total


@case("a cat comes between the all_reduce and the norm")
def cat_between(rows, weights, index, shared, residual, norm_weight):
    total = torch.cat([residual, reduced(rows, weights, index)])
    return norm(total, norm_weight), total


@case("a view splits the rows")
def rows_split(rows, weights, index, shared, residual, norm_weight):
    total = (residual + reduced(rows, weights, index)).view(-1, inputs.H // 2)
    return norm(total, norm_weight[: inputs.H // 2]), total


@case("no RMSNorm reads the sum")
def no_norm(rows, weights, index, shared, residual, norm_weight):
    return residual + reduced(rows, weights, index), residual * 2


@case("the RMSNorm is not one that is known: expected x * rsqrt(mean(x ** 2, -1) + eps), eps >= 0")
def eps_after_the_root(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    wide = total.float()
    root = wide.pow(2).mean(-1, keepdim=True).sqrt()
    return norm_weight * (wide / (root + 1e-6)).to(total.dtype), total


@case("the RMSNorm is not one that is known: expected x * rsqrt(mean(x ** 2, -1) + eps), eps >= 0")
def divided_by_a_vector_norm(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    wide = total.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return norm_weight * (wide / (length + 1e-6) * inputs.H**0.5).to(total.dtype), total


@case("aten.sin comes between the all_reduce and the norm")
def activation_between(rows, weights, index, shared, residual, norm_weight):
    total = residual + torch.sin(reduced(rows, weights, index))
    return norm(total, norm_weight), total


@case("the residual is torch.float32 but its sum is read rounded to torch.bfloat16")
def wide_residual_read_rounded(rows, weights, index, shared, residual, norm_weight):
    wide = residual.float() * 1.001
    total = (wide + reduced(rows, weights, index).float()).to(rows.dtype)
    return norm(total, norm_weight), total


@case("what the all_reduce feeds is read several times (prims.convert_element_type)")
def wide_residual_read_rounded_and_unrounded(rows, weights, index, shared, residual, norm_weight):
    total = residual.float() * 1.001 + reduced(rows, weights, index).float()
    return norm(total.to(rows.dtype), norm_weight), total


@case("what is added after the reduction is torch.float32: expected torch.bfloat16")
def wide_replicated(rows, weights, index, shared, residual, norm_weight):
    y = reduced(rows, weights, index).float() + shared.float() * 1.001
    total = residual.float() + y
    wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return norm_weight * wide.to(rows.dtype), total


@case("the norm's weight is computed from the sum")
def weight_from_the_sum(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    return norm(total, total.mean(0)), total


@case("the reduction is 'avg': expected 'sum'")
def coalesced_average(rows, weights, index, shared, residual, norm_weight):
    partial = finalize(rows, weights, index)
    total = residual + funcol.all_reduce_coalesced([partial], "avg", "0")[0]
    return norm(total, norm_weight), total


@case("the sum is divided by a tensor: expected a factor, as its reciprocal is rounded")
def divided_by_a_tensor(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index) / norm_weight[0]
    return norm(total, norm_weight), total


@case("aten.div.Tensor comes between the all_reduce and the norm")
def divides_a_tensor(rows, weights, index, shared, residual, norm_weight):
    total = residual + norm_weight[0] / reduced(rows, weights, index)
    return norm(total, norm_weight), total
