"""The fused tail in one kernel: every rank pushes its partial rows to every rank, then sums them.

The protocol, its state and why three slots are enough: docs/kernel.md.

Shape legend: T num_tokens, K top_k, H hidden_dim, W world size; N the power of two that holds H, U
its 16-byte units. One block handles one row; blocks past T only help to clear.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moe_fusion import limits
from moe_fusion.buffers import Workspace
from moe_fusion.contract import TailArguments
from moe_fusion.kernels.exchange import clock_ns, push, wait_and_sum
from moe_fusion.kernels.launch import (
    LaunchParameters,
    backend,
    launch_parameters,
    row_operands,
    unit_row,
)
from moe_fusion.kernels.rows import (
    aligned,
    load_optional,
    narrow,
    partial_row,
    product_of_scales,
    residual_sum,
    rms_norm_row,
    widen,
)
from moe_fusion.kernels.words import SENTINEL_WORD, to_words

SLOTS = tl.constexpr(limits.SLOTS_OF_A_WORKSPACE)

# What each of the STATE_WORDS of a workspace holds.
STATE_SLOT = tl.constexpr(0)  # the slot of the next call
STATE_EXTENT = tl.constexpr(1)  # 16-byte units that the last call wrote, from each rank
STATE_READERS = tl.constexpr(2)  # blocks of the running call that have read the state
STATE_MISSING = tl.constexpr(3)  # ranks that did not arrive, one bit each: sticky

NANOSECONDS_PER_SECOND = 1_000_000_000


@triton.jit
def _bit_or(left, right):
    return left | right


@triton.jit
def _clear(
    address,
    extent,
    rank_bytes,
    CLEAR_UNITS: tl.constexpr,
    W: tl.constexpr,
    BACKEND: tl.constexpr,
):
    """Fill this block's share of the ``extent`` units of each rank with the sentinel.

    The last blocks take the first shares: where rows are few, those blocks have none.
    """
    sentinel = tl.full([4 * CLEAR_UNITS], SENTINEL_WORD, tl.int32)
    unit = tl.arange(0, CLEAR_UNITS)
    step = tl.num_programs(0) * CLEAR_UNITS
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * CLEAR_UNITS
    for start in range(first, extent, step):
        for rank in range(W):
            place = address + rank * rank_bytes + start * 16
            push(sentinel, place, start + unit < extent, BACKEND, CLEAR_UNITS)


@triton.jit
def _count_reader(state):
    """Count this block as one that has read the state; how many had before it.

    Relaxed is enough, and an acquire would hold back every later load: what was read has been used
    by now, in every thread.
    """
    tl.debug_barrier()
    return tl.atomic_add(state + STATE_READERS, 1, sem="relaxed")


@triton.jit
def _hand_on(state, readers_before, slot, extent):
    """The last block that read the state writes the next call's."""
    if readers_before == tl.num_programs(0) - 1:
        tl.store(state + STATE_SLOT, (slot + 1) % SLOTS)
        tl.store(state + STATE_EXTENT, extent)
        tl.store(state + STATE_READERS, 0)


@triton.jit
def _report(state, error_word, missing, BACKEND: tl.constexpr):
    """Record the ranks that did not arrive, for later blocks and for the host: one bit each."""
    absent = missing if BACKEND != "ptx" else tl.reduce(missing, 0, _bit_or)
    if absent != 0:
        tl.atomic_or(state + STATE_MISSING, absent.to(tl.int64), sem="relaxed")
        tl.atomic_or(error_word, absent, sem="relaxed", scope="sys")
    return absent


