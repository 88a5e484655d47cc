"""Compiles tails on gloo ranks that may differ, and tells what each rank did."""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from tracing import Tracer

import moe_fusion
from moe_fusion import FusionConfig, topology
from moe_fusion.passes import identity

T, H, EPS = 4, 64, 1e-5
USUAL = {"token_ceiling": 8, "peer_timeout_s": 60.0}


@dataclass
class Outcome:
    """What one rank did.

    Attributes:
        fused: the groups whose tails were fused, in order.
        reasons: of the tails that were left.
        error: the largest difference from plain torch.
        seconds: of the whole call.
        warnings: what was logged as a warning.
    """

    fused: list[str]
    reasons: list[str]
    error: float
    seconds: float
    warnings: list[str]


def join(rank, world_size, folder, layouts=()):
    """Make the world over gloo, and for each layout a group of every list: this rank's names."""
    leave(rank, world_size)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    names = []
    for layout in layouts:
        groups = [dist.new_group(ranks, timeout=limit) for ranks in layout]
        mine = next(i for i, ranks in enumerate(layout) if rank in ranks)
        names.append(groups[mine].group_name)
    return names


def leave(rank, world_size):
    """Destroy every group, if there is one."""
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tails(groups):
    """A tail over each of the groups, one after the other."""

    def model(rows, residual, weight):
        for group in groups:
            residual = residual + funcol.wait_tensor(funcol.all_reduce(rows, "sum", group))
            wide = residual.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            rows = wide.to(rows.dtype) * weight
        return rows, residual

    return model


def _tensors(rank):
    generator = torch.Generator().manual_seed(5)
    shared = torch.randn(2, T, H, generator=generator).bfloat16()
    own = torch.Generator().manual_seed(rank)
    return torch.randn(T, H, generator=own).bfloat16(), shared[0], 1 + 0.1 * shared[1, 0]


def _differ(fault):
    """Make this rank another than its peers."""
    if fault == "sources":
        identity.versions = lambda: {**_versions(), "moe_fusion sources": "another"}
    elif fault == "probe":
        identity.probe = lambda group: topology.Topology(group.size(), "cpu", device_name="odd")


_versions, _probe = identity.versions, identity.probe


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def compile_tails(rank, world_size, names, options):
    """Compile and call tails over the groups of these names (by rank), with what ``options`` say.

    Options:
        config: fields of the configuration, by rank.
        faults: how a rank differs otherwise, by rank.
        late: seconds that a rank comes late, by rank.
        after: by rank, the rank from which it receives before it begins, and the one it sends to.
    """
    handler = _Warnings()
    logging.getLogger("moe_fusion").addHandler(handler)
    try:
        config = FusionConfig(**USUAL | options.get("config", {}).get(rank, {}))
        _differ(options.get("faults", {}).get(rank))
        time.sleep(options.get("late", {}).get(rank, 0.0))
        receives_from, sends_to = options.get("stages", {}).get(rank, (None, None))
        if receives_from is not None:
            dist.recv(torch.empty(1), receives_from)
        begun = time.monotonic()
        tracer = Tracer(_tails(names[rank]), config)
        tensors = _tensors(rank)
        traced = tracer(*tensors)
        seconds = time.monotonic() - begun
        if sends_to is not None:
            dist.send(torch.zeros(1), sends_to)
        return Outcome(
            [site.group for site in traced.report.sites],
            traced.reasons,
            _error(traced.output, _tails(names[rank])(*tensors)),
            seconds,
            handler.lines,
        )
    finally:
        identity.versions, identity.probe = _versions, _probe
        logging.getLogger("moe_fusion").removeHandler(handler)


def _error(got, want):
    pairs = zip(got, want, strict=True)
    return max((g.double() - w.double()).abs().max().item() for g, w in pairs)


def compile_cached(rank, world_size, name, folder, forget, faults=None):
    """Compile with the caches of this rank's own folder: graphs seen and fused, hits, the error.

    The ranks in ``forget`` lose their caches first; those in ``faults`` differ.
    """
    torch._dynamo.reset()
    _differ((faults or {}).get(rank))
    cache = Path(folder) / f"cache{rank}"
    if rank in forget:
        shutil.rmtree(cache)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    counters.clear()
    tensors, model = _tensors(rank), _tails([name])
    try:
        with (
            moe_fusion.fusing(FusionConfig(token_ceiling=8)) as report,
            torch.no_grad(),
            inductor_config.patch(fallback_by_default=True),
        ):
            dist.barrier()  # all have answered
            output = torch.compile(model, fullgraph=True)(*tensors)
    finally:
        identity.versions = _versions
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    hits = counters["inductor"]["fxgraph_cache_hit"]
    return report.graphs, report.fused, hits, _error(output, model(*tensors))
