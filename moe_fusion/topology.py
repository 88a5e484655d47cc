"""What the machine offers to one process group: asked once, without raising, kept frozen."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class Topology:
    """The facts that admission reads; every rank of a group has the same.

    No field names a device index, a rank or free memory. Ranks compare theirs when they vote
    (:mod:`moe_fusion.agreement`), so that a machine of unlike devices uses the composite path.

    Attributes:
        world_size: W, ranks in the group.
        device_type: where the group's tensors live, ``"cpu"`` or ``"cuda"``.
        device_name: the device's own name; empty for the CPU.
        capability: CUDA compute capability; ``None`` for the CPU and for what is not CUDA.
        multiprocessors: of the device; 0 for the CPU.
        shared_device: ranks may share one device, as torch's symmetric memory was told.
        symmetric_memory: the backend of torch's symmetric memory, or ``None`` where it has none.
        peers_reachable: this device can address ``world_size - 1`` others. Taken as true where
            fewer devices are visible, as in one container a device: the rendezvous will tell.
        one_host: all ranks run on one host, as far as the launcher says; the vote compares hosts.
    """

    world_size: int
    device_type: str
    device_name: str = ""
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    shared_device: bool = False
    symmetric_memory: str | None = None
    peers_reachable: bool = True
    one_host: bool = True

    @property
    def own_multiprocessors(self) -> int:
        """Multiprocessors of a rank's device, or of its share where all ranks may be on one."""
        return self.multiprocessors // (self.world_size if self.shared_device else 1)


def resolve_group(group: str | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of that name, in this process.

    Args:
        group: a group, or the name that functional collectives carry in a graph.

    Raises:
        ValueError: this process has no such group.
        TypeError: ``group`` is neither a name nor a group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, str):
        raise TypeError(
            f"group: expected a ProcessGroup or its name (str), got {type(group).__name__}"
        )
    known = known_groups()
    if group not in known:
        raise ValueError(
            f"group_name: expected a process group of this process, one of {sorted(known)}, "
            f"got {group!r}"
        )
    return known[group]


def reducing_group(group: str | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group over which a partial is summed, or None where there is nothing to add.

    Args:
        group: a group or its name. None is the default group, as in :mod:`torch.distributed`, and
            this process alone where no group was initialised.

    Returns:
        The group; None for a group of one rank and for this process alone.

    Raises:
        ValueError: this process has no such group.
        TypeError: ``group`` is neither None, a name nor a group.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.distributed_c10d._get_default_group()
    found = resolve_group(group)
    return None if found.size() == 1 else found


def known_group(name: str) -> dist.ProcessGroup | None:
    """The process group of that name in this process, if there is one; faster than the others."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None


def known_groups() -> dict[str, dist.ProcessGroup]:
    """The process groups of which this process is a member, by name."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    names = dist.distributed_c10d._world.pg_names
    return {name: group for group, name in names.items() if group is not None}


def probe(group: dist.ProcessGroup, device_type: str | None = None) -> Topology:
    """The topology of ``group``, from what this process can see; it never raises.

    Args:
        group: the group; it need not be able to communicate.
        device_type: defaults to what the machine has.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = group.size()
    one_host = _launched_on_one_host(group)
    if device_type != "cuda":
        return Topology(world_size, device_type, one_host=one_host)
    return probe_cuda(world_size, one_host=one_host)


def probe_cuda(world_size: int, *, one_host: bool = True) -> Topology:
    """The topology of ``world_size`` ranks on this process's CUDA device; it never raises."""
    if not torch.cuda.is_available():
        return Topology(world_size, "cuda", peers_reachable=False, one_host=one_host)
    device = torch.cuda.current_device()
    is_cuda = torch.version.hip is None
    return Topology(
        world_size=world_size,
        device_type="cuda",
        device_name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device) if is_cuda else None,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        shared_device=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        symmetric_memory=_symmetric_memory_backend(device),
        peers_reachable=_peers_reachable(world_size, device),
        one_host=one_host,
    )


# Dynamo must not trace into the driver: in a compiled producer this is a constant.
# torch.compiler.assume_constant_result sets the same mark, but imports all of Dynamo.
vars(probe_cuda)["_dynamo_marked_constant"] = True


@functools.cache
def _symmetric_memory_backend(device: int) -> str | None:
    try:
        return symm_mem.get_backend(torch.device("cuda", device))
    except Exception:  # noqa: BLE001 - a probe reports, whatever a build of torch raises
        return None


@functools.cache
def _peers_reachable(world_size: int, device: int) -> bool:
    others = [d for d in range(torch.cuda.device_count()) if d != device]
    if len(others) < world_size - 1:
        return True
    reachable = sum(torch.cuda.can_device_access_peer(device, other) for other in others)
    return reachable >= world_size - 1


@functools.cache
def host() -> str:
    """What all processes of one running kernel share, in whatever container each is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _launched_on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether torchrun's variables put all ranks on one host; true where they are not set."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local_world_size.isdecimal() or int(local_world_size) == 0:
        return True
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # a group that torch does not know
        return True
    return len({rank // int(local_world_size) for rank in ranks}) == 1
