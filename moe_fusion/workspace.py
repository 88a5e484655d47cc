"""Workspaces: built once for each group and dtype, by all ranks together, or by none.

Building is three votes (:mod:`moe_fusion.agreement`): that every rank could allocate and is
configured alike, that the rendezvous worked, and that a reduction of known numbers came out right.
One rank's failure at any of them puts every rank on the composite path.
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fusion import limits
from moe_fusion.admission import Refusal, admit, capacity_bytes, over_ceiling, token_ceiling
from moe_fusion.agreement import Ballot, vote
from moe_fusion.buffers import (
    STATE_WORDS,
    Workspace,
    peer_addresses,
    slots_bytes,
    square_sum_words,
)
from moe_fusion.config import FusionConfig, active_config
from moe_fusion.contract import TailArguments
from moe_fusion.errors import NotPreparedError
from moe_fusion.symmetric import Allocator, SharedBuffer, SymmetricMemory
from moe_fusion.topology import Topology, host, probe, resolve_group

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """Where workspaces live and what runs on them.

    Attributes:
        device_type: of the tensors.
        allocator: makes the memory that ranks share.
        launch: the fused kernel.
    """

    device_type: str
    allocator: Callable[[], Allocator]
    launch: Callable[[TailArguments, Workspace], tuple[Tensor, Tensor]]


def _launch_fused(args: TailArguments, workspace: Workspace) -> tuple[Tensor, Tensor]:
    from moe_fusion.kernels.fused_launch import fused

    return fused(args, workspace)


CUDA = Backend("cuda", SymmetricMemory, _launch_fused)


@dataclass(frozen=True)
class _Plan:
    """What to build: the same on every rank."""

    topology: Topology
    config: FusionConfig
    dtype: torch.dtype
    hidden_dim: int
    ceiling: int
    capacity_bytes: int


@dataclass(eq=False)
class _Built:
    """What a group has for one dtype and configuration: workspaces, or the reason for none."""

    group: weakref.ReferenceType[dist.ProcessGroup]
    topology: Topology
    refusal: Refusal | None = None
    workspaces: list[Workspace] = field(default_factory=list)
    plans: dict[tuple[int, int | None], _Plan | Refusal] = field(default_factory=dict)


_built: dict[tuple[str, torch.dtype, FusionConfig], _Built] = {}
# Captured in a graph, which may be replayed for ever; checked while the group lives.
_captured: list[tuple[weakref.ReferenceType[dist.ProcessGroup], Workspace]] = []
# A peer's last kernel may still write here, or a capture forbids to free it; never checked.
_retired: list[Workspace] = []


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _attempt(step: str, function: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of a step that may fail on this rank alone, or what it said."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers have to hear of it
        _log.debug("moe-fusion: %s failed", step, exc_info=True)
        first_line = str(error).partition("\n")[0]
        return None, f"{step}: expected success, got {type(error).__name__}: {first_line}"


def _facts(plan: _Plan) -> dict[str, Any]:
    """What ranks compare before they build: where, how and how large."""
    return {
        **{f"topology.{name}": value for name, value in asdict(plan.topology).items()},
        **{f"config.{name}": value for name, value in asdict(plan.config).items()},
        "dtype": str(plan.dtype),
        "capacity_bytes": plan.capacity_bytes,
        "torch": torch.__version__,
        "host": host(),
        **_exchange_places(),
    }


def _exchange_places() -> dict[str, str]:
    """Where processes hand device memory to each other: by process numbers and temporary files.

    Ranks that do not share them can wait for ever in the exchange, so they compare them before.
    """
    found = {}
    for namespace in ("pid", "mnt"):
        try:
            found[f"{namespace} namespace"] = str(Path("/proc/self/ns", namespace).readlink())
        except OSError:
            found[f"{namespace} namespace"] = "unknown"
    folder = Path(tempfile.gettempdir())
    return {**found, "temporary folder": str(folder)}


def _allocate(allocator: Allocator, world_size: int, plan: _Plan) -> tuple[Tensor, Tensor]:
    """The shared buffer, every slot cleared, and the host's word."""
    own_words = STATE_WORDS + square_sum_words(plan.capacity_bytes, plan.ceiling)
    local = allocator.allocate(slots_bytes(world_size, plan.capacity_bytes) + 8 * own_words)
    local.fill_(0xFF)
    if local.is_cuda:
        torch.cuda.synchronize(local.device)
    return local, allocator.host_word()


