"""The two kernels around the group's own all_reduce: finalize before it, add and norm after it.

Shape legend: T num_tokens, K top_k, H hidden_dim; N the power of two that holds H. One block a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from moe_fusion.contract import TailArguments
from moe_fusion.kernels.launch import backend, dense, op_tensors, row_parameters
from moe_fusion.kernels.rows import (
    load_optional,
    narrow,
    partial_row,
    product_of_scales,
    residual_sum,
    scaled_norm,
    widen,
)


@triton.jit
def finalize_kernel(
    partial,  # [T,H]
    routed,  # [R,H] or [T,H]
    expert_weights,  # [T,K] or None
    permutation,  # [T,K] int32 or None
    shared,  # [T,H] or None
    routed_stride,
    shared_stride,
    routed_scale,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """``routed_scale * finalize + shared`` of row ``program_id(0)``, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    mask = column < H
    total = partial_row(
        routed, expert_weights, permutation, shared, row, routed_stride, shared_stride,
        routed_scale, column, mask, TOP_K, UNROLL, H, N, BACKEND,
    )  # fmt: skip
    total = narrow(total, partial.dtype.element_ty, BACKEND)
    tl.store(partial + row * H + column, total, mask=mask)


@triton.jit
def add_rms_norm_kernel(
    norm_out,  # [T,H]
    residual_out,  # [T,H]
    reduced,  # [T,H], contiguous
    replicated,  # [T,H] or None
    residual,  # [T,H] or None
    norm_weight,  # [H] or None
    output_scale_tensor,  # [] or None
    replicated_stride,
    residual_stride,
    eps,
    weight_bias,
    output_scale,
    H: tl.constexpr,
    N: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """Output scale, replicated output, residual add and RMSNorm of row ``program_id(0)``."""
    residual_dtype: tl.constexpr = residual_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    mask = column < H
    out = row * H + column
    output_scale = product_of_scales(output_scale, output_scale_tensor, BACKEND)
    sum_row = widen(tl.load(reduced + out, mask=mask, other=0.0), BACKEND)
    replicated_row = load_optional(replicated, row * replicated_stride, column, mask)
    residual_row = load_optional(residual, row * residual_stride, column, mask)
    weight_row = load_optional(norm_weight, 0, column, mask)
    value = residual_sum(
        sum_row, replicated_row, residual_row, output_scale, replicated is not None,
        residual is not None, BACKEND,
    )  # fmt: skip
    rounded = narrow(value, residual_dtype, BACKEND)
    value = widen(rounded, BACKEND)
    norm = scaled_norm(
        value, tl.sum(value * value, 0), weight_row, eps, weight_bias, norm_weight is not None, H,
        BACKEND,
    )  # fmt: skip
    tl.store(residual_out + out, rounded, mask=mask)
    tl.store(norm_out + out, narrow(norm, norm_out.dtype.element_ty, BACKEND), mask=mask)


def finalize(args: TailArguments) -> Tensor:
    """This rank's partial: [T, H] in the activation dtype, T at least 1."""
    chosen = row_parameters(args.hidden_dim, args.routed.dtype)
    routed, weights, permutation, shared, *_ = dense(op_tensors(args))
    assert routed is not None
    partial = args.routed.new_empty((args.num_tokens, args.hidden_dim))
    finalize_kernel[(args.num_tokens,)](
        partial,
        routed,
        weights,
        permutation,
        shared,
        routed.stride(0),
        0 if shared is None else shared.stride(0),
        float(args.routed_scaling_factor),
        TOP_K=args.top_k or 1,
        UNROLL=min(chosen.unroll, args.top_k or 1),
        H=args.hidden_dim,
        N=chosen.block_elements,
        BACKEND=backend(finalize_kernel),
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
    )
    return partial


def add_rms_norm(reduced: Tensor, args: TailArguments) -> tuple[Tensor, Tensor]:
    """``norm_out`` and ``residual_out`` from the all_reduce's output, [T, H] each."""
    chosen = row_parameters(args.hidden_dim, args.routed.dtype)
    replicated, residual, norm_weight, output_scale_tensor = dense(op_tensors(args))[4:]
    norm_out = torch.empty_like(reduced)
    residual_out = torch.empty_like(reduced, dtype=args.residual_dtype)
    add_rms_norm_kernel[(args.num_tokens,)](
        norm_out,
        residual_out,
        reduced,
        replicated,
        residual,
        norm_weight,
        output_scale_tensor,
        0 if replicated is None else replicated.stride(0),
        0 if residual is None else residual.stride(0),
        float(args.eps),
        float(args.weight_bias),
        float(args.output_scale),
        H=args.hidden_dim,
        N=chosen.block_elements,
        BACKEND=backend(add_rms_norm_kernel),
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
    )
    return norm_out, residual_out


def composite(args: TailArguments, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Finalize, the group's all_reduce, add and norm: any T at least 1, any H, any group.

    Args:
        args: this rank's arguments, checked.
        group: the group, whose backend decides the order and the rounding of the reduction; None
            is this rank alone.

    Returns:
        ``norm_out`` and ``residual_out``, [T, H] each.
    """
    partial = finalize(args)
    if group is not None:
        dist.all_reduce(partial, group=group)
    return add_rms_norm(partial, args)
