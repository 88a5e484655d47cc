"""What the machine offers to one process group: asked once, without raising, kept frozen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """The facts that admission reads; every rank of a group has the same.

    Attributes:
        world_size: W, ranks in the group.
        device_type: where the group's tensors live, ``"cpu"`` or ``"cuda"``.
    """

    world_size: int
    device_type: str


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


def known_groups() -> dict[str, dist.ProcessGroup]:
    """The process groups of which this process is a member, by name."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    names = dist.distributed_c10d._world.pg_names
    return {name: group for group, name in names.items() if group is not None}


def probe(group: dist.ProcessGroup, device_type: str | None = None) -> Topology:
    """The topology of ``group``; ``device_type`` defaults to what the machine has."""
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=group.size(), device_type=device_type)
