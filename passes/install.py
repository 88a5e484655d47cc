"""Puts the pass into Inductor's slot and takes it out again.

The slot is ``torch._inductor.config.post_grad_custom_pre_pass``. Somebody else's pass in it stays:
ours runs first, then theirs. Installing again, or ``fusing`` inside ``fusing``, takes the place of
our own pass and keeps theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch._inductor.config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from moe_fusion.config import FusionConfig, set_active_config, set_thread_config
from moe_fusion.passes.fusion_pass import MoEFusionPass
from moe_fusion.passes.guards import has_backward
from moe_fusion.passes.report import FusionReport

_SLOT = "post_grad_custom_pre_pass"
# torch 2.11 has no such class, and no pass there asks for the second argument.
_INFERENCE_AWARE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())


class ChainedPass(CustomGraphPass):
    """Our pass, then those that were in the slot before.

    Args:
        ours: the fusion pass.
        theirs: the passes of others, each a callable or a ``CustomGraphPass``.
    """

    def __init__(self, ours: MoEFusionPass, theirs: tuple[Any, ...]) -> None:
        self.ours = ours
        self.theirs = theirs

    def __call__(self, graph: Graph) -> None:
        """Run all of them on ``graph``."""
        self.ours(graph)
        for theirs in self.theirs:
            if isinstance(theirs, _INFERENCE_AWARE):
                theirs(graph, is_inference=not has_backward(graph))
            else:
                theirs(graph)

    def uuid(self) -> Any:
        """All identities together; None, which turns caching off, where one of them has none."""
        passes = (self.ours, *self.theirs)
        uuids = tuple(getattr(each, "uuid", lambda: None)() for each in passes)
        return uuids if all(uuids) else None


@dataclass(frozen=True)
class _Installed:
    """What was in force before, and what took its place."""

    slot: Any
    config: FusionConfig | None
    put: Any


class _Thread(threading.local):
    """What one thread has put into the slot: from torch 2.13 on the slot is a thread's own too."""

    installed: _Installed | None = None
    blocks = 0

    def configure(self, config: FusionConfig | None) -> FusionConfig | None:
        """Make ``config`` that of the block that this thread is in, else the process's."""
        return set_thread_config(config) if self.blocks else set_active_config(config)


_thread = _Thread()


def _others(slot: Any) -> tuple[Any, ...]:
    """The passes in the slot that are not ours, in order."""
    if slot is None or isinstance(slot, MoEFusionPass):
        return ()
    if isinstance(slot, ChainedPass):
        return slot.theirs
    if isinstance(slot, (list, tuple)):  # torch 2.13 takes several
        return tuple(other for each in slot for other in _others(each))
    return (slot,)


def _put(ours: MoEFusionPass) -> _Installed:
    slot = getattr(inductor_config, _SLOT)
    theirs = _others(slot)
    put = ChainedPass(ours, theirs) if theirs else ours
    setattr(inductor_config, _SLOT, put)
    return _Installed(slot, _thread.configure(ours.config), put)


def _restore(previous: _Installed) -> None:
    """Put back what was there; where somebody has changed the slot since, take out only ours."""
    slot = getattr(inductor_config, _SLOT)
    shared = isinstance(slot, (list, tuple)) and slot is not previous.put
    setattr(inductor_config, _SLOT, type(slot)(_others(slot)) if shared else previous.slot)
    _thread.configure(previous.config)


def install(config: FusionConfig | None = None) -> FusionReport:
    """Fuse tails in everything that is compiled from now on.

    Models that were compiled before stay as they are until ``torch._dynamo.reset()``. From torch
    2.13 on Inductor's settings, the slot among them, are those of one thread: a server that
    compiles in several threads calls this in each. Call it after ``init_process_group`` and, on
    CUDA, after the device is chosen: the ranks then tell each other at once what they will do.

    Args:
        config: what to fuse; None takes the environment (``MOE_FUSION_*``) and the defaults.

    Returns:
        The report, which fills as graphs are compiled.

    Raises:
        ConfigError: the environment has a wrong or unknown ``MOE_FUSION_*`` variable.
        TypeError: ``config`` is something else.
    """
    ours = MoEFusionPass(config)
    new, before = _put(ours), _thread.installed
    _thread.installed = new if before is None else replace(before, put=new.put)
    return ours.report


def uninstall() -> None:
    """Put back what was in the slot before this thread called ``install``, if it did.

    What somebody else has put there since stays.
    """
    installed, _thread.installed = _thread.installed, None
    if installed is None:
        return
    if isinstance(getattr(inductor_config, _SLOT), (MoEFusionPass, ChainedPass, list, tuple)):
        _restore(installed)
    else:
        _thread.configure(installed.config)


@contextmanager
def fusing(config: FusionConfig | None = None, *, render: bool = False) -> Iterator[FusionReport]:
    """Fuse tails in what this thread compiles inside the block, then restore the slot exactly.

    ``torch.compile`` compiles at the first call, so that call must be inside the block.

    Args:
        config: what to fuse; None takes the environment (``MOE_FUSION_*``) and the defaults.
        render: keep the graph's text around each tail in the report.

    Yields:
        The report, which fills as graphs are compiled.

    Raises:
        ConfigError: the environment has a wrong or unknown ``MOE_FUSION_*`` variable.
        TypeError: ``config`` is something else.
    """
    ours = MoEFusionPass(config, render=render)
    _thread.blocks += 1
    previous, installed = _put(ours), _thread.installed
    try:
        yield ours.report
    finally:
        _restore(previous)
        _thread.blocks -= 1
        # An install() inside the block goes with it: to undo it later would put our pass back.
        _thread.installed = installed
