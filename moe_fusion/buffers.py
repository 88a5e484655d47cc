"""What one rank holds for the exchange of one group: plain tensors, whoever allocated them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_fusion import limits
from moe_fusion.errors import PeerTimeoutError

PEERS = 8  # addresses that the kernel takes: the largest world size
STATE_WORDS = 4  # of int64: see moe_fusion.kernels.fused


@dataclass
class StreamOrder:
    """Keeps the calls on one workspace in order, on whichever stream each of them is."""

    last: torch.cuda.Stream | None = None
    last_handle: int | None = None

    def take_turn(self, device: int) -> None:
        """Let the current stream wait for the stream of the call before, if that was another one.

        Work that a CUDA graph captures is not seen: its replays are the caller's to order, so this
        must not be called inside a capture.
        """
        handle = torch._C._cuda_getCurrentRawStream(device)
        if handle == self.last_handle:
            return
        current = torch.cuda.current_stream(device)
        if self.last is not None:
            current.wait_stream(self.last)
        self.last, self.last_handle = current, handle


@dataclass(frozen=True, eq=False)
class Workspace:
    """One rank's side of the exchange: docs/kernel.md has the layout.

    Attributes:
        rank: this rank in the group.
        world_size: W.
        dtype: the activation dtype.
        capacity_bytes: one rank's partial [T, H] in one slot, at most.
        peers: the address, in this process, of the slots of the rank that comes i after this one,
            for i from 0 to 7.
        state: [STATE_WORDS] int64 on the device: calls, readers, ranks that were missing.
        square_sums: int64 on the device, a word for each segment of each row of a call.
        error_word: [1] int32 that the device writes and the host reads: ranks missing, one bit
            each.
        multiprocessors: of a rank's device, or of its share of one: the same on every rank.
        peer_timeout_s: how long a kernel waits for a peer, in seconds.
        global_ranks: the ranks of the group in the world, for messages.
        memory: whatever keeps the buffers mapped.
        order: keeps calls from several streams in order.
    """

    rank: int
    world_size: int
    dtype: torch.dtype
    capacity_bytes: int
    peers: tuple[int, ...]
    state: Tensor
    square_sums: Tensor
    error_word: Tensor
    multiprocessors: int
    peer_timeout_s: float
    global_ranks: tuple[int, ...]
    memory: object = field(repr=False)
    order: StreamOrder = field(default_factory=StreamOrder, repr=False)

    @functools.cached_property
    def _error_bits(self) -> ctypes.c_int32:
        """The error word as the host reads it."""
        return ctypes.c_int32.from_address(self.error_word.data_ptr())

    def holds(self, num_tokens: int, hidden_dim: int) -> bool:
        """Whether one slot has room for ``[num_tokens, hidden_dim]`` from every rank."""
        return num_tokens * hidden_dim * self.dtype.itemsize <= self.capacity_bytes

    def missing_ranks(self) -> tuple[int, ...]:
        """Global ranks that finished kernels have reported as missing; reads host memory only."""
        bits = self._error_bits.value
        return tuple(r for i, r in enumerate(self.global_ranks) if bits >> i & 1)

    def check(self) -> None:
        """Raise what a kernel has reported.

        Raises:
            PeerTimeoutError: a peer did not arrive in time.
        """
        if self._error_bits.value:
            here = self.global_ranks[self.rank]
            raise PeerTimeoutError(here, self.missing_ranks(), self.peer_timeout_s)


def peer_addresses(rank: int, addresses: Sequence[int]) -> tuple[int, ...]:
    """``addresses``, by rank, as :class:`Workspace` has them: from ``rank`` on, repeated."""
    return tuple(addresses[(rank + i) % len(addresses)] for i in range(PEERS))


def slots_bytes(world_size: int, capacity_bytes: int) -> int:
    """Bytes of what peers write: all slots, and a word for each peer's tidings of a missing rank.

    A slot has a region for each rank's rows and one for the owners' sums.
    """
    return limits.SLOTS_OF_A_WORKSPACE * (world_size + 1) * capacity_bytes + 4 * PEERS


def square_sum_words(capacity_bytes: int, ceiling: int) -> int:
    """Words for the segments of all rows of a call: a row's last segment may be a part of one.

    Args:
        capacity_bytes: of a workspace.
        ceiling: the most rows of a call, if the configuration has more than the table ever has.
    """
    rows = max(ceiling, limits.TOKEN_CEILING_MAX_TOKENS)
    return rows + capacity_bytes // limits.SEGMENT_BYTES
