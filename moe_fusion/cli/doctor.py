"""``moe-fusion doctor``: what this machine offers, and whether tails would be fused here.

Alone it asks this process's machine. Under torchrun it also makes a group of all ranks, holds the
vote, builds a workspace and runs its self-test; rank 0 prints what was agreed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_fusion import limits
from moe_fusion.admission import admit, token_ceiling
from moe_fusion.config import FusionConfig, active_config
from moe_fusion.errors import ConfigError
from moe_fusion.topology import Topology, probe, probe_cuda
from moe_fusion.workspace import prepare

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in limits.DTYPES}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GROUP_TIMEOUT_S = 60.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the commands of ``moe-fusion``."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine offers and whether tails would be fused here",
        description="Probes the machine. Under torchrun all ranks also vote and run the self-test.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hidden-dim", type=int, default=7168, help="H, elements in a row")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="the activation dtype"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0, or 1 where the configuration is wrong or the group would not fuse."""
    try:
        report = _report(args.hidden_dim, DTYPES[args.dtype])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(report, indent=2) if args.json else _text(report))
    group = report["group"]
    return 0 if group is None or group["fused"] else 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _report(hidden_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    config = active_config()
    return {
        "versions": {name: _version(name) for name in ("moe-fusion", "torch", "triton")},
        "config": asdict(config),
        "hidden_dim": hidden_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": asdict(probe_cuda(1)),
        "world_sizes": {
            str(world_size): _admission(probe_cuda(world_size), hidden_dim, dtype, config)
            for world_size in limits.FUSED_WORLD_SIZES
        },
        "group": _group_report(hidden_dim, dtype, config),
    }


def _admission(
    topology: Topology, hidden_dim: int, dtype: torch.dtype, config: FusionConfig
) -> dict[str, Any]:
    refusal = admit(hidden_dim, dtype, topology)
    ceiling = token_ceiling(hidden_dim, dtype, topology, config)
    return {
        "fused": refusal is None,
        "reason": None if refusal is None else refusal.reason,
        "token_ceiling": ceiling if refusal is None else 0,
    }


@contextlib.contextmanager
def _world() -> Iterator[dist.ProcessGroup]:
    """The group that torchrun describes, over gloo: the report must not need NCCL to work."""
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()  # one that left at once would break the connections of those that still join
        yield group
    finally:
        dist.destroy_process_group()


def _group_report(
    hidden_dim: int, dtype: torch.dtype, config: FusionConfig
) -> dict[str, Any] | None:
    """What all ranks agreed on, or None outside of torchrun."""
    if not all(name in os.environ for name in LAUNCHER_VARIABLES):
        return None
    with _world() as group:
        topology = probe(group, "cuda")
        refusal = prepare(group, hidden_dim, dtype)
        return {
            "world_size": group.size(),
            "fused": refusal is None,
            "reason": None if refusal is None else refusal.reason,
            "token_ceiling": 0 if refusal else token_ceiling(hidden_dim, dtype, topology, config),
        }


def _verdict(entry: dict[str, Any]) -> str:
    if entry["fused"]:
        return f"fused up to {entry['token_ceiling']} tokens"
    return f"composite path: {entry['reason']}"


def _text(report: dict[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    capability = machine["capability"]
    reach = "reachable" if machine["peers_reachable"] else "not reachable"
    lines = [
        ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()),
        f"device            {machine['device_name'] or 'no CUDA device'}"
        + (f", compute capability {capability[0]}.{capability[1]}" if capability else ""),
        f"symmetric memory  {machine['symmetric_memory'] or 'none'}",
        f"peers             {reach}",
        "configuration     " + ", ".join(f"{k}={v}" for k, v in report["config"].items()),
        f"at H = {report['hidden_dim']} in {report['dtype']}:",
    ]
    lines += [f"  {size} ranks         {_verdict(e)}" for size, e in report["world_sizes"].items()]
    group = report["group"]
    if group is not None:
        lines.append(f"this group of {group['world_size']}   {_verdict(group)}")
    return "\n".join(lines)
