"""Calls a compiled tail at several sizes under CUDA graphs, and tells which path each size took."""

from __future__ import annotations

import spellings
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import moe_fusion
from moe_fusion import FusionConfig, dispatch
from moe_fusion.admission import Refusal

HIDDEN = 2880
CEILING = 8
SIZES = (4, 8, 9, 24, 4, 24, 8, 9)
ROUNDS = 3  # the first call of a size warms up, the second captures, the third replays


def tail(rows, residual, weight):
    total = residual + spellings.functional(rows)
    return spellings.norm_a(total, weight), total


def _arguments(tokens, seed, rank, device):
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * seed + rank)
    rows = torch.randn(tokens, HIDDEN, generator=own)
    residual = torch.randn(tokens, HIDDEN, generator=shared)
    weight = 1 + 0.1 * torch.randn(HIDDEN, generator=shared)
    return [tensor.bfloat16().to(device) for tensor in (rows, residual, weight)]


def call_each_size(rank, **limits):
    """Call under ``reduce-overhead``; ``limits`` are those of ``mark_dynamic``.

    Returns:
        Graphs that the pass saw, tails that it fused, what Inductor captured no graph for, for each
        size at which the op ran whether the op found it admissible, and the largest error relative
        to the unfused tail's largest value.
    """
    torch._dynamo.reset()
    counters.clear()
    admitted, ask = {}, dispatch.workspace_for

    def asking(num_tokens, *args, **kwargs):
        found = ask(num_tokens, *args, **kwargs)
        over = isinstance(found, Refusal) and found.reason.startswith("token ceiling")
        admitted[num_tokens] = not over
        return found

    dispatch.workspace_for = asking
    error = 0.0
    config = FusionConfig(token_ceiling=CEILING)
    settings = {"force_disable_caches": True}
    try:
        with (
            torch.no_grad(),
            torch._inductor.config.patch(**settings),
            moe_fusion.fusing(config) as report,
        ):
            compiled = torch.compile(tail, mode="reduce-overhead", fullgraph=True)
            for number, tokens in enumerate(SIZES * ROUNDS):
                args = _arguments(tokens, number, rank, "cuda")
                for tensor in args[:2]:
                    torch._dynamo.mark_dynamic(tensor, 0, **limits)
                torch.compiler.cudagraph_mark_step_begin()
                got = [tensor.clone() for tensor in compiled(*args)]
                for one, two in zip(got, tail(*args), strict=True):
                    difference = (one.float() - two.float()).abs().max() / two.float().abs().max()
                    error = max(error, difference.item())
        torch.cuda.synchronize()
        moe_fusion.check()
    finally:
        dispatch.workspace_for = ask
    skipped = counters["inductor"]["cudagraph_skips"]
    return report.graphs, report.fused, skipped, admitted, error


def on_nccl(rank, world_size, folder, limits):
    """The same as one of ``world_size`` ranks, each with a device of its own."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    try:
        return call_each_size(rank, **limits)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()
