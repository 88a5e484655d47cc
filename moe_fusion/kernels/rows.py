"""The arithmetic of one token's row, shared by the fused and the composite kernels.

All sums are fp32. Rounding is to nearest even and happens where :mod:`moe_fusion.reference` says.

Shape legend: N elements of a block of a row, a power of two, of which the first H are the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(value, BACKEND: tl.constexpr):
    """An activation as fp32, exactly."""
    if BACKEND == "interpreter" and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def narrow(value, DTYPE: tl.constexpr, BACKEND: tl.constexpr):
    """fp32 rounded to nearest even; the interpreter's own cast to bf16 truncates."""
    if BACKEND == "interpreter" and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded = tl.where(value == value, rounded, 0x7FFF)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def partial_row(
    routed,
    expert_weights,
    permutation,
    shared,
    row,
    routed_stride,
    shared_stride,
    routed_scale,
    column,
    mask,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """``routed_scale * finalize + shared`` of one row: [N] fp32, 0 outside the row.

    Example: K = 2, map [3, -1], weights [0.5, 0.25] gives ``0.5 * routed[3]``. Row and weight of -1
    are not read: the load mask is off.
    """
    if expert_weights is None:
        total = widen(tl.load(routed + row * routed_stride + column, mask=mask, other=0.0), BACKEND)
    else:
        total = tl.zeros([N], tl.float32)
        first = tl.full([], 0, tl.int32)  # in the interpreter a plain number would mask nothing
        for start in range(0, TOP_K, UNROLL):
            for step in tl.static_range(UNROLL):
                k = first + (start + step)
                present = k < TOP_K
                source = row * TOP_K + k
                if permutation is not None:
                    source = tl.load(permutation + source, mask=present, other=-1).to(tl.int64)
                    present = source >= 0
                weight = tl.load(expert_weights + row * TOP_K + k, mask=present, other=0.0)
                pointer = routed + source * routed_stride + column
                read = column < tl.where(present, H, 0)
                value = tl.load(pointer, mask=read, other=0.0, eviction_policy="evict_first")
                total += widen(value, BACKEND) * widen(weight, BACKEND)
    total *= routed_scale
    if shared is not None:
        addend = tl.load(shared + row * shared_stride + column, mask=mask, other=0.0)
        total += widen(addend, BACKEND)
    return total


@triton.jit
def aligned(stride):
    """A row stride that the launcher has checked to be a multiple of 8 elements, as int64."""
    return tl.multiple_of(stride.to(tl.int64), 8)


@triton.jit
def load_optional(pointer, offset, column, mask):
    """A row of an optional argument, not widened yet: [N], 0 outside the row; of None, anything."""
    if pointer is None:
        return mask
    else:
        return tl.load(pointer + offset + column, mask=mask, other=0.0)


@triton.jit
def product_of_scales(constant, pointer, BACKEND: tl.constexpr):
    """``constant`` times the number at ``pointer``, of any float dtype: fp32; of None, 1."""
    if pointer is None:
        return constant
    else:
        return constant * widen(tl.load(pointer), BACKEND)


@triton.jit
def residual_sum(
    reduced,
    replicated,
    residual,
    output_scale,
    HAS_REPLICATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """``residual + (output_scale * reduced + replicated)``: [N] fp32."""
    total = reduced * output_scale
    if HAS_REPLICATED:
        total += widen(replicated, BACKEND)
    if HAS_RESIDUAL:
        total = widen(residual, BACKEND) + total
    return total


@triton.jit
def scaled_norm(
    value,
    square_sum,
    norm_weight,
    eps,
    weight_bias,
    HAS_WEIGHT: tl.constexpr,
    H: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """RMSNorm of a part of a row, [N] fp32, from the row's sum of squares."""
    norm = value * tl.rsqrt(square_sum / H + eps)
    if HAS_WEIGHT:
        norm *= weight_bias + widen(norm_weight, BACKEND)
    return norm