def _assemble(
    buffer: SharedBuffer, host_word: Tensor, group: dist.ProcessGroup, plan: _Plan
) -> Workspace:
    own = buffer.local[slots_bytes(group.size(), plan.capacity_bytes) :].view(torch.int64)
    state, square_sums = own[:STATE_WORDS], own[STATE_WORDS:]
    state.zero_()
    return Workspace(
        rank=group.rank(),
        world_size=group.size(),
        dtype=plan.dtype,
        capacity_bytes=plan.capacity_bytes,
        peers=peer_addresses(group.rank(), buffer.addresses),
        state=state,
        square_sums=square_sums,
        error_word=host_word,
        multiprocessors=plan.topology.own_multiprocessors,
        peer_timeout_s=plan.config.peer_timeout_s,
        global_ranks=tuple(dist.get_process_group_ranks(group)),
        memory=buffer.memory,
    )


def self_test(workspace: Workspace, hidden_dim: int, backend: Backend) -> None:
    """Reduce known numbers once through each slot.

    Raises:
        RuntimeError: a sum was wrong, or a peer did not arrive.
    """
    quick = replace(workspace, peer_timeout_s=limits.BUILD_TIMEOUT_S)
    expected = workspace.world_size * (workspace.world_size + 1) // 2
    for call in range(limits.SLOTS_OF_A_WORKSPACE):
        value = (workspace.rank + 1) * (call + 1)
        row = workspace.state.new_full((1, hidden_dim), value, dtype=workspace.dtype)
        _, total = backend.launch(TailArguments(row), quick)
        low, high = total.float().aminmax()
        if not low == high == expected * (call + 1):
            raise RuntimeError(
                f"expected the ranks' sum {expected * (call + 1)}, got {low:g} to {high:g} "
                f"(missing ranks: {list(workspace.missing_ranks())})"
            )


def _build(group: dist.ProcessGroup, plan: _Plan, backend: Backend) -> Workspace | Refusal:
    """Build together with the other ranks; see the module's text."""

    def allocate() -> tuple[Allocator, Tensor, Tensor]:
        source = backend.allocator()
        return source, *_allocate(source, group.size(), plan)

    def share() -> Workspace:
        source, local, host_word = memory
        return _assemble(source.rendezvous(local, group), host_word, group, plan)

    memory, problem = _attempt("allocation", allocate)
    reason = vote(group, Ballot(problem, _facts(plan)), plan.config.peer_timeout_s)
    if reason is not None:
        return Refusal(reason)
    workspace, problem = _attempt("rendezvous", share)
    reason = vote(group, Ballot(problem), 2 * limits.BUILD_TIMEOUT_S)
    if reason is not None:
        return Refusal(reason)
    _, problem = _attempt("self-test", lambda: self_test(workspace, plan.hidden_dim, backend))
    reason = vote(group, Ballot(problem), 2 * limits.BUILD_TIMEOUT_S)
    if reason is not None:
        _retired.append(workspace)
        return Refusal(reason)
    assert isinstance(workspace, Workspace)
    return workspace


def _entry(
    group: dist.ProcessGroup, dtype: torch.dtype, config: FusionConfig, backend: Backend
) -> _Built:
    """This group's entry; those of destroyed groups are forgotten when a new one is made."""
    key = (group.group_name, dtype, config)
    entry = _built.get(key)
    if entry is None or entry.group() is not group:
        _forget_destroyed_groups()
        topology = probe(group, backend.device_type)
        entry = _built[key] = _Built(weakref.ref(group), topology)
    return entry


def _forget_destroyed_groups() -> None:
    """Free the workspaces of groups that are gone."""
    for key, entry in list(_built.items()):
        if entry.group() is None:
            del _built[key]
            if _capturing():  # freeing synchronizes the device, which a capture forbids
                _retired.extend(entry.workspaces)


