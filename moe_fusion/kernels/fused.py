"""The fused tail in one kernel: finalize, exchange, residual add and RMSNorm.

The protocol, its state and why two slots are enough: docs/kernel.md.

Shape legend: T num_tokens, K top_k, H hidden_dim, W world size. A row is cut into S segments of
N elements, which are U units of 16 bytes, one a thread. Block ``g * S + s`` has segment s of rows
g, g + G, ... where G rows are worked on at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_fusion.kernels.exchange import tell
from moe_fusion.kernels.rows import (
    aligned,
    load_optional,
    narrow,
    partial_row,
    product_of_scales,
)
from moe_fusion.kernels.segments import (
    SLOTS,
    STATE_CALLS,
    STATE_MISSING,
    UNIT_BYTES,
    UNITS,
    add,
    columns_of,
    count_reader,
    extended,
    finish,
    hand_on,
    owned_place,
    place_of,
    receive,
    row_square_sum,
    send,
    sum_owned,
)
from moe_fusion.kernels.words import to_words

NOT_SPECIALIZED = [  # an int that is 1 on one rank would be compiled apart there
    "output_scale_tensor",  # may begin anywhere
    "rank",
    "num_tokens",
    "routed_stride",
    "shared_stride",
    "replicated_stride",
    "residual_stride",
    "region_bytes",
    "timeout_ns",
    *(f"peer_{i}" for i in range(8)),
]


@triton.jit
def _one_row(
    norm_out, residual_out, routed, expert_weights, permutation, shared, replicated, residual,
    norm_weight, peers, state, error_word, square_sums, rank, routed_stride,
    shared_stride, replicated_stride, residual_stride, region_bytes, slot, call, missed, deadline,
    timeout, eps, weight_bias, routed_scale, output_scale, TOP_K: tl.constexpr,
    UNROLL: tl.constexpr, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """This block's segment of its only row, in registers from the first load to the last store."""
    dtype: tl.constexpr = norm_out.dtype.element_ty
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    column, mask = columns_of(segment, N, H)
    place, inside = place_of(row, segment, H * dtype.primitive_bitwidth // 8)
    offset = slot + place
    partial = partial_row(
        routed, expert_weights, permutation, shared, row, aligned(routed_stride),
        aligned(shared_stride), routed_scale, column, mask, TOP_K, UNROLL, H, N, BACKEND,
    )  # fmt: skip
    words = to_words(narrow(partial, dtype, BACKEND), N)
    send(words, peers, offset + rank * region_bytes, rank, inside, missed, W, TWO_SHOT, BACKEND)
    readers_before = count_reader(state)  # needed last, and on its way while this block waits
    replicated_row = load_optional(replicated, row * aligned(replicated_stride), column, mask)
    residual_row = load_optional(residual, row * aligned(residual_stride), column, mask)
    weight_row = load_optional(norm_weight, 0, column, mask)
    missing = tl.zeros([UNITS], tl.int32)
    if TWO_SHOT:
        owned = tl.where(tl.arange(0, UNITS) // (UNITS // W) == rank, inside, False)
        missing, deadline = sum_owned(
            peers, offset, rank, region_bytes, owned, missed, deadline, timeout, dtype, N, W,
            BACKEND,
        )  # fmt: skip
        deadline = extended(deadline, timeout)
    reduced, absent, deadline = receive(
        words, peers[0] + offset, rank, region_bytes, inside, deadline, timeout, dtype, N, W,
        TWO_SHOT, BACKEND,
    )  # fmt: skip
    rounded, square_sum = add(
        residual_out, reduced, replicated_row, residual_row, output_scale, missed,
        missing | absent, state, error_word, peers, rank, region_bytes, replicated is not None,
        residual is not None, W, TWO_SHOT, BACKEND,
    )  # fmt: skip
    tell(square_sums + row * S + segment, square_sum, call, BACKEND)
    if PDL:
        gdc_launch_dependents()
    out = row * H + column
    tl.store(residual_out + out, rounded, mask=mask)
    square_sum, _ = row_square_sum(
        square_sums, state, error_word, rank, row, call, 5 * timeout, S, BACKEND
    )
    finish(
        norm_out, residual_out, rounded, weight_row, state, out, mask, square_sum, eps,
        weight_bias, norm_weight is not None, H, N, BACKEND,
    )  # fmt: skip
    return readers_before


@triton.jit
def _send_rows(
    norm_out, routed, expert_weights, permutation, shared, peers, rank, first_row, row_step,
    num_tokens, segment, column, mask, routed_stride, shared_stride, region_bytes, slot, missed,
    routed_scale, TOP_K: tl.constexpr, UNROLL: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, TWO_SHOT: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Finalize and push a segment of each row; one-shot keeps it in ``norm_out`` as well."""
    dtype: tl.constexpr = norm_out.dtype.element_ty
    ROW_BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
    for row in range(first_row, num_tokens, row_step):
        place, inside = place_of(row, segment, ROW_BYTES)
        partial = partial_row(
            routed, expert_weights, permutation, shared, row, aligned(routed_stride),
            aligned(shared_stride), routed_scale, column, mask, TOP_K, UNROLL, H, N, BACKEND,
        )  # fmt: skip
        partial = narrow(partial, dtype, BACKEND)
        target = slot + place + rank * region_bytes
        send(to_words(partial, N), peers, target, rank, inside, missed, W, TWO_SHOT, BACKEND)
        if not TWO_SHOT:
            tl.store(norm_out + row * H + column, partial, mask=mask)


@triton.jit
def _many_rows(
    norm_out, residual_out, routed, expert_weights, permutation, shared, replicated, residual,
    norm_weight, peers, state, error_word, square_sums, rank, num_tokens, routed_stride,
    shared_stride, replicated_stride, residual_stride, region_bytes, slot, call, missed, deadline,
    timeout, eps, weight_bias, routed_scale, output_scale, TOP_K: tl.constexpr,
    UNROLL: tl.constexpr, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """This block's segment of each of its rows: all are sent, then all are received.

    Each row is finished after the next one was received, when its siblings have told their sums.
    """
    dtype: tl.constexpr = norm_out.dtype.element_ty
    ROW_BYTES: tl.constexpr = H * dtype.primitive_bitwidth // 8
    first_row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    row_step = tl.num_programs(0) // S
    column, mask = columns_of(segment, N, H)
    _send_rows(
        norm_out, routed, expert_weights, permutation, shared, peers, rank, first_row, row_step,
        num_tokens, segment, column, mask, routed_stride, shared_stride, region_bytes, slot,
        missed, routed_scale, TOP_K, UNROLL, H, N, W, TWO_SHOT, BACKEND,
    )  # fmt: skip
    readers_before = count_reader(state)
    missing = tl.zeros([UNITS], tl.int32)
    if TWO_SHOT:
        for row in range(first_row, num_tokens, row_step * W):
            place, owned = owned_place(row, row_step, num_tokens, segment, rank, ROW_BYTES, W)
            absent, deadline = sum_owned(
                peers, slot + place, rank, region_bytes, owned, missed, deadline, timeout, dtype,
                N, W, BACKEND,
            )  # fmt: skip
            missing |= absent
        deadline = extended(deadline, timeout)
    weight_row = load_optional(norm_weight, 0, column, mask)
    before = tl.zeros([N], residual_out.dtype.element_ty)
    before_row = first_row
    patience = 5 * timeout
    for row in range(first_row, num_tokens, row_step):
        place, inside = place_of(row, segment, ROW_BYTES)
        words = tl.zeros([4 * UNITS], tl.int32)
        if not TWO_SHOT:
            words = to_words(tl.load(norm_out + row * H + column, mask=mask, other=0.0), N)
        replicated_row = load_optional(replicated, row * aligned(replicated_stride), column, mask)
        residual_row = load_optional(residual, row * aligned(residual_stride), column, mask)
        reduced, absent, deadline = receive(
            words, peers[0] + slot + place, rank, region_bytes, inside, deadline, timeout, dtype,
            N, W, TWO_SHOT, BACKEND,
        )  # fmt: skip
        rounded, square_sum = add(
            residual_out, reduced, replicated_row, residual_row, output_scale, missed,
            missing | absent, state, error_word, peers, rank, region_bytes, replicated is not None,
            residual is not None, W, TWO_SHOT, BACKEND,
        )  # fmt: skip
        tell(square_sums + row * S + segment, square_sum, call, BACKEND)
        tl.store(residual_out + row * H + column, rounded, mask=mask)
        if row > first_row:
            square_sum, patience = row_square_sum(
                square_sums, state, error_word, rank, before_row, call, patience, S, BACKEND
            )
            finish(
                norm_out, residual_out, before, weight_row, state, before_row * H + column, mask,
                square_sum, eps, weight_bias, norm_weight is not None, H, N, BACKEND,
            )  # fmt: skip
        before = rounded
        before_row = first_row - first_row + row
    if PDL:
        gdc_launch_dependents()
    square_sum, _ = row_square_sum(
        square_sums, state, error_word, rank, before_row, call, patience, S, BACKEND
    )
    finish(
        norm_out, residual_out, before, weight_row, state, before_row * H + column, mask,
        square_sum, eps, weight_bias, norm_weight is not None, H, N, BACKEND,
    )  # fmt: skip
    return readers_before


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def fused_kernel(
    norm_out, residual_out,  # [T,H] each
    routed,  # [R,H] or [T,H]
    expert_weights, permutation,  # [T,K] each, or None
    shared, replicated, residual,  # [T,H] each, or None
    norm_weight,  # [H] or None
    output_scale_tensor,  # [] or None
    state,  # [STATE_WORDS] int64
    error_word,  # [1] int32 in host memory
    square_sums,  # [T * S] int64: what blocks that share a row tell each other
    rank, num_tokens, routed_stride, shared_stride, replicated_stride, residual_stride,
    region_bytes, timeout_ns, eps, weight_bias, routed_scale, output_scale,
    peer_0, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6, peer_7,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ONCE: tl.constexpr, TWO_SHOT: tl.constexpr, PDL: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Finalize, all_reduce, residual add and RMSNorm of this block's segments of its rows.

    ``peer_i`` is the address of the workspace of the rank that comes i after this one.
    """
    N: tl.constexpr = UNITS * UNIT_BYTES * 8 // norm_out.dtype.element_ty.primitive_bitwidth
    S: tl.constexpr = (H + N - 1) // N
    peers = (peer_0, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6, peer_7)
    if PDL:
        gdc_wait()
    call = tl.load(state + STATE_CALLS)
    missed = tl.load(state + STATE_MISSING, volatile=True).to(tl.int32)
    region_bytes = region_bytes.to(tl.int64)
    timeout = timeout_ns.to(tl.int64)
    slot = call % SLOTS * ((W + 1) * region_bytes)
    # A call that no longer waits has a deadline that is long past.
    deadline = tl.zeros([UNITS], tl.int64) + (missed != 0).to(tl.int64)
    output_scale = product_of_scales(output_scale, output_scale_tensor, BACKEND)
    if ONCE:
        readers_before = _one_row(
            norm_out, residual_out, routed, expert_weights, permutation, shared, replicated,
            residual, norm_weight, peers, state, error_word, square_sums, rank,
            routed_stride, shared_stride, replicated_stride, residual_stride, region_bytes, slot,
            call, missed, deadline, timeout, eps, weight_bias, routed_scale, output_scale, TOP_K,
            UNROLL, H, N, W, S, TWO_SHOT, PDL, BACKEND,
        )  # fmt: skip
    else:
        readers_before = _many_rows(
            norm_out, residual_out, routed, expert_weights, permutation, shared, replicated,
            residual, norm_weight, peers, state, error_word, square_sums, rank, num_tokens,
            routed_stride, shared_stride, replicated_stride, residual_stride, region_bytes, slot,
            call, missed, deadline, timeout, eps, weight_bias, routed_scale, output_scale, TOP_K,
            UNROLL, H, N, W, S, TWO_SHOT, PDL, BACKEND,
        )  # fmt: skip
    hand_on(state, readers_before, call)
