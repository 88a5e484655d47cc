"""PTX of the exchange's memory operations, as text.

Ranks exchange 16-byte units, one a thread; blocks of one launch tell each other 8-byte words.
``.volatile`` is relaxed at system scope, and is neither merged nor hoisted:
https://docs.nvidia.com/cuda/parallel-thread-execution/#volatile-operation. A vector access counts
as four accesses of one word, in no order, so the waiter checks each word.
"""

from __future__ import annotations

import triton
import triton.language as tl

POLLS_PER_CLOCK_READ = 64
# Source: a poll takes 0.3 to 1 us, so a deadline is met to within 64 us.

PUSH = tl.constexpr("""
{
    .reg .pred inside;
    setp.ne.s32 inside, $6, 0;
    @inside st.volatile.global.v4.b32 [$1], {$2, $3, $4, $5};
    mov.b32 $0, 0;
}
""")
PUSH_OPERANDS = tl.constexpr("=r,l,r,r,r,r,r")

WARN = tl.constexpr("""
{
    .reg .pred some;
    .reg .b64 place;
    setp.ne.s32 some, $3, 0;
    @some add.s64 place, $1, $2;
    @some st.volatile.global.b32 [place], $3;
    @some fence.acq_rel.sys;
    mov.b32 $0, 0;
}
""")
WARN_OPERANDS = tl.constexpr("=r,l,l,r")

# A word is a call's number and an fp32 value, which one 8-byte access carries together.
TELL = tl.constexpr("""
{
    st.volatile.global.b64 [$1], $2;
    mov.b32 $0, 0;
}
""")
TELL_OPERANDS = tl.constexpr("=r,l,l")
TOLD = tl.constexpr(f"""
{{
    .reg .pred yes;
    .reg .b64 now, deadline;
    .reg .b32 polls, low, high, mark, rest;
    mov.b64 $0, 0;
    mov.b64 deadline, 0;
    mov.b32 polls, 0;
    mov.b64 {{mark, rest}}, $2;
    setp.eq.s32 yes, $3, 0;
    @yes bra done;
    poll:
    ld.volatile.global.b64 $0, [$1];
    mov.b64 {{low, high}}, $0;
    setp.eq.s32 yes, high, mark;
    @yes bra done;
    add.u32 polls, polls, 1;
    and.b32 low, polls, {POLLS_PER_CLOCK_READ - 1};
    setp.ne.u32 yes, low, 0;
    @yes bra poll;
    mov.u64 now, %globaltimer;
    setp.eq.s64 yes, deadline, 0;
    @yes add.s64 deadline, now, $4;
    setp.lt.s64 yes, now, deadline;
    @yes bra poll;
    done:
}}
""")
TOLD_OPERANDS = tl.constexpr("=&l,l,l,r,l")


def _unpack(word: str, bits: int, is_bf16: bool) -> list[str]:
    """Widen one word's elements to fp32 in the registers low and high."""
    if bits == 32:
        return [f"mov.b32 low, {word};"]
    if is_bf16:
        return [f"shl.b32 low, {word}, 16;", f"and.b32 high, {word}, 0xffff0000;"]
    halves = f"mov.b32 {{half_low, half_high}}, {word};"
    return [halves, "cvt.f32.f16 low, half_low;", "cvt.f32.f16 high, half_high;"]


def _sum(world_size: int, bits: int, is_bf16: bool) -> list[str]:
    """Add the words of all ranks, in rank order, to $0, $1, ..."""
    lines = []
    for rank in range(world_size):
        for i in range(4):
            lines += _unpack(f"w{4 * rank + i}", bits, is_bf16)
            parts = ("low",) if bits == 32 else ("low", "high")
            for j, part in enumerate(parts):
                out = f"${len(parts) * i + j}"
                add = f"add.rn.f32 {out}, {out}, {part};"
                lines.append(add if rank else f"mov.b32 {out}, {part};")
    return lines