def _plan(
    entry: _Built, hidden_dim: int, dtype: torch.dtype, top_k: int | None, config: FusionConfig
) -> _Plan | Refusal:
    """What calls of this kind need; a pure function, kept because calls are many."""
    key = (hidden_dim, top_k)
    if key not in entry.plans:
        refusal = admit(hidden_dim, dtype, entry.topology, top_k=top_k)
        if refusal is not None:
            _log_composite(entry.group, refusal)
        entry.plans[key] = refusal or _Plan(
            topology=entry.topology,
            config=config,
            dtype=dtype,
            hidden_dim=hidden_dim,
            ceiling=token_ceiling(hidden_dim, dtype, entry.topology, config),
            capacity_bytes=capacity_bytes(hidden_dim, dtype, entry.topology, config),
        )
    return entry.plans[key]


def _log_composite(group: weakref.ReferenceType[dist.ProcessGroup], refusal: Refusal) -> None:
    alive = group()
    name = "" if alive is None else alive.group_name
    _log.warning("group %r uses the composite path: %s", name, refusal.reason)


def _ready(entry: _Built, group: dist.ProcessGroup, plan: _Plan, backend: Backend) -> None:
    """Make sure that ``entry`` has a workspace for ``plan``, or says why not."""
    if entry.refusal is not None or _find(entry, plan) is not None:
        return
    if _capturing():
        raise NotPreparedError(group.group_name)
    built = _build(group, plan, backend)
    if isinstance(built, Refusal):
        entry.refusal = built
        _log_composite(entry.group, built)
    else:
        entry.workspaces.append(built)
        _log.info("group %r uses the fused path", group.group_name)


def _find(entry: _Built, plan: _Plan) -> Workspace | None:
    fits = (w for w in entry.workspaces if w.holds(plan.ceiling, plan.hidden_dim))
    return next(fits, None)


def workspace_for(
    num_tokens: int,
    hidden_dim: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    *,
    top_k: int | None = None,
    backend: Backend = CUDA,
) -> Workspace | Refusal:
    """The workspace for one call, built if there is none yet, or why there is none.

    What decides is the same on every rank, and so is the answer.

    Raises:
        NotPreparedError: a CUDA graph is being captured and the workspace has to be built first.
        PeerTimeoutError: an earlier kernel of this workspace missed a peer.
    """
    config = active_config()
    entry = _entry(group, dtype, config, backend)
    plan = _plan(entry, hidden_dim, dtype, top_k, config)
    if isinstance(plan, Refusal):
        return plan
    if num_tokens > plan.ceiling:
        return over_ceiling(num_tokens, plan.ceiling)
    _ready(entry, group, plan, backend)
    workspace = _find(entry, plan)
    if workspace is None:
        assert entry.refusal is not None
        return entry.refusal
    workspace.check()
    if _capturing():
        note_capture(entry.group, workspace)
    return workspace


def note_capture(group: weakref.ReferenceType[dist.ProcessGroup], workspace: Workspace) -> None:
    """Keep the workspace, which a CUDA graph is capturing, for as long as it may be replayed."""
    if not any(workspace is captured for _, captured in _captured):
        _captured.append((group, workspace))


def prepare(
    group: str | dist.ProcessGroup,
    hidden_dim: int,
    dtype: torch.dtype,
    *,
    top_k: int | None = None,
) -> Refusal | None:
    """Build the workspace of a group ahead of the first call; every rank of it must call this.

    Needed before a CUDA graph is captured, and useful before a first request is timed. For several
    hidden sizes, call it for each, the widest first.

    Args:
        group: the tensor-parallel group, or its name.
        hidden_dim: H, elements in a row.
        dtype: the activation dtype.
        top_k: K, experts a token; None for tails without a finalize.

    Returns:
        None when tails will be fused, else why the composite path will be used.

    Raises:
        NotPreparedError: this is inside the capture of a CUDA graph.
        ValueError: this process has no such group.
        TypeError: ``group`` is neither a name nor a group.
    """
    found = workspace_for(1, hidden_dim, dtype, resolve_group(group), top_k=top_k)
    return found if isinstance(found, Refusal) else None


def check() -> None:
    """Raise what kernels that have finished reported; synchronize first to include the last one.

    Raises:
        PeerTimeoutError: a peer did not arrive in time.
    """
    live = [w for entry in _built.values() if entry.group() is not None for w in entry.workspaces]
    live += [workspace for group, workspace in _captured if group() is not None]
    for workspace in live:
        workspace.check()
