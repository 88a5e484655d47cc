"""What the gloo ranks of ``test_bench.py`` run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_fusion import reference
from moe_fusion.cli import bench_real
from moe_fusion.cli.bench_graphs import largest_error
from moe_fusion.cli.bench_unfused import Unfused

LIMIT = timedelta(seconds=60)


def compare_paths(rank, world_size, folder, case):
    """The error and its bound by path, then the error without a reduction, and all ranks' worst."""
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    try:
        ranks = [case.inputs(index, "cpu") for index in range(world_size)]
        exact = [reference.tail(ranks, torch.float64)[rank]]
        errors = {
            name: (largest_error([path(ranks[rank])], exact), bound)
            for name, (path, bound) in bench_real.paths(dist.group.WORLD, Unfused(), case).items()
        }
        without = largest_error([Unfused()(ranks[rank])], exact)
        worst = bench_real.slowest([float(rank), -float(rank)])
        spoiled = bench_real.slowest([float("nan") if rank == 0 else 1.0])
    finally:
        dist.destroy_process_group()
    return errors, without, worst, spoiled