def wait_and_sum_text(world_size: int, bits: int, is_bf16: bool) -> str:
    """Poll a unit of each rank until all are there or the deadline has passed; clear and add them.

    Operands: the unit's sums, fp32; the ranks that are missing, one bit each; the address of rank
    0's unit; the bytes from one rank's unit to the next; the rank whose unit is not polled, being
    the four words that follow; whether the unit is inside the row; the deadline in nanoseconds of
    the device's clock, or 0 to set it, to be returned, that many nanoseconds after the first look
    at the clock, which costs too much where everything arrives.

    Args:
        world_size: W.
        bits: of one element, 16 or 32.
        is_bf16: whether 16-bit elements are bf16, else fp16.
    """
    sums = 128 // bits
    names = (f"${sums + i}" for i in range(12))
    missing, deadline, address, stride, own, *own_words, inside, given, timeout = names
    words = [f"w{i}" for i in range(4 * world_size)]
    quads = [words[4 * rank : 4 * rank + 4] for rank in range(world_size)]
    lines = [f".reg .b32 {', '.join(words)}, worst, polls;"]
    lines += [f".reg .pred yes, {', '.join(f'other{rank}' for rank in range(world_size))};"]
    lines += [".reg .b64 unit, now;", ".reg .f32 low, high;", ".reg .b16 half_low, half_high;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(sums + 1)]
    lines += [
        f"mov.b64 {deadline}, {given};",
        "mov.b32 polls, 0;",
        f"setp.eq.s32 yes, {inside}, 0;",
        "@yes bra done;",
    ]
    for rank, quad in enumerate(quads):
        lines += [f"setp.ne.s32 other{rank}, {own}, {rank};"]
        lines += [f"mov.b32 {word}, {mine};" for word, mine in zip(quad, own_words, strict=True)]
    lines += ["poll:", f"mov.b64 unit, {address};"]
    for rank, quad in enumerate(quads):
        lines += [f"@other{rank} ld.volatile.global.v4.b32 {{{', '.join(quad)}}}, [unit];"]
        lines += [f"add.s64 unit, unit, {stride};"]
    lines += [f"max.u32 worst, {words[0]}, {words[1]};"]
    lines += [f"max.u32 worst, worst, {word};" for word in words[2:]]
    lines += ["setp.ne.u32 yes, worst, 0xffffffff;", "@yes bra sum;"]
    lines += ["add.u32 polls, polls, 1;", f"and.b32 worst, polls, {POLLS_PER_CLOCK_READ - 1};"]
    lines += ["setp.ne.u32 yes, worst, 0;", "@yes bra poll;", "mov.u64 now, %globaltimer;"]
    lines += [f"setp.eq.s64 yes, {deadline}, 0;", f"@yes add.s64 {deadline}, now, {timeout};"]
    lines += [f"setp.lt.s64 yes, now, {deadline};", "@yes bra poll;"]
    for rank, (first, *rest) in enumerate(quads):
        lines += [f"mov.b32 worst, {first};", *(f"max.u32 worst, worst, {word};" for word in rest)]
        lines += ["setp.eq.u32 yes, worst, 0xffffffff;", f"selp.b32 worst, {1 << rank}, 0, yes;"]
        lines += [f"or.b32 {missing}, {missing}, worst;"]
    lines += ["sum:", f"mov.b64 unit, {address};", "mov.b32 worst, -1;"]
    for rank in range(world_size):
        lines += [f"@other{rank} st.volatile.global.v4.b32 [unit], {{{', '.join(['worst'] * 4)}}};"]
        lines += [f"add.s64 unit, unit, {stride};"]
    body = "\n    ".join([*lines, *_sum(world_size, bits, is_bf16), "done:"])
    return f"\n{{\n    {body}\n}}\n"


# Which ranks a unit is missing is only asked where one is, so the words need not outlive the text.
WAIT = {
    (world_size, dtype): tl.constexpr(
        wait_and_sum_text(world_size, dtype.primitive_bitwidth, dtype == tl.bfloat16)
    )
    for world_size in (1, 2, 4, 8)  # 1: the sum of all, from its owner
    for dtype in (tl.bfloat16, tl.float16, tl.float32)
}
WAIT_16_OPERANDS = tl.constexpr(
    ",".join([*["=&f"] * 8, "=&r", "=&l", "l", "l", *["r"] * 6, "l", "l"])
)
WAIT_32_OPERANDS = tl.constexpr(
    ",".join([*["=&f"] * 4, "=&r", "=&l", "l", "l", *["r"] * 6, "l", "l"])
)


@triton.constexpr_function
def wait_text(world_size, dtype):
    """The text for W and the activation dtype."""
    return WAIT[world_size, dtype].value
