"""What one rank holds for the exchange of one group: plain tensors, whoever allocated them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_fusion import limits
from moe_fusion.errors import PeerTimeoutError

STATE_WORDS = 4  # of int64: see moe_fusion.kernels.one_shot


@dataclass
class StreamOrder:
    """Keeps the calls on one workspace in order, on whichever stream each of them is."""

    last: torch.cuda.Stream | None = None

    def take_turn(self) -> None:
        """Let the current stream wait for the stream of the call before, if that was another one.

        Work that a CUDA graph captures is not seen: its replays are the caller's to order.
        """
        current = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            return
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)
        self.last = current


@dataclass(frozen=True, eq=False)
class Workspace:
    """One rank's side of the exchange: docs/kernel.md has the layout.

    Attributes:
        rank: this rank in the group.
        world_size: W.
        dtype: the activation dtype.
        capacity_bytes: one rank's partial [T, H] in one slot, at most.
        peers: [W] int64, the address of each rank's slots in this process.
        state: [4] int64 on the device: next slot, units written by the last call, readers, ranks
            that were missing.
        error_word: [1] int32 that the device writes and the host reads: ranks missing, one bit
            each.
        peer_timeout_s: how long a kernel waits for a peer, in seconds.
        global_ranks: the ranks of the group in the world, for messages.
        memory: whatever keeps the buffers mapped.
        order: keeps calls from several streams in order.
    """

    rank: int
    world_size: int
    dtype: torch.dtype
    capacity_bytes: int
    peers: Tensor
    state: Tensor
    error_word: Tensor
    peer_timeout_s: float
    global_ranks: tuple[int, ...]
    memory: object = field(repr=False)
    order: StreamOrder = field(default_factory=StreamOrder, repr=False)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: a region for each rank."""
        return self.world_size * self.capacity_bytes

    def holds(self, num_tokens: int, hidden_dim: int) -> bool:
        """Whether one slot has room for ``[num_tokens, hidden_dim]`` from every rank."""
        return num_tokens * hidden_dim * self.dtype.itemsize <= self.capacity_bytes

    def missing_ranks(self) -> tuple[int, ...]:
        """Global ranks that finished kernels have reported as missing; reads host memory only."""
        bits = ctypes.c_int32.from_address(self.error_word.data_ptr()).value
        return tuple(r for i, r in enumerate(self.global_ranks) if bits >> i & 1)

    def check(self) -> None:
        """Raise what a kernel has reported.

        Raises:
            PeerTimeoutError: a peer did not arrive in time.
        """
        missing = self.missing_ranks()
        if missing:
            raise PeerTimeoutError(self.global_ranks[self.rank], missing, self.peer_timeout_s)


def slots_bytes(world_size: int, capacity_bytes: int) -> int:
    """Bytes of all slots of a workspace."""
    return limits.SLOTS_OF_A_WORKSPACE * world_size * capacity_bytes
