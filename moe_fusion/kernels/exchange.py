"""Push units to ranks, wait for units from ranks: the protocol's moves, and its clock.

Each move is one function with a PTX body and a portable twin. ``BACKEND`` picks: ``"ptx"``,
``"amd"`` (portable, with the chip's constant-rate clock) or ``"interpreter"`` (portable, with the
host's clock).

Shape legend: N elements of a segment of a row, U = N * itemsize / 16 units of 16 bytes, one a
thread; W world size; S segments of a row, padded to a power of two.
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
    """A clock that all blocks on this device share, in nanoseconds; the PTX reads its own."""
    if BACKEND == "interpreter":
        return _host_clock_ns()
    else:
        return hip.memrealtime() * AMD_CLOCK_PERIOD_NS


@triton.jit
def _words_of(address, inside, U: tl.constexpr):
    """Pointers to the four words of each unit and the mask of those inside: [4 * U] each."""
    bytes_in = tl.arange(0, 4).to(tl.int64)[None, :] * 4
    pointer = tl.reshape(address[:, None] + bytes_in, [4 * U]).to(tl.pointer_type(tl.int32))
    return pointer, tl.reshape(tl.broadcast_to(inside[:, None], [U, 4]), [4 * U])


@triton.jit
def push(words, address, inside, BACKEND: tl.constexpr, U: tl.constexpr):
    """Store words, [4 * U], at each unit's address, [U]; ``inside`` [U] masks units."""
    if BACKEND == "ptx":
        first, second, third, fourth = words_to_units(words, U)
        tl.inline_asm_elementwise(
            ptx.PUSH,
            ptx.PUSH_OPERANDS,
            [address, first, second, third, fourth, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        pointer, mask = _words_of(address, inside, U)
        tl.store(pointer, words, mask=mask, cache_modifier=".wt")


@triton.jit
def warn(address, offset, ranks, BACKEND: tl.constexpr, U: tl.constexpr):
    """Store ``ranks``, [U], ``offset`` past ``address`` before what is pushed later, unless 0."""
    if BACKEND == "ptx":
        tl.inline_asm_elementwise(
            ptx.WARN,
            ptx.WARN_OPERANDS,
            [address, offset, ranks],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        pointer = (address + offset).to(tl.pointer_type(tl.int32))
        tl.store(pointer + tl.zeros([U], tl.int32), ranks, mask=ranks != 0)


@triton.jit
def _wait_and_sum_ptx(
    own, own_words, address, rank_stride, inside, deadline, timeout, DTYPE: tl.constexpr,
    N: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    text: tl.constexpr = ptx.wait_text(W, DTYPE)
    first, second, third, fourth = words_to_units(own_words, U)
    inside = inside.to(tl.int32)
    operands = [
        address, rank_stride, own, first, second, third, fourth, inside, deadline, timeout,
    ]  # fmt: skip
    if DTYPE.primitive_bitwidth == 32:
        e0, e1, e2, e3, missing, deadline = tl.inline_asm_elementwise(
            text,
            ptx.WAIT_32_OPERANDS,
            operands,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.int32, tl.int64),
            is_pure=False,
            pack=1,
        )
        total = tl.join(tl.join(e0, e2), tl.join(e1, e3))
    else:
        e0, e1, e2, e3, e4, e5, e6, e7, missing, deadline = tl.inline_asm_elementwise(
            text,
            ptx.WAIT_16_OPERANDS,
            operands,
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
                tl.int64,
            ),
            is_pure=False,
            pack=1,
        )
        even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
        odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
        total = tl.join(even, odd)
    return tl.reshape(total, [N]), missing, deadline


@triton.jit
def _missing_ranks(own, address, rank_stride, inside, U: tl.constexpr, W: tl.constexpr):
    """The regions of which a word is missing, one bit each: [U]."""
    missing = tl.zeros([U], tl.int32)
    for rank in tl.static_range(W):
        polled = tl.where(own == rank, False, inside)
        pointer, mask = _words_of(address + rank * rank_stride, polled, U)
        words = tl.load(pointer, mask=mask, other=0, volatile=True)
        empty = tl.reshape((words == SENTINEL_WORD).to(tl.int32), [U, 4])
        missing |= tl.max(empty, 1) << rank
    return missing


@triton.jit
def _wait_and_sum_portable(
    own,
    own_words,
    address,
    rank_stride,
    inside,
    deadline,
    timeout,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    missing = _missing_ranks(own, address, rank_stride, inside, U, W)
    if tl.max(missing, 0) != 0:
        deadline = tl.where(deadline == 0, clock_ns(BACKEND) + timeout, deadline)
    last = tl.max(deadline, 0)
    while (tl.max(missing, 0) != 0) & (clock_ns(BACKEND) < last):
        missing = _missing_ranks(own, address, rank_stride, inside, U, W)
    total = tl.zeros([N], tl.float32)
    for rank in tl.static_range(W):
        polled = tl.where(own == rank, False, inside)
        pointer, mask = _words_of(address + rank * rank_stride, polled, U)
        _, within = _words_of(address, inside, U)
        words = tl.load(pointer, mask=mask, other=0, volatile=True)
        words = tl.where(mask, words, tl.where(within, own_words, 0))
        addend = from_words(words, DTYPE, N)
        total = addend if rank == 0 else total + addend
        tl.debug_barrier()
        tl.store(pointer, tl.full([4 * U], SENTINEL_WORD, tl.int32), mask=mask)
    return total, missing, deadline


@triton.jit
def wait_and_sum(
    own,
    own_words,
    address,
    rank_stride,
    inside,
    deadline,
    timeout,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
):
    """Wait for a unit of each of W regions, clear them, and add them in region order in fp32.

    Args:
        own: the region that is not waited for, a scalar or [U].
        own_words: [4 * U], that region's words.
        address: [U] int64, each unit in the first region.
        rank_stride: bytes from one region to the next.
        inside: [U], the units to wait for.
        deadline: [U] int64, in nanoseconds of the clock; 0 where none is set yet.
        timeout: from the first wait that is not over at once to the deadline, in nanoseconds.

    Returns:
        The sum, [N] fp32, 0 outside; the regions that were missing at the deadline, one bit each,
        [U]; the deadline, for the waits that follow. Where a region is missing the sum is NaN.
    """
    if BACKEND == "ptx":
        return _wait_and_sum_ptx(
            own, own_words, address, rank_stride, inside, deadline, timeout, DTYPE, N, U, W
        )
    else:
        return _wait_and_sum_portable(
            own, own_words, address, rank_stride, inside, deadline, timeout, DTYPE, BACKEND, N, U,
            W,
        )  # fmt: skip


@triton.jit
def tell(pointer, value, call, BACKEND: tl.constexpr):
    """Leave an fp32 scalar for the other blocks of this launch, marked with the call's number."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (call << 32) | bits
    if BACKEND == "ptx":
        tl.inline_asm_elementwise(
            ptx.TELL,
            ptx.TELL_OPERANDS,
            [pointer.to(tl.int64), word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, word)


@triton.jit
def _mark(word):
    """The number of the call that told a word, modulo 2 ** 32."""
    return (word >> 32) & 0xFFFFFFFF


@triton.jit
def _told_portable(pointer, call, inside, timeout, BACKEND: tl.constexpr):
    words = tl.load(pointer, mask=inside, other=0, volatile=True)
    late = tl.max((inside & (_mark(words) != call)).to(tl.int32), 0)
    deadline = clock_ns(BACKEND) + timeout
    while (late != 0) & (clock_ns(BACKEND) < deadline):
        words = tl.load(pointer, mask=inside, other=0, volatile=True)
        late = tl.max((inside & (_mark(words) != call)).to(tl.int32), 0)
    return words


@triton.jit
def told(pointer, call, inside, timeout, BACKEND: tl.constexpr):
    """Wait for what the blocks of this launch tell: [S] each, words inside and whether each came.

    A word that did not come within ``timeout`` nanoseconds counts as NaN, one outside as 0.
    """
    call = call & 0xFFFFFFFF
    if BACKEND == "ptx":
        words = tl.inline_asm_elementwise(
            ptx.TOLD,
            ptx.TOLD_OPERANDS,
            [pointer.to(tl.int64), call, inside.to(tl.int32), timeout],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = _told_portable(pointer, call, inside, timeout, BACKEND)
    value = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    came = ~inside | (_mark(words) == call)
    return tl.where(inside & came, value, tl.where(came, 0.0, float("nan"))), came
