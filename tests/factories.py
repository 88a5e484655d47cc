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


class Experts(torch.nn.Module):
    """Top-2 of four experts' rows, summed over the ranks: [T, H] -> [T, H]."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, HIDDEN_DIM, HIDDEN_DIM))

    def forward(self, x):
        weights, chosen = torch.softmax(x[:, :4], -1).topk(2)
        rows = torch.einsum("th,ehi->tei", x, self.up).flatten(0, 1)
        first = torch.arange(x.shape[0]).unsqueeze(1) * 4
        routed = (rows[first + chosen] * weights.unsqueeze(-1)).sum(1)
        return funcol.all_reduce(routed, "sum", dist.group.WORLD)


class Layer(torch.nn.Module):
    """Experts and a shared expert with all_reduces of their own, a residual and an RMSNorm."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()
        self.shared = torch.nn.Linear(HIDDEN_DIM, HIDDEN_DIM, bias=False)
        self.norm = torch.nn.RMSNorm(HIDDEN_DIM, eps=1e-6)

    def forward(self, x):
        shared = funcol.all_reduce(self.shared(x), "sum", dist.group.WORLD)
        x = x + (self.experts(x) + shared)
        return x + self.norm(x)


def _inputs():
    return torch.randn(6, HIDDEN_DIM)


def rms_norm():
    return Tail(torch.nn.RMSNorm(HIDDEN_DIM, eps=1e-6)), (_inputs(),)


def experts():
    return torch.nn.Sequential(Layer(), Layer()), (_inputs(),)


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
