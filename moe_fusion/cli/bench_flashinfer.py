"""flashinfer's fused finalize, all_reduce, residual add and norm, where that package is installed.

It needs real ranks: each of its workspaces belongs to a process with a GPU of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from moe_fusion.cli.bench_cases import Case
from moe_fusion.cli.bench_graphs import Outputs
from moe_fusion.contract import TailArguments

FLASHINFER = "flashinfer"
DTYPES = ("bf16", "fp16")


def version() -> str | None:
    """Of the installed package, or None."""
    if importlib.util.find_spec(FLASHINFER) is None:
        return None
    return importlib.metadata.version("flashinfer-python")


def takes(case: Case) -> bool:
    """Whether its kernel computes this case."""
    return case.dtype in DTYPES


def prepared(args: TailArguments) -> TailArguments:
    """The arguments as its kernel reads them: weights in the activation dtype."""
    assert args.expert_weights is not None
    return replace(args, expert_weights=args.expert_weights.to(args.routed.dtype))


@contextmanager
def flashinfer_path(
    group: dist.ProcessGroup, case: Case
) -> Iterator[Callable[[TailArguments], Outputs]]:
    """The path of this rank, good inside the block; all ranks enter and leave it together."""
    from flashinfer import comm

    rank, size = group.rank(), group.size()
    handles, pointers = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, size, case.num_tokens, case.hidden_dim, group=group
    )
    kernel = comm.trtllm_moe_finalize_allreduce_fusion
    # Versions differ in what they take; what one does not know is left out where it is None.
    known = inspect.signature(kernel).parameters
    unused = dict.fromkeys({"quant_out", "scale_out", "routed_scaling_factor"} & set(known))

    def path(args: TailArguments) -> Outputs:
        residual = args.residual
        assert residual is not None
        norm_out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
        kernel(
            allreduce_in=args.routed,
            residual_in=residual,
            norm_weight=args.norm_weight,
            expanded_idx_to_permuted_idx=args.expanded_idx_to_permuted_idx,
            norm_out=norm_out,
            residual_out=residual_out,
            workspace_ptrs=pointers,
            launch_with_pdl=True,
            world_rank=rank,
            world_size=size,
            eps=args.eps,
            shared_expert_output=args.shared_output,
            expert_scale_factor=args.expert_weights,
            **unused,
        )
        return norm_out, residual_out

    try:
        yield path
    finally:
        comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, group=group)
