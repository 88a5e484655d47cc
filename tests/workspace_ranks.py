"""Builds workspaces over files that processes map, with faults on demand.

Imported in processes that were started with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from interpreted_ranks import launch
from tail_cases import Case

from moe_fusion import workspace as workspaces
from moe_fusion.admission import Refusal
from moe_fusion.config import FusionConfig, set_active_config
from moe_fusion.errors import NotPreparedError, PeerTimeoutError
from moe_fusion.kernels.composite import composite
from moe_fusion.symmetric import SharedBuffer

CEILING = 8


class SharedFiles:
    """An allocator whose memory is one file for each rank; ``fault`` is raised or done there."""

    number = 0

    def __init__(self, folder, rank, fault=None) -> None:
        self.folder, self.rank, self.fault = Path(folder), rank, fault

    def path(self, rank):
        return self.folder / f"buffer{SharedFiles.number}.{rank}"

    def map(self, rank, nbytes):
        path = str(self.path(rank))
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def allocate(self, nbytes):
        SharedFiles.number += 1
        if self.fault == "allocation":
            raise MemoryError("planted")
        self.path(self.rank).write_bytes(bytes(nbytes))
        return self.map(self.rank, nbytes)

    def host_word(self):
        return torch.zeros(1, dtype=torch.int32)

    def rendezvous(self, local, group):
        if self.fault == "rendezvous":
            raise RuntimeError("planted")
        nbytes = local.numel()
        maps = [local if r == self.rank else self.map(r, nbytes) for r in range(group.size())]
        return SharedBuffer(local, tuple(m.data_ptr() for m in maps), maps)


def join(rank, world_size, folder, name, members=None):
    """Make the world over gloo, and, with ``members``, groups of those ranks: this rank's name."""
    store = dist.FileStore(str(Path(folder) / name), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    if members is None:
        return dist.group.WORLD.group_name
    groups = [dist.new_group(ranks, timeout=limit) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    return groups[mine].group_name


def leave(rank, world_size):
    """Destroy every group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _wrong_sum(args, workspace):
    norm_out, residual_out = launch(args, workspace)
    return norm_out, residual_out + 1


def call(rank, world_size, folder, group_name, case, options=None):
    """One call through the workspace: how it went, its outputs, seconds, the log."""
    options = options or {}
    set_active_config(FusionConfig(**{"token_ceiling": CEILING} | options.get("config", {})))
    group = workspaces.resolve_group(group_name)
    fault = options.get("faults", {}).get(rank)
    backend = workspaces.Backend(
        "cpu",
        lambda: SharedFiles(folder, group.rank(), fault),
        _wrong_sum if fault == "self-test" else launch,
    )
    if fault == "configuration":
        set_active_config(FusionConfig(token_ceiling=CEILING, peer_timeout_s=7.0))
    args = case.rank(group.rank())
    records = _Records()
    begun = time.monotonic()
    with records:
        found = workspaces.workspace_for(
            case.num_tokens, case.hidden_dim, case.dtype, group, top_k=case.top_k, backend=backend
        )
    seconds = time.monotonic() - begun
    if isinstance(found, Refusal):
        return found.reason, composite(args, group), seconds, records.lines
    return None, launch(args, found), seconds, records.lines


def composite_alone(rank, world_size, case):
    """The composite path of a rank that has no group."""
    assert not dist.is_initialized()
    return composite(case.rank(0), None)


class _Records(logging.Handler):
    """Collects what moe_fusion logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("moe_fusion").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("moe_fusion").removeHandler(self)


def number_of_workspaces(rank, world_size, group_name):
    """Workspaces that are kept for the group of this name."""
    return sum(
        len(entry.workspaces) for key, entry in workspaces._built.items() if key[0] == group_name
    )


def capture_first(rank, world_size, group_name):
    """The message of a first call inside a capture."""
    set_active_config(FusionConfig(token_ceiling=CEILING))
    workspaces._capturing, before = (lambda: True), workspaces._capturing
    backend = workspaces.Backend("cpu", lambda: None, launch)
    try:
        group = workspaces.resolve_group(group_name)
        workspaces.workspace_for(1, 640, torch.bfloat16, group, backend=backend)
    except NotPreparedError as error:
        return str(error)
    finally:
        workspaces._capturing = before
    return None


def die(rank, world_size, victim):
    """End one rank's process without a word."""
    if rank == victim:
        os._exit(1)


def call_until_the_peer_is_missed(rank, world_size, folder, group_name, case):
    """The error that :func:`moe_fusion.check` raises after a call that a peer does not join."""
    options = {"config": {"peer_timeout_s": 1.0}}
    _, outputs, _, _ = call(rank, world_size, folder, group_name, case, options)
    errors = []
    for attempt in (
        workspaces.check,
        lambda: call(rank, world_size, folder, group_name, case, options),
    ):
        try:
            attempt()
        except PeerTimeoutError as error:
            errors.append((error.rank, error.missing))
    return all(t.isnan().all() for t in outputs), errors


SMALL = Case(3, 64, top_k=2, seed=70)
