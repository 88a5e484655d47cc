"""The op on virtual ranks: several ranks' workspaces in one process, behind fake groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from moe_fusion import dispatch
from moe_fusion.admission import Refusal
from moe_fusion.buffers import Workspace
from moe_fusion.cli.bench_cases import Case
from moe_fusion.cli.bench_virtual import make_workspaces, share_of_multiprocessors

PEER_TIMEOUT_S = 20.0
COMPILING = Refusal("compiling may wait for the device, and a kernel may not wait meanwhile")


def workspaces_by_name(case: Case, names: Sequence[str]) -> dict[str, Workspace]:
    """Each rank's workspace, by the name of the group that stands for that rank."""
    spaces = make_workspaces(case, share_of_multiprocessors(case.world_size))
    patient = (replace(space, peer_timeout_s=PEER_TIMEOUT_S) for space in spaces)
    return dict(zip(names, patient, strict=True))


@contextmanager
def workspaces_are(found: Callable[[str], Workspace | Refusal]) -> Iterator[None]:
    """Within the block the op takes the workspace that ``found`` gives for its group's name."""
    usual = dispatch.workspace_for
    dispatch.workspace_for = lambda *call, **_: found(call[3].group_name)  # type: ignore[assignment]
    try:
        yield
    finally:
        dispatch.workspace_for = usual
