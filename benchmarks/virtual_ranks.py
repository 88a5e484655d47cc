"""The op on virtual ranks: several ranks' workspaces in one process, behind fake groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_fusion import dispatch
from moe_fusion.admission import Refusal
from moe_fusion.buffers import Workspace

COMPILING = Refusal("compiling may wait for the device, and a kernel may not wait meanwhile")


@contextmanager
def workspaces_are(found: Callable[[str], Workspace | Refusal]) -> Iterator[None]:
    """Within the block the op takes the workspace that ``found`` gives for its group's name."""
    usual = dispatch.workspace_for
    dispatch.workspace_for = lambda *call, **_: found(call[3].group_name)  # type: ignore[assignment]
    try:
        yield
    finally:
        dispatch.workspace_for = usual
