"""What the ranks of ``test_consumer.py`` run: a layer's experts and its tail."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from moe_layers import INNER, E, H, layer

import moe_fusion
from moe_fusion import FusionConfig, UnfinalizedMoEOutput
from moe_fusion.config import set_active_config
from moe_fusion.contract import TailArguments
from moe_fusion.producers import grouped_mm_experts

CEILING = 8
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to split a layer over two ranks."""

    parallelism: str
    dtype: torch.dtype
    tokens: int

    def __str__(self):
        return f"{self.parallelism}-{str(self.dtype).removeprefix('torch.')}-{self.tokens}"


def shard(data, parallelism, rank):
    """This rank's w13, w2 and first expert."""
    if parallelism == "experts":
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        return data.w13[mine], data.w2[mine], mine.start
    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    gate_up = data.w13.view(E, 2, INNER, H)[:, :, half].flatten(1, 2)
    return gate_up, data.w2[..., half].contiguous(), 0


def run_cases(rank, cases):
    set_active_config(FusionConfig(token_ceiling=CEILING))
    with torch.no_grad():
        return [_run(rank.index, case) for case in cases]


def _run(rank, case):
    torch._dynamo.reset()
    data = layer(case.dtype, tokens=case.tokens)
    w13, w2, first = shard(data, case.parallelism, rank)
    residual = torch.randn(case.tokens, H, generator=torch.Generator().manual_seed(9))
    residual = residual.to(case.dtype)
    norm = moe_fusion.MoETailRMSNorm(H, EPS, dtype=case.dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(8))

    def function(x, ids, weights, w13, w2, residual):
        output = grouped_mm_experts(
            x,
            ids,
            weights,
            w13,
            w2,
            local_expert_offset=first,
            shared_expert=lambda x: x * 0.25,
            routed_scaling_factor=1.5,
            group=dist.group.WORLD,
        )
        return output, *norm(output, residual)

    args = (data.x, data.ids, data.weights, w13, w2, residual)
    output, *eager = function(*args)
    _, *compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    rows = output.routed
    unfinalized = isinstance(rows, UnfinalizedMoEOutput)
    arguments = TailArguments(
        *((rows.gemm2_permuted, rows.expert_weights) if unfinalized else (rows, None)),
        rows.expanded_idx_to_permuted_idx if unfinalized else None,
        output.shared_output,
        residual=residual,
        norm_weight=norm.weight.data,
        eps=EPS,
        routed_scaling_factor=output.routed_scaling_factor,
    )
    return {
        "arguments": arguments,
        "eager": eager,
        "compiled": compiled,
        "finished": not unfinalized,
    }
