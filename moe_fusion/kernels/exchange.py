"""Push a row to every rank, wait for every rank's row: the protocol's two moves, and its clock.

Each move is one function with a PTX body and a portable twin. ``BACKEND`` picks: ``"ptx"``,
``"amd"`` (portable, with the chip's constant-rate clock) or ``"interpreter"`` (portable, with the
host's clock).

Shape legend: N elements of a block of a row, U = N * itemsize / 16 units of 16 bytes, W world size.
"""

from __future__ import annotations

import os
import time

import triton
import triton.language as tl
from triton.language.extra import hip

from moe_fusion.kernels import ptx
from moe_fusion.kernels.words import SENTINEL_WORD, from_words, words_to_units

AMD_CLOCK_PERIOD_NS = tl.constexpr(10)
# Source: s_memrealtime counts at 100 MHz (AMD Instinct MI300 CDNA3 ISA, S_MEMREALTIME).


def _host_clock_ns() -> int:
    """The interpreter's clock; it yields, since peers may wait for this very core."""
    os.sched_yield()
    return time.monotonic_ns()


# Triton refuses a kernel that names a plain function, also where the compiler never gets to it.
vars(_host_clock_ns)["__triton_builtin__"] = True


@triton.jit
def clock_ns(BACKEND: tl.constexpr):
    """A clock that all blocks on this device share, in nanoseconds."""
    if BACKEND == "interpreter":
        return _host_clock_ns()
    elif BACKEND == "amd":
        return hip.memrealtime() * AMD_CLOCK_PERIOD_NS
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def push(words, address, inside, BACKEND: tl.constexpr, U: tl.constexpr):
    """Store a row block's words at ``address``; ``inside`` [U] masks the units of the row."""
    unit = tl.arange(0, U)
    if BACKEND == "ptx":
        first, second, third, fourth = words_to_units(words, U)
        tl.inline_asm_elementwise(
            ptx.PUSH,
            ptx.PUSH_OPERANDS,
            [address + unit.to(tl.int64) * 16, first, second, third, fourth, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        pointer = address.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4 * U)
        mask = tl.reshape(tl.broadcast_to(inside[:, None], [U, 4]), [4 * U])
        tl.store(pointer, words, mask=mask, cache_modifier=".wt")


@triton.jit
def _wait_portable(
    address, rank_stride, inside, deadline, BACKEND: tl.constexpr, U: tl.constexpr, W: tl.constexpr
):
    """Poll until no word of any rank is the sentinel, or the deadline has passed."""
    word = tl.arange(0, 4 * U)
    mask = tl.reshape(tl.broadcast_to(inside[:, None], [U, 4]), [4 * U])
    missing = _missing_ranks(address, rank_stride, word, mask, W)
    while (missing != 0) & (clock_ns(BACKEND) < deadline):
        missing = _missing_ranks(address, rank_stride, word, mask, W)
    return missing


@triton.jit
def _wait_and_sum_ptx(
    address,
    rank_stride,
    inside,
    deadline,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    text: tl.constexpr = ptx.wait_text(W, DTYPE)
    unit = address + tl.arange(0, U).to(tl.int64) * 16
    if DTYPE.primitive_bitwidth == 32:
        e0, e1, e2, e3, missing = tl.inline_asm_elementwise(
            text,
            ptx.WAIT_32_OPERANDS,
            [unit, rank_stride, inside.to(tl.int32), deadline],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.int32),
            is_pure=False,
            pack=1,
        )
        total = tl.join(tl.join(e0, e2), tl.join(e1, e3))
    else:
        e0, e1, e2, e3, e4, e5, e6, e7, missing = tl.inline_asm_elementwise(
            text,
            ptx.WAIT_16_OPERANDS,
            [unit, rank_stride, inside.to(tl.int32), deadline],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.int32,
            ),
            is_pure=False,
            pack=1,
        )
        even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
        odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
        total = tl.join(even, odd)
    return tl.reshape(total, [N]), missing


@triton.jit
def _missing_ranks(address, rank_stride, word, mask, W: tl.constexpr):
    """The ranks of which a word is missing, one bit each."""
    missing = tl.full([], 0, tl.int32)
    for rank in tl.static_range(W):
        pointer = (address + rank * rank_stride).to(tl.pointer_type(tl.int32)) + word
        words = tl.load(pointer, mask=mask, other=0, volatile=True)
        missing |= tl.max((words == SENTINEL_WORD).to(tl.int32), 0) << rank
    return missing


@triton.jit
def _wait_and_sum_portable(
    address,
    rank_stride,
    inside,
    deadline,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    word = tl.arange(0, 4 * U)
    mask = tl.reshape(tl.broadcast_to(inside[:, None], [U, 4]), [4 * U])
    missing = _wait_portable(address, rank_stride, inside, deadline, BACKEND, U, W)
    total = tl.zeros([N], tl.float32)
    for rank in tl.static_range(W):
        pointer = (address + rank * rank_stride).to(tl.pointer_type(tl.int32)) + word
        words = tl.load(pointer, mask=mask, other=0, volatile=True)
        addend = from_words(words, DTYPE, N)
        total = addend if rank == 0 else total + addend
    return total, missing


@triton.jit
def wait_and_sum(
    address,
    rank_stride,
    inside,
    deadline,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    """Wait for every rank's row block, then add them in rank order in fp32.

    Returns:
        The sum, [N] fp32, and the ranks that were missing at the deadline, one bit each: [U] or a
        scalar. Where a rank is missing the sum is NaN.
    """
    if BACKEND == "ptx":
        return _wait_and_sum_ptx(address, rank_stride, inside, deadline, DTYPE, N, U, W)
    else:
        return _wait_and_sum_portable(
            address, rank_stride, inside, deadline, DTYPE, BACKEND, N, U, W
        )
