"""The steps of the fused kernel, each for one segment of a row.

Shape legend: T num_tokens, K top_k, H hidden_dim, W world size. A row is cut into S segments of
N elements, which are U units of 16 bytes, one a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_fusion import buffers, limits
from moe_fusion.kernels import launch
from moe_fusion.kernels.exchange import push, told, wait_and_sum, warn
from moe_fusion.kernels.rows import narrow, residual_sum, scaled_norm, widen
from moe_fusion.kernels.words import SENTINEL_WORD, to_words

# What each of the STATE_WORDS of a workspace holds.
STATE_CALLS = tl.constexpr(0)  # calls that have finished
STATE_READERS = tl.constexpr(1)  # blocks of the running call that have read the state
STATE_MISSING = tl.constexpr(2)  # ranks that did not arrive, one bit each: sticky

PEERS = tl.constexpr(buffers.PEERS)
SLOTS = tl.constexpr(limits.SLOTS_OF_A_WORKSPACE)
UNITS = tl.constexpr(launch.SEGMENT_THREADS)
UNIT_BYTES = tl.constexpr(launch.UNIT_BYTES)


@triton.jit
def _bit_or(left, right):
    return left | right


@triton.jit
def count_reader(state):
    """Count this block as one that has read the state; how many had before it.

    Relaxed is enough, and an acquire would hold back every later load: what was read has been used
    by now, in every thread.
    """
    tl.debug_barrier()
    return tl.atomic_add(state + STATE_READERS, 1, sem="relaxed")


@triton.jit
def hand_on(state, readers_before, call):
    """The last block that read the state writes the next call's."""
    if readers_before == tl.num_programs(0) - 1:
        tl.store(state + STATE_CALLS, call + 1)
        tl.store(state + STATE_READERS, 0)


@triton.jit
def _tidings(rank, region_bytes, W: tl.constexpr):
    """Where in a rank's workspace ``rank`` tells it whom it missed: bytes from the beginning."""
    return SLOTS * (W + 1) * region_bytes + rank * 4


@triton.jit
def _report(
    state, error_word, missing, peers, rank, region_bytes, W: tl.constexpr, TWO_SHOT: tl.constexpr
):
    """Record the ranks that did not arrive, for later blocks and for the host: one bit each.

    A rank that tells whom it missed is alive, though it sends nothing any more.
    """
    other = tl.arange(0, PEERS)
    place = (peers[0] + _tidings(other, region_bytes, W)).to(tl.pointer_type(tl.int32))
    told = tl.load(place, volatile=True)
    told = tl.where(told == SENTINEL_WORD, 0, told)
    alive = tl.reduce(tl.where(told != 0, 1 << other, 0), 0, _bit_or)
    absent = tl.reduce(missing, 0, _bit_or) & ~alive | tl.reduce(told, 0, _bit_or)
    if absent != 0:
        tl.atomic_or(state + STATE_MISSING, absent.to(tl.int64), sem="relaxed")
        tl.atomic_or(error_word, absent, sem="relaxed", scope="sys")
        for i in tl.static_range(1, 1 if TWO_SHOT else W):  # owners have told by now
            target = peers[i] + _tidings(rank, region_bytes, W)
            tl.store(target.to(tl.pointer_type(tl.int32)), absent)


@triton.jit
def place_of(row, segment, ROW_BYTES: tl.constexpr):
    """Where a segment's units are in a region, and which of them are inside the row: [U] each."""
    unit = tl.arange(0, UNITS) + segment * UNITS
    return row * ROW_BYTES + unit.to(tl.int64) * UNIT_BYTES, unit * UNIT_BYTES < ROW_BYTES


@triton.jit
def owned_place(first_row, row_step, num_tokens, segment, rank, ROW_BYTES: tl.constexpr,
                 W: tl.constexpr):  # fmt: skip
    """As :func:`place_of`, of the units that this rank owns in W rows: those of one row are few."""
    share: tl.constexpr = UNITS // W
    row = first_row + tl.arange(0, UNITS) // share * row_step
    unit = segment * UNITS + rank * share + tl.arange(0, UNITS) % share
    inside = (row < num_tokens) & (unit * UNIT_BYTES < ROW_BYTES)
    return row * ROW_BYTES + unit.to(tl.int64) * UNIT_BYTES, inside


@triton.jit
def columns_of(segment, N: tl.constexpr, H: tl.constexpr):
    """The columns of a segment and which of them are inside the row: [N] each."""
    column = segment * N + tl.arange(0, N)
    return column, column < H


