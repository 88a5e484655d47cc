"""A rank's decode step of ``benchmarks/decode_model.py``, compiled with the pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from decode_model import Shape, inputs, make_rank, together

import moe_fusion
from moe_fusion.cli.explain import without_caches

CPU = torch.device("cpu")
SHAPE = Shape(
    2, 3, layers=2, hidden_dim=256, heads=4, experts=8, top_k=2, intermediate_dim=128, context=16
)


def step(rank, dtype):
    """The fused tails and all_reduces left, this rank's outputs and those of all together."""
    data = inputs(SHAPE, CPU, dtype)
    decoder = make_rank(SHAPE, rank.index, CPU, dtype)
    with torch.no_grad(), without_caches(), moe_fusion.fusing() as report:
        compiled = torch.compile(decoder, fullgraph=True)
        got = compiled(*data, dist.group.WORLD.group_name)
    every = [make_rank(SHAPE, index, CPU, dtype).float() for index in range(SHAPE.world_size)]
    want = together(every, *(tensor.float() for tensor in data))
    return (report.fused, report.all_reduces_after), got, want
