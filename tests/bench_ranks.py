"""What the gloo ranks of ``test_bench.py`` run."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_fusion import reference
from moe_fusion.cli import bench_flashinfer, bench_real
from moe_fusion.cli.bench_graphs import largest_error
from moe_fusion.cli.bench_unfused import Unfused
from moe_fusion.contract import TailArguments

LIMIT = timedelta(seconds=60)


def compare_paths(rank, world_size, folder, case):
    """The error and its bound by path, then the error without a reduction, and all ranks' worst."""
    with _world(rank, world_size, folder):
        ranks = [case.inputs(index, "cpu") for index in range(world_size)]
        errors = _errors(rank, ranks, case)
        exact = [reference.tail(ranks, torch.float64)[rank]]
        without = largest_error([Unfused()(ranks[rank])], exact)
        worst = bench_real.slowest([float(rank), -float(rank)])
        spoiled = bench_real.slowest([float("nan") if rank == 0 else 1.0])
    return errors, without, worst, spoiled


def beside_flashinfer(rank, world_size, folder, case, kernel_of):
    """The errors and bounds by path, and the workspaces; ``kernel_of`` is flashinfer's."""
    comm = FakeComm(kernel_of)
    fake = types.SimpleNamespace(comm=comm)
    version, bench_flashinfer.version = bench_flashinfer.version, lambda: "0.0"
    sys.modules["flashinfer"] = fake
    try:
        with _world(rank, world_size, folder):
            ranks = [case.inputs(index, "cpu") for index in range(world_size)]
            errors = _errors(rank, ranks, case)
    finally:
        del sys.modules["flashinfer"]
        bench_flashinfer.version = version
    return errors, comm.made, comm.destroyed


class FakeComm:
    """Has the workspaces of ``flashinfer.comm`` and a kernel that reduces over gloo."""

    def __init__(self, kernel_of):
        self.made, self.destroyed = [], []
        self.trtllm_moe_finalize_allreduce_fusion = kernel_of("pointers")

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(self, rank, size, tokens, hidden, group):
        assert group is dist.group.WORLD
        self.made.append((rank, size, tokens, hidden))
        return "handles", "pointers"

    def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self, handles, group):
        self.destroyed.append(handles)


def _compute(
    allreduce_in, residual_in, norm_weight, expanded_idx_to_permuted_idx, norm_out, residual_out,
    world_rank, world_size, eps, shared_expert_output, expert_scale_factor,
):  # fmt: skip
    assert (world_rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert expert_scale_factor.dtype == allreduce_in.dtype
    args = TailArguments(
        allreduce_in,
        expert_scale_factor,
        expanded_idx_to_permuted_idx,
        shared_expert_output,
        None,
        residual_in,
        norm_weight,
        eps,
    )
    partial = reference.partial(args).to(allreduce_in.dtype)
    dist.all_reduce(partial)
    for out, value in zip((norm_out, residual_out), reference.finish(partial, args), strict=True):
        out.copy_(value)


def old_kernel(expected):
    """Of versions that quantise nothing and know no routed scale."""

    def kernel(
        allreduce_in, residual_in, norm_weight, expanded_idx_to_permuted_idx, norm_out,
        residual_out, workspace_ptrs, launch_with_pdl, world_rank, world_size, eps,
        shared_expert_output, expert_scale_factor,
    ):  # fmt: skip
        assert (workspace_ptrs, launch_with_pdl) == (expected, True)
        _compute(
            allreduce_in, residual_in, norm_weight, expanded_idx_to_permuted_idx, norm_out,
            residual_out, world_rank, world_size, eps, shared_expert_output, expert_scale_factor,
        )  # fmt: skip

    return kernel


def new_kernel(expected):
    """Of versions that ask for them."""
    old = old_kernel(expected)

    def kernel(*, quant_out, scale_out, routed_scaling_factor, weight_bias=None, **rest):
        assert quant_out is scale_out is routed_scaling_factor is weight_bias is None
        old(**rest)

    return kernel


@contextmanager
def _world(rank, world_size, folder):
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _errors(rank, ranks, case):
    exact = [reference.tail(ranks, torch.float64)[rank]]
    with bench_real.contenders(dist.group.WORLD, Unfused(), case) as found:
        return {
            name: (largest_error([one.path(one.prepared(ranks[rank]))], exact), one.bound)
            for name, one in found.items()
        }