@triton.jit
def send(
    words, peers, offset, rank, inside, missed, W: tl.constexpr, TWO_SHOT: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """Push a segment to every other rank, or each unit to its owner alone, this rank or another.

    A rank that missed a peer must not run ahead: it would overwrite rows that are being read.
    """
    sent = tl.where(missed == 0, inside, False)
    if TWO_SHOT:
        distance = (tl.arange(0, UNITS) // (UNITS // W) - rank + W) % W
        address = tl.zeros([UNITS], tl.int64)
        for i in tl.static_range(W):
            address = tl.where(distance == i, peers[i], address)
        push(words, address + offset, sent, BACKEND, UNITS)
    else:
        for i in tl.static_range(1, W):
            push(words, peers[i] + offset, sent, BACKEND, UNITS)


@triton.jit
def sum_owned(
    peers, offset, rank, region_bytes, owned, missed, deadline, timeout, DTYPE: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Sum units that this rank owns and push the sums to every rank; the ranks missing, [U].

    The sum is NaN where a rank is missing, so the others are told which.
    """
    total, missing, deadline = wait_and_sum(
        W, tl.zeros([4 * UNITS], tl.int32), peers[0] + offset, region_bytes, owned, deadline,
        timeout, DTYPE, BACKEND, N, UNITS, W,
    )  # fmt: skip
    words = to_words(narrow(total, DTYPE, BACKEND), N)
    sent = tl.where(missed == 0, owned, False)
    lost = tl.where(missed == 0, missing, 0)
    for i in tl.static_range(1, W):
        warn(peers[i], _tidings(rank, region_bytes, W), lost, BACKEND, UNITS)
    for i in tl.static_range(W):
        push(words, peers[i] + offset + W * region_bytes, sent, BACKEND, UNITS)
    return missing, deadline


@triton.jit
def extended(deadline, timeout):
    """A deadline that is set, moved: an owner that misses a rank sends NaN when its time is over.

    So owners are waited for longer than ranks are, lest one that is alive be reported missing.
    """
    return tl.where(deadline > 1, deadline + timeout, deadline)


@triton.jit
def receive(
    words, address, rank, region_bytes, inside, deadline, timeout, DTYPE: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, TWO_SHOT: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The reduced sum of a segment, rounded, [N] fp32; the ranks missing and the deadline, [U]."""
    if TWO_SHOT:
        total, absent, deadline = wait_and_sum(
            W, words, address + W * region_bytes, region_bytes, inside, deadline, 2 * timeout,
            DTYPE, BACKEND, N, UNITS, 1,
        )  # fmt: skip
        missing = absent << tl.arange(0, UNITS) // (UNITS // W)
    else:
        total, missing, deadline = wait_and_sum(
            rank, words, address, region_bytes, inside, deadline, timeout, DTYPE, BACKEND, N,
            UNITS, W,
        )  # fmt: skip
    return widen(narrow(total, DTYPE, BACKEND), BACKEND), missing, deadline


@triton.jit
def add(
    residual_out, reduced, replicated_row, residual_row, output_scale, missed, missing, state,
    error_word, peers, rank, region_bytes, HAS_REPLICATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    W: tl.constexpr, TWO_SHOT: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The residual sum of a segment, rounded, and its sum of squares; reports what is missing."""
    total = residual_sum(
        reduced, replicated_row, residual_row, output_scale, HAS_REPLICATED, HAS_RESIDUAL, BACKEND
    )
    total = tl.where(missed == 0, total, float("nan"))  # a late row may have come by now
    rounded = narrow(total, residual_out.dtype.element_ty, BACKEND)
    value = widen(rounded, BACKEND)
    square_sum = tl.sum(value * value, 0)
    # A missing word is a NaN. A call that no longer waits has nothing to report; that is no part
    # of the condition, since threads may read `missed` before and after it is set.
    if square_sum != square_sum:
        missing = tl.where(missed == 0, missing, 0)
        _report(state, error_word, missing, peers, rank, region_bytes, W, TWO_SHOT)
    return rounded, square_sum


@triton.jit
def row_square_sum(
    square_sums, state, error_word, rank, row, call, patience, S: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """The row's sum of squares from those of its segments, in an order that depends on H alone.

    A sibling waits for its peers no longer than its deadline, so one that does not tell is a block
    that is not running, and this rank itself is reported; ``patience`` is 0 from then on.
    """
    segment = tl.arange(0, triton.next_power_of_2(S))
    place = square_sums + row * S + segment
    parts, came = told(place, call, segment < S, patience, BACKEND)
    total = tl.sum(parts, 0)
    if total != total:
        late = 1 - tl.min(came.to(tl.int32), 0)
        if late != 0:
            patience = patience - patience
            tl.atomic_or(state + STATE_MISSING, (late << rank).to(tl.int64), sem="relaxed")
            tl.atomic_or(error_word, late << rank, sem="relaxed", scope="sys")
    return total, patience


@triton.jit
def finish(
    norm_out, residual_out, rounded, weight_row, state, out, mask, square_sum, eps, weight_bias,
    HAS_WEIGHT: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Normalise and store a segment; NaN everywhere in the row if a rank was missing."""
    value = widen(rounded, BACKEND)
    norm = scaled_norm(value, square_sum, weight_row, eps, weight_bias, HAS_WEIGHT, H, BACKEND)
    tl.store(norm_out + out, narrow(norm, norm_out.dtype.element_ty, BACKEND), mask=mask)
    if square_sum != square_sum:
        if tl.load(state + STATE_MISSING, volatile=True) != 0:
            poison = tl.full([N], float("nan"), tl.float32)
            tl.store(residual_out + out, poison.to(residual_out.dtype.element_ty), mask=mask)
