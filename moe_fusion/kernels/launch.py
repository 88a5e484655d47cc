"""Launch parameters, which depend on nothing that differs between ranks or batches.

A row's sum of squares is added in an order that the block size and the number of warps decide, so
these two may depend on H and the dtype, never on T: a token's result is the same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_fusion.contract import TailArguments
from moe_fusion.limits import HIDDEN_DIM_MULTIPLE_ELEMENTS

WARP_THREADS = 32
UNIT_BYTES = 16

WARPS_MAX = 16
# Source: 16 warps a row beat 8 and 4 at H = 7168 on one H200.

ROW_BYTES_OF_16_WARPS = 32 << 10
# Source: a wider row (H = 16384 in fp32) needs 32 warps to keep its elements in registers.

CLEAR_BLOCKS_MIN = 32
# Source: a one-token call after one of 128 tokens clears 14 MiB at H = 7168, W = 8.

UNROLL_LADDER = ((16, 8, True), (32, 4, True), (1 << 30, 2, False))
# Source: (bytes of a row a thread, experts in flight, addends loaded before the wait) that compile
# for sm_90 without spills up to H = 8192, triton 3.6 and 3.9; tests/test_compiled_kernels.py.


@dataclass(frozen=True)
class LaunchParameters:
    """How one kernel is launched.

    Attributes:
        block_elements: N, the power of two that holds a row.
        num_warps: warps of a block.
        unroll: experts whose rows are loaded at once.
        prefetch: load what is added after the reduction before waiting for the peers.
        min_blocks: blocks to launch at least, so that clearing after a large call is spread.
    """

    block_elements: int
    num_warps: int
    unroll: int
    prefetch: bool
    min_blocks: int

    @property
    def clear_units(self) -> int:
        """16-byte units that a block clears at a time: one a thread."""
        return self.num_warps * WARP_THREADS


def launch_parameters(hidden_dim: int, dtype: torch.dtype) -> LaunchParameters:
    """The parameters for rows of ``hidden_dim`` elements."""
    # A unit for each thread of a warp, so that no two threads push the same one.
    narrowest = WARP_THREADS * UNIT_BYTES // dtype.itemsize
    block_elements = max(triton.next_power_of_2(hidden_dim), narrowest)
    row_bytes = block_elements * dtype.itemsize
    limit = WARPS_MAX if row_bytes <= ROW_BYTES_OF_16_WARPS else 2 * WARPS_MAX
    num_warps = min(max(row_bytes // UNIT_BYTES // WARP_THREADS, 1), limit)
    thread_bytes = row_bytes // (num_warps * WARP_THREADS)
    _, unroll, prefetch = next(step for step in UNROLL_LADDER if thread_bytes <= step[0])
    return LaunchParameters(block_elements, num_warps, unroll, prefetch, CLEAR_BLOCKS_MIN)


def backend(kernel: object) -> str:
    """Which bodies a kernel takes: see :mod:`moe_fusion.kernels.exchange`."""
    if not isinstance(kernel, triton.JITFunction):
        return "interpreter"
    return "amd" if torch.version.hip else "ptx"


def row_operands(args: TailArguments) -> tuple[Tensor | None, ...]:
    """The tensors that a kernel reads, in its order, each with a contiguous last dim."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()

    weights, permutation = args.expert_weights, args.expanded_idx_to_permuted_idx
    return (
        rows(args.routed),
        None if weights is None else weights.contiguous(),
        None if permutation is None else permutation.contiguous(),
        rows(args.shared_output),
        rows(args.replicated_output),
        rows(args.residual),
        rows(args.norm_weight),
    )


def unit_row(tensor: Tensor | None) -> Tensor | None:
    """The same rows where each begins at a 16-byte boundary: copied only if it does not."""
    if tensor is None:
        return None
    whole_units = tensor.dim() == 1 or tensor.stride(0) % HIDDEN_DIM_MULTIPLE_ELEMENTS == 0
    if whole_units and tensor.data_ptr() % UNIT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
