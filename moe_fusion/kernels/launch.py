"""Launch parameters: a function of T, H, the dtype, W and how many blocks fit, nothing else.

A row's sum of squares is added in an order that the segments decide, which depend on H and the
dtype alone: a token's result is the same in every batch and for every choice made here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_fusion.contract import TailArguments
from moe_fusion.limits import HIDDEN_DIM_MULTIPLE_ELEMENTS, SEGMENT_BYTES

WARP_THREADS = 32
UNIT_BYTES = 16

SEGMENT_THREADS = SEGMENT_BYTES // UNIT_BYTES
SEGMENT_WARPS = SEGMENT_THREADS // WARP_THREADS
# Source: one unit a thread; H = 7168, 5120, 4096 and 2048 in 16 bits are whole segments.

UNROLL_MAX = 8
# Source: experts in flight for which the residencies below hold.


@dataclass(frozen=True)
class Residency:
    """Blocks that one multiprocessor holds, and the registers of a thread that allow it.

    Blocks that share a row wait for each other, so all blocks of a launch must be resident.
    """

    blocks: int
    registers: int


RESIDENCY = {
    (2, True): Residency(8, 64),
    (2, False): Residency(5, 96),
    (4, True): Residency(8, 64),
    (4, False): Residency(5, 96),
    (8, True): Residency(5, 96),
    (8, False): Residency(5, 96),
}
# Source: by W and whether each block has one row; 64 Ki registers a multiprocessor, 128 threads a
# block, and what the compiler needs without spills (tests/test_compiled_kernels.py).

TWO_SHOT_FROM_TOKENS = {2: 1 << 30, 4: 32, 8: 8}
# Source: crossovers on one H200 (moe-fusion bench --tune), by W; two ranks send as much either
# way.

WARPS_MAX = 16
ROW_BYTES_OF_16_WARPS = 32 << 10
# Source: a wider row (H = 16384 in fp32) needs 32 warps to keep its elements in registers.

UNROLL_LADDER = ((16, 8), (32, 4), (1 << 30, 2))
# Source: (bytes of a row a thread, experts in flight) that compile for sm_90 without spills up to
# H = 8192, triton 3.6 and 3.9; tests/test_compiled_kernels.py.


@dataclass(frozen=True)
class LaunchParameters:
    """How the fused kernel is launched.

    Attributes:
        blocks: of the launch, one for each segment of each row that is worked on at once.
        once: every block has one row.
        two_shot: a unit is summed by one rank, its owner, not by all.
        unroll: experts whose rows are loaded at once.
        registers: of a thread, at most.
    """

    blocks: int
    once: bool
    two_shot: bool
    unroll: int
    registers: int


def segments(hidden_dim: int, dtype: torch.dtype) -> int:
    """Segments of a row of ``hidden_dim`` elements."""
    return -(-hidden_dim * dtype.itemsize // SEGMENT_BYTES)


def launch_parameters(
    num_tokens: int,
    hidden_dim: int,
    dtype: torch.dtype,
    world_size: int,
    *,
    top_k: int | None,
    multiprocessors: int,
) -> LaunchParameters:
    """The parameters for ``num_tokens`` rows.

    Args:
        num_tokens: T, at least 1.
        hidden_dim: H.
        dtype: the activation dtype.
        world_size: W.
        top_k: K; None where there is no finalize.
        multiprocessors: of a rank's device, or of its share of one: the same on every rank.
    """
    shares = segments(hidden_dim, dtype)
    once = num_tokens * shares <= multiprocessors * RESIDENCY[world_size, True].blocks
    resident = RESIDENCY[world_size, once]
    rows = min(num_tokens, max(multiprocessors * resident.blocks // shares, 1))
    rounds = -(-(top_k or 1) // UNROLL_MAX)
    return LaunchParameters(
        blocks=rows * shares,
        once=once,
        two_shot=num_tokens >= TWO_SHOT_FROM_TOKENS[world_size],
        unroll=-(-(top_k or 1) // rounds),
        registers=resident.registers,
    )


@dataclass(frozen=True)
class RowParameters:
    """How a kernel of the composite path, one block a row, is launched.

    Attributes:
        block_elements: N, the power of two that holds a row.
        num_warps: warps of a block.
        unroll: experts whose rows are loaded at once.
    """

    block_elements: int
    num_warps: int
    unroll: int


def row_parameters(hidden_dim: int, dtype: torch.dtype) -> RowParameters:
    """The parameters for rows of ``hidden_dim`` elements."""
    block_elements = triton.next_power_of_2(hidden_dim)
    row_bytes = block_elements * dtype.itemsize
    limit = WARPS_MAX if row_bytes <= ROW_BYTES_OF_16_WARPS else 2 * WARPS_MAX
    num_warps = min(max(row_bytes // UNIT_BYTES // WARP_THREADS, 1), limit)
    thread_bytes = row_bytes // (num_warps * WARP_THREADS)
    unroll = next(unroll for most, unroll in UNROLL_LADDER if thread_bytes <= most)
    return RowParameters(block_elements, num_warps, unroll)


def backend(kernel: object) -> str:
    """Which bodies a kernel takes: see :mod:`moe_fusion.kernels.exchange`."""
    if not isinstance(kernel, triton.JITFunction):
        return "interpreter"
    return "amd" if torch.version.hip else "ptx"


def op_tensors(args: TailArguments) -> tuple[Tensor | None, ...]:
    """The op's tensors, in its order and the kernels'."""
    return (
        args.routed,
        args.expert_weights,
        args.expanded_idx_to_permuted_idx,
        args.shared_output,
        args.replicated_output,
        args.residual,
        args.norm_weight,
        args.output_scale_tensor,
    )


def dense(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The op's tensors, rows with a contiguous last dim and routing contiguous: copied if not."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()

    routed, weights, permutation, *addends, scale = tensors
    routing = (None if t is None else t.contiguous() for t in (weights, permutation))
    return (rows(routed), *routing, *map(rows, addends), scale)


def unit_row(tensor: Tensor | None) -> Tensor | None:
    """The same rows where each begins at a 16-byte boundary: copied only if it does not."""
    if tensor is None:
        return None
    whole_units = tensor.dim() == 1 or tensor.stride(0) % HIDDEN_DIM_MULTIPLE_ELEMENTS == 0
    if whole_units and tensor.data_ptr() % UNIT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
