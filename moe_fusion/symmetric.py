"""Memory that every rank of a group can address: torch's symmetric memory, in two steps.

Allocation and rendezvous are apart because the ranks vote in between: a rank that cannot allocate
must not leave its peers waiting in a rendezvous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from moe_fusion.limits import BUILD_TIMEOUT_S

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """One rank's buffer, and where its peers' are.

    Attributes:
        local: [nbytes] uint8.
        addresses: each rank's buffer as this process addresses it.
        memory: what keeps them mapped.
    """

    local: Tensor
    addresses: tuple[int, ...]
    memory: object


class Allocator(Protocol):
    """Where a workspace's memory comes from."""

    def allocate(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 that can be shared; may raise."""

    def host_word(self) -> Tensor:
        """[1] int32, zero, that the device can write and the host can read."""

    def rendezvous(self, local: Tensor, group: dist.ProcessGroup) -> SharedBuffer:
        """Share ``local``; every rank of ``group`` calls it; may raise."""


def within(timeout_s: float, function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread of its own and give it up after ``timeout_s`` seconds.

    In a thread of its own nothing is allocated from the pool of a CUDA graph that the caller's
    thread may be recording for.

    Raises:
        TimeoutError: it did not return in time.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=call, name="moe-fusion-build", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"expected an answer within {timeout_s:g} s, got none")
    return outcome[0]


class SymmetricMemory:
    """torch's symmetric memory on the current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def allocate(self, nbytes: int) -> Tensor:
        """See :class:`Allocator`."""
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_word(self) -> Tensor:
        """See :class:`Allocator`."""
        return torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def rendezvous(self, local: Tensor, group: dist.ProcessGroup) -> SharedBuffer:
        """See :class:`Allocator`."""
        store = dist.distributed_c10d._get_process_group_store(group)
        usual = store.timeout
        store.set_timeout(timedelta(seconds=BUILD_TIMEOUT_S))
        try:
            handle = within(BUILD_TIMEOUT_S, lambda: self._rendezvous(local, group))
        finally:
            store.set_timeout(usual)
        return SharedBuffer(local, tuple(handle.buffer_ptrs), (local, handle))

    def _rendezvous(self, local: Tensor, group: dist.ProcessGroup) -> _SymmetricMemory:
        torch.cuda.set_device(self.device)
        return symm_mem.rendezvous(local, group)
