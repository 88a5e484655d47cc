"""Activations as 32-bit words, the unit in which ranks exchange them.

A word that has not arrived holds :data:`SENTINEL_WORD`, all ones, which for 16-bit dtypes is two
NaNs of payload 0xFFFF and for fp32 one. :func:`to_words` turns the NaN of that payload into
another NaN, so no word that was sent equals the sentinel, and no other value changes: -0.0,
subnormals and infinities travel as they are.

Shape legend: N elements of a block of a row, a power of two; U 16-byte units, four words each.
"""

from __future__ import annotations

import triton
import triton.language as tl

SENTINEL_WORD = tl.constexpr(-1)
POSITIVE_NAN_16 = tl.constexpr(0x7FFF)  # a NaN in bf16 and in fp16
POSITIVE_NAN_32 = tl.constexpr(0x7FFFFFFF)


@triton.jit
def to_words(value, N: tl.constexpr):
    """[N] activations as int32 words of one or two elements, the first in the low half."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
        return tl.where(bits == -1, POSITIVE_NAN_32, bits)
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits == -1, POSITIVE_NAN_16, bits)
        low, high = tl.split(tl.reshape(bits, [N // 2, 2]))
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def from_words(words, DTYPE: tl.constexpr, N: tl.constexpr):
    """The inverse of :func:`to_words`, widened to fp32, exactly: [N]."""
    if DTYPE == tl.float32:
        return words.to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        pairs = tl.join(words << 16, words & -65536)
        return tl.reshape(pairs, [N]).to(tl.float32, bitcast=True)
    else:
        pairs = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        return tl.reshape(pairs, [N]).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def words_to_units(words, U: tl.constexpr):
    """[4 * U] words as the four [U] words of each unit; [8] gives ([0,4], [1,5], [2,6], [3,7])."""
    even, odd = tl.split(tl.reshape(words, [U, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
