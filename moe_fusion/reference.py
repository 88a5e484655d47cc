"""The tail in plain torch: the specification, the CPU kernel and the only oracle.

Numerics: all sums in fp32; a rank's partial is rounded once to the activation dtype when it is
    sent; ranks are added in rank order in fp32 and the sum is rounded once to the activation dtype,
    as an all_reduce's output is; both output scales are multiplied, and applied, in fp32, each
    exactly as it is given; ``residual_out`` is rounded once, to the residual's dtype, and the
    norm reads the rounded value; weight and bias are applied in fp32 and ``norm_out`` is rounded
    once.

With ``compute_dtype=torch.float64`` every function computes in fp64 and, as no rounding step
applies to an exact oracle, ``tail`` rounds nothing: that is what tests and benchmarks compare
with.

Shape legend: T num_tokens, K top_k, H hidden_dim, R rows of GEMM2's output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_fusion.contract import TailArguments

# Largest error of an output against the fp64 oracle, relative to the oracle's norm. Each stands for
# one rounding of a partial, one of the sum and one of each output, at half an ulp each.
TOLERANCE = {torch.bfloat16: 3.5e-3, torch.float16: 4.5e-4, torch.float32: 2e-6}

# Rounding errors of few elements do not average out, and a partial may be larger than the sum.
FEW_ELEMENTS = 4096
FEW_ELEMENTS_FACTOR = 2.0


def finalize(
    routed: Tensor,
    expert_weights: Tensor | None,
    expanded_idx_to_permuted_idx: Tensor | None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The top-k reduction, added in the order k = 0..K-1: [T, H] in ``compute_dtype``.

    Args:
        routed: [R, H] rows, or [T, H] when ``expert_weights`` is None (then it is only converted).
        expert_weights: [T, K] or None.
        expanded_idx_to_permuted_idx: [T, K] int32, where the row of -1 is not read; None means that
            row ``t * K + k`` belongs to token t, expert k.
        compute_dtype: the dtype in which to sum.
    """
    if expert_weights is None:
        return routed.to(compute_dtype)
    num_tokens, top_k = expert_weights.shape
    total = routed.new_zeros((num_tokens, routed.shape[1]), dtype=compute_dtype)
    for k in range(top_k):
        if expanded_idx_to_permuted_idx is None:
            token = torch.arange(num_tokens, device=routed.device)
            row = token * top_k + k
        else:
            index = expanded_idx_to_permuted_idx[:, k]
            token = (index >= 0).nonzero().squeeze(1)
            row = index[token].long()
        weight = expert_weights[token, k, None].to(compute_dtype)
        total[token] += routed[row].to(compute_dtype) * weight
    return total


def partial(args: TailArguments, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's addend, ``routed_scaling_factor * finalize + shared``: [T, H], not rounded."""
    total = finalize(
        args.routed, args.expert_weights, args.expanded_idx_to_permuted_idx, compute_dtype
    )
    total = total * args.routed_scaling_factor
    if args.shared_output is not None:
        total = total + args.shared_output.to(compute_dtype)
    return total


def all_reduce(partials: Sequence[Tensor], compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum of the ranks' partials in rank order: [T, H] in ``compute_dtype``, not rounded."""
    total = partials[0].to(compute_dtype)
    for addend in partials[1:]:
        total = total + addend.to(compute_dtype)
    return total


def scale(args: TailArguments, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """``output_scale * output_scale_tensor``, which multiplies the reduced sum: 0-d."""
    tensor = args.output_scale_tensor
    device = args.routed.device if tensor is None else tensor.device
    constant = torch.tensor(args.output_scale, dtype=compute_dtype, device=device)
    return constant if tensor is None else constant * tensor.to(compute_dtype)


def finish(
    reduced: Tensor, args: TailArguments, compute_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What each rank does with the reduced sum.

    Args:
        reduced: [T, H], the all_reduce's output.
        args: this rank's arguments.
        compute_dtype: fp32, or fp64 for the oracle, which rounds nothing.

    Returns:
        ``norm_out`` and ``residual_out``, [T, H] each, in the activation dtype and the residual's
        dtype, or both in fp64 for the oracle.
    """
    exact = compute_dtype == torch.float64
    total = reduced.to(compute_dtype) * scale(args, compute_dtype)
    if args.replicated_output is not None:
        total = total + args.replicated_output.to(compute_dtype)
    if args.residual is not None:
        total = args.residual.to(compute_dtype) + total
    residual_out = total if exact else total.to(args.residual_dtype)
    value = residual_out.to(compute_dtype)
    norm = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + args.eps)
    if args.norm_weight is not None:
        norm = norm * (args.weight_bias + args.norm_weight.to(compute_dtype))
    return (norm if exact else norm.to(args.routed.dtype)), residual_out


def tail(
    ranks: Sequence[TailArguments], compute_dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """The whole tail for every rank of a group.

    Args:
        ranks: the arguments of ranks 0..W-1.
        compute_dtype: fp32 for the op's own numerics, fp64 for the oracle.

    Returns:
        ``(norm_out, residual_out)`` of each rank.
    """
    exact = compute_dtype == torch.float64
    partials = [partial(args, compute_dtype) for args in ranks]
    if not exact:
        partials = [p.to(args.routed.dtype) for p, args in zip(partials, ranks, strict=True)]
    reduced = all_reduce(partials, compute_dtype)
    if not exact:
        reduced = reduced.to(ranks[0].routed.dtype)
    return [finish(reduced, args, compute_dtype) for args in ranks]


def tolerance(dtype: torch.dtype, num_elements: int) -> float:
    """The largest relative error of an output of that many elements."""
    return TOLERANCE[dtype] * (FEW_ELEMENTS_FACTOR if num_elements < FEW_ELEMENTS else 1.0)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||``, wherever ``exact`` is; NaN if any element is."""
    return float((got.to(exact) - exact).norm() / exact.norm())
