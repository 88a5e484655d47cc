"""What ``moe-fusion explain --factory factories:...`` is pointed at."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

HIDDEN_DIM = 64


class Tail(torch.nn.Module):
    """A row-parallel projection and what follows it: [T, H] -> [T, H]."""

    def __init__(self, norm, *, breaks_graph=False):
        super().__init__()
        self.proj = torch.nn.Linear(HIDDEN_DIM, HIDDEN_DIM, bias=False)
        self.norm = norm
        self.breaks_graph = breaks_graph

    def forward(self, x):
        residual = x + funcol.all_reduce(self.proj(x), "sum", dist.group.WORLD)
        x = self.norm(residual)
        if self.breaks_graph:
            torch._dynamo.graph_break()
        return residual + funcol.all_reduce(self.proj(x), "max", dist.group.WORLD)


def _inputs():
    return torch.randn(6, HIDDEN_DIM)


def rms_norm():
    return Tail(torch.nn.RMSNorm(HIDDEN_DIM, eps=1e-6)), (_inputs(),)


def graph_break():
    return Tail(torch.nn.RMSNorm(HIDDEN_DIM, eps=1e-6), breaks_graph=True), {"x": _inputs()}


def layer_norm():
    return Tail(torch.nn.LayerNorm(HIDDEN_DIM)), (_inputs(),)


def no_inputs():
    return Tail(torch.nn.functional.silu)


def not_a_model():
    return torch.nn.functional.silu, (_inputs(),)


def wrong_shapes():
    return Tail(torch.nn.RMSNorm(HIDDEN_DIM)), (torch.randn(6, HIDDEN_DIM + 1),)