@triton.jit
def _send(
    words, peers, rank, offset, rank_bytes, inside, U: tl.constexpr, W: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """Push a row to every rank, beginning with this one, so that no rank is everyone's first."""
    for i in tl.static_range(W):
        address = tl.load(peers + (rank + i) % W) + offset + rank * rank_bytes
        push(words, address, inside, BACKEND, U)


@triton.jit(
    do_not_specialize=[
        "output_scale_tensor",  # may begin anywhere
        "rank",
        "num_tokens",
        "routed_stride",
        "shared_stride",
        "replicated_stride",
        "residual_stride",
        "slot_bytes",
        "rank_bytes",
        "timeout_ns",
    ]
)
def one_shot_kernel(
    norm_out,  # [T,H]
    residual_out,  # [T,H]
    routed,  # [R,H] or [T,H]
    expert_weights,  # [T,K] or None
    permutation,  # [T,K] int32 or None
    shared,  # [T,H] or None
    replicated,  # [T,H] or None
    residual,  # [T,H] or None
    norm_weight,  # [H] or None
    output_scale_tensor,  # [] or None
    peers,  # [W] int64: each rank's workspace, as this rank addresses it
    state,  # [STATE_WORDS] int64
    error_word,  # [1] int32 in host memory
    rank, num_tokens, routed_stride, shared_stride, replicated_stride, residual_stride,
    slot_bytes, rank_bytes, timeout_ns, eps, weight_bias, routed_scale, output_scale,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    CLEAR_UNITS: tl.constexpr, PREFETCH: tl.constexpr, W: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Finalize, all_reduce, residual add and RMSNorm of row ``program_id(0)``."""
    dtype: tl.constexpr = norm_out.dtype.element_ty
    residual_dtype: tl.constexpr = residual_out.dtype.element_ty
    ROW_BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
    U: tl.constexpr = N * dtype.primitive_bitwidth // 128
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state + STATE_SLOT)
    previous_extent = tl.load(state + STATE_EXTENT)
    missed = tl.load(state + STATE_MISSING, volatile=True).to(tl.int32)
    own = tl.load(peers + rank)
    offset = slot * slot_bytes + row * ROW_BYTES
    rank_bytes = rank_bytes.to(tl.int64)
    replicated_at = row * aligned(replicated_stride)
    residual_at = row * aligned(residual_stride)
    column = tl.arange(0, N)
    mask = column < H
    inside = tl.arange(0, U) * 16 < ROW_BYTES
    output_scale = product_of_scales(output_scale, output_scale_tensor, BACKEND)
    deadline = tl.where(missed == 0, clock_ns(BACKEND) + timeout_ns.to(tl.int64), 0)
    if row < num_tokens:
        partial = partial_row(
            routed, expert_weights, permutation, shared, row, aligned(routed_stride),
            aligned(shared_stride), routed_scale, column, mask, TOP_K, UNROLL, H, N, BACKEND,
        )  # fmt: skip
        words = to_words(narrow(partial, dtype, BACKEND), N)
        # A rank that missed a peer must not run ahead: it would overwrite rows that are being read.
        sent = tl.where(missed == 0, tl.arange(0, U) * 16, ROW_BYTES) < ROW_BYTES
        _send(words, peers, rank, offset, rank_bytes, sent, U, W, BACKEND)
    cleared = own + (slot + SLOTS - 1) % SLOTS * slot_bytes
    _clear(cleared, previous_extent, rank_bytes, CLEAR_UNITS, W, BACKEND)
    readers_before = _count_reader(state)  # needed last, and on its way while this block waits
    if row < num_tokens:
        if PREFETCH:
            replicated_row = load_optional(replicated, replicated_at, column, mask)
            residual_row = load_optional(residual, residual_at, column, mask)
            weight_row = load_optional(norm_weight, 0, column, mask)
        total, missing = wait_and_sum(
            own + offset, rank_bytes, inside, deadline, dtype, BACKEND, N, U, W
        )
        if not PREFETCH:
            replicated_row = load_optional(replicated, replicated_at, column, mask)
            residual_row = load_optional(residual, residual_at, column, mask)
            weight_row = load_optional(norm_weight, 0, column, mask)
        reduced = widen(narrow(total, dtype, BACKEND), BACKEND)
        value = residual_sum(
            reduced, replicated_row, residual_row, output_scale, replicated is not None,
            residual is not None, BACKEND,
        )  # fmt: skip
        value = widen(narrow(value, residual_dtype, BACKEND), BACKEND)
        norm, square_sum = rms_norm_row(
            value, weight_row, eps, weight_bias, norm_weight is not None, H, BACKEND
        )
        lost = missed
        # A missing word is a NaN. A call that no longer waits has nothing to report; that is no
        # part of the condition, since threads may read `missed` before and after it is set.
        if square_sum != square_sum:
            lost |= _report(state, error_word, tl.where(missed == 0, missing, 0), BACKEND)
        value = tl.where(lost == 0, value, float("nan"))
        norm = tl.where(lost == 0, norm, float("nan"))
        out = row * H + column
        tl.store(residual_out + out, narrow(value, residual_dtype, BACKEND), mask=mask)
        tl.store(norm_out + out, narrow(norm, dtype, BACKEND), mask=mask)
    _hand_on(state, readers_before, slot, num_tokens.to(tl.int64) * (ROW_BYTES // 16))


_loaded: set[tuple[object, ...]] = set()


def _load_first(grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Compile and load the kernel without launching it.

    A rank that loads a module while its peer's kernel spins can wait for ever where both share a
    GPU, since loading may need the device to be idle.
    """
    kinds = tuple(x.dtype if isinstance(x, Tensor) else None for x in arguments)
    key = (arguments[0].device, kinds, *constants.values())
    if key not in _loaded:
        compiled = one_shot_kernel.warmup(*arguments, grid=grid, **constants)
        compiled._init_handles()
        _loaded.add(key)


def _constants(
    args: TailArguments, workspace: Workspace, chosen: LaunchParameters
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    top_k = args.top_k or 1
    return {
        "TOP_K": top_k,
        "UNROLL": min(chosen.unroll, top_k),
        "H": args.hidden_dim,
        "N": chosen.block_elements,
        "CLEAR_UNITS": chosen.clear_units,
        "PREFETCH": chosen.prefetch,
        "W": workspace.world_size,
        "BACKEND": backend(one_shot_kernel),
        "num_warps": chosen.num_warps,
        "enable_fp_fusion": False,
    }


def _operands(args: TailArguments, workspace: Workspace) -> tuple[Any, ...]:
    """The kernel's arguments after its two outputs."""
    routed, weights, permutation, *addends = row_operands(args)
    routed, shared, replicated, residual, norm_weight = map(unit_row, (routed, *addends))
    tensors = (routed, weights, permutation, shared, replicated, residual, norm_weight)
    strides = [0 if t is None else t.stride(0) for t in (routed, shared, replicated, residual)]
    scalars = (args.eps, args.weight_bias, args.routed_scaling_factor, args.output_scale)
    return (
        *tensors,
        args.output_scale_tensor,
        workspace.peers,
        workspace.state,
        workspace.error_word,
        workspace.rank,
        args.num_tokens,
        *strides,
        workspace.slot_bytes,
        workspace.capacity_bytes,
        int(workspace.peer_timeout_s * NANOSECONDS_PER_SECOND),
        *map(float, scalars),
    )


def one_shot(
    args: TailArguments, workspace: Workspace, parameters: LaunchParameters | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the fused kernel on the current stream.

    Args:
        args: this rank's arguments, checked; T at least 1.
        workspace: of this group and dtype, with room for T rows.
        parameters: ``None`` for those of H and the dtype; the same on every rank.

    Returns:
        ``norm_out`` and ``residual_out``, [T, H] each.
    """
    shape = (args.num_tokens, args.hidden_dim)
    chosen = parameters or launch_parameters(args.hidden_dim, args.routed.dtype)
    norm_out = args.routed.new_empty(shape)
    residual_out = args.routed.new_empty(shape, dtype=args.residual_dtype)
    arguments = (norm_out, residual_out, *_operands(args, workspace))
    constants = _constants(args, workspace, chosen)
    grid = (max(args.num_tokens, chosen.min_blocks),)
    if constants["BACKEND"] != "interpreter":
        _load_first(grid, arguments, constants)
    one_shot_kernel[grid](*arguments, **constants)
    return norm_out, residual_out
