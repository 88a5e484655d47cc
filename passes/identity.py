"""Who this process is to its peers and to compile caches.

Two ranks of one identity make the same graph of the same graph; so one identity is what ranks have
to share before any of them fuses, and what a cached graph is filed under.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_fusion
from moe_fusion import limits, roll_call
from moe_fusion.config import FusionConfig
from moe_fusion.passes.custom_ops import registrations
from moe_fusion.roll_call import Verdict
from moe_fusion.topology import host, known_groups, probe

_log = logging.getLogger(__name__)


@cache
def versions() -> dict[str, str]:
    """Of torch, of triton and of the package, which is a hash of its sources."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    sources = hashlib.sha256()
    root = Path(moe_fusion.__file__).parent
    # passes/ is reached through a symlink in a checkout, which rglob does not follow.
    for folder in (root, root / "passes"):
        for path in sorted(folder.resolve().rglob("*.py")):
            sources.update(path.name.encode() + path.read_bytes())
    return {
        "torch": torch.__version__,
        "triton": triton,
        "moe_fusion sources": sources.hexdigest()[:16],
    }


def facts(config: FusionConfig, group: dist.ProcessGroup) -> dict[str, Any]:
    """What must be the same on all ranks of ``group`` before one of them fuses."""
    return {
        **versions(),
        **{f"config.{name}": value for name, value in asdict(config).items()},
        **{f"topology.{name}": value for name, value in asdict(probe(group)).items()},
        "registered ops": repr(registrations()),
        "host": host(),
    }


def verdict(config: FusionConfig, group: dist.ProcessGroup) -> Verdict:
    """Whether the ranks of ``group`` agree; waits for those that have not answered yet."""
    answer_everywhere(config)
    return roll_call.wait(group, facts(config, group), config.peer_timeout_s)


def answer_everywhere(config: FusionConfig) -> dict[str, Verdict | None]:
    """Answer the roll calls of all groups that could fuse, so that no peer has to wait for this.

    Returns:
        By group, the verdict as far as it is known: nobody waits here.
    """
    return {
        name: roll_call.look(group, facts(config, group))
        for name, group in sorted(known_groups().items())
        if group.size() in limits.FUSED_WORLD_SIZES
    }


def answer_early(config: FusionConfig) -> None:
    """The same, before anything is compiled, where that does not choose a device for the user."""
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        answer_everywhere(config)


_waited: set[tuple[FusionConfig, frozenset[str]]] = set()


def _known_soon(config: FusionConfig) -> dict[str, Verdict | None]:
    """The verdicts; ranks that get here nearly together have a moment to answer, once."""
    deadline = time.monotonic() + limits.ANSWER_GRACE_S
    while True:
        verdicts = answer_everywhere(config)
        unknown = frozenset(name for name, verdict in verdicts.items() if verdict is None)
        if not unknown or (config, unknown) in _waited:
            return verdicts
        if time.monotonic() >= deadline:
            _waited.add((config, unknown))
            _log.info("no compile caches: not all ranks have answered of groups %s", set(unknown))
            return verdicts
        time.sleep(limits.BALLOT_POLL_INTERVAL_S)


def cache_key(config: FusionConfig, served: range | None = None) -> bytes | None:
    """What tells graphs of this process apart from others; None while a verdict is not known.

    Args:
        config: of the pass.
        served: the numbers of tokens that its graphs serve without a guard, if it was told.
    """
    verdicts = _known_soon(config)
    if None in verdicts.values():
        return None
    groups = [
        (name, probe(group), getattr(verdicts.get(name), "reason", None) is None)
        for name, group in sorted(known_groups().items())
    ]
    known = (versions(), config, served, groups, registrations())
    return hashlib.sha256(repr(known).encode()).digest()
