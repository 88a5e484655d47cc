"""A small MoE layer and its fp64 oracle, one token and one expert after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

T, K, H, E, INNER = 6, 2, 64, 4, 16
GATES = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


@dataclass
class Layer:
    """A MoE layer's inputs, whole."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor

    def to(self, dtype):
        fields = (getattr(self, f.name) for f in dataclasses.fields(self))
        return Layer(*(v.to(dtype) if v.is_floating_point() else v for v in fields))

    def args(self):
        return self.x, self.ids, self.weights, self.w13, self.w2


def layer(dtype=torch.float32, *, tokens=T, top_k=K, experts=E, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Layer(
        torch.randn(tokens, H, generator=g),
        torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, top_k, dtype=torch.int64),
        torch.rand(tokens, top_k, generator=g),
        0.3 * torch.randn(experts, 2 * INNER, H, generator=g),
        0.3 * torch.randn(experts, H, INNER, generator=g),
    ).to(dtype)


def oracle(data, activation=GATES["silu"], experts=None):
    """The layer's partial in fp64, one token and one expert after the other; of some experts."""
    data = data.to(torch.float64)
    total = torch.zeros(data.x.shape[0], H, dtype=torch.float64)
    for t, k in torch.cartesian_prod(
        torch.arange(data.x.shape[0]), torch.arange(data.ids.shape[1])
    ).tolist():
        e = data.ids[t, k].item()
        if experts is None or e in experts:
            gate, up = (data.w13[e] @ data.x[t]).chunk(2)
            total[t] += data.weights[t, k] * (data.w2[e] @ (activation(gate) * up))
    return total


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()
