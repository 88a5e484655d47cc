"""A decoder whose ranks can run one at a time, with collectives, or all together, without.

Each layer has two tails: after attention and after the experts. They are written out in plain
torch, so that the pass finds them; the routing table is given, so that rounding flips no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional

from moe_fusion.producers import grouped_mm_experts

EPS = 1e-6
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """What is computed in a step.

    Attributes:
        world_size: W.
        num_tokens: T sequences, one token each.
        layers: of the model.
        hidden_dim: H.
        heads: of all ranks.
        experts: all of them on each rank, which has a slice of each.
        top_k: K.
        intermediate_dim: of an expert and of the shared one, on all ranks.
        context: positions in the cache.
    """

    world_size: int
    num_tokens: int
    layers: int = 8
    hidden_dim: int = 7168
    heads: int = 64
    experts: int = 16
    top_k: int = 8
    intermediate_dim: int = 2048
    context: int = 512


class Layer(nn.Module):
    """One rank's shard; each method gives its partial."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, experts = shape.hidden_dim, shape.experts
        own_heads = shape.heads // shape.world_size
        inner = shape.intermediate_dim // shape.world_size

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size), requires_grad=False)

        self.qkv = weight(3 * own_heads * HEAD_DIM, hidden)
        self.out = weight(hidden, own_heads * HEAD_DIM)
        self.router = weight(experts, hidden)
        self.w13 = weight(experts, 2 * inner, hidden)
        self.w2 = weight(experts, hidden, inner)
        self.shared13 = weight(2 * inner, hidden)
        self.shared2 = weight(hidden, inner)
        self.attention_norm = weight(hidden)
        self.experts_norm = weight(hidden)
        cached = (2, shape.num_tokens, own_heads, shape.context, HEAD_DIM)
        self.cache = nn.Buffer(torch.empty(cached))
        self.expert_ids = nn.Buffer(torch.empty(shape.num_tokens, shape.top_k, dtype=torch.int64))

    def attention(self, hidden: Tensor) -> Tensor:
        """[T, H] to this rank's partial [T, H]; the step's key and value come last in the cache."""
        query, key, value = functional.linear(hidden, self.qkv).chunk(3, -1)
        tokens, heads = hidden.shape[0], self.cache.shape[2]
        self.cache[0, :, :, -1] = key.view(tokens, heads, HEAD_DIM)
        self.cache[1, :, :, -1] = value.view(tokens, heads, HEAD_DIM)
        query = query.view(tokens, heads, 1, HEAD_DIM)
        rows = functional.scaled_dot_product_attention(query, self.cache[0], self.cache[1])
        return functional.linear(rows.reshape(tokens, -1), self.out)

    def moe(self, hidden: Tensor) -> Tensor:
        """[T, H] to this rank's partial [T, H]."""
        scores = functional.linear(hidden, self.router).float().sigmoid()
        output = grouped_mm_experts(
            hidden,
            self.expert_ids,
            scores.gather(-1, self.expert_ids),
            self.w13,
            self.w2,
            shared_expert=self.shared,
        )
        return output.finalize()

    def shared(self, hidden: Tensor) -> Tensor:
        """The shared expert."""
        gate, up = functional.linear(hidden, self.shared13).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.shared2)


def norm(total: Tensor, weight: Tensor) -> Tensor:
    """An RMSNorm."""
    return functional.rms_norm(total, total.shape[-1:], weight, EPS)


class Decoder(nn.Module):
    """One rank's shard of all layers, without embedding and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, hidden: Tensor, residual: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
        """[T, H] and [T, H] in, the same out."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            partial = layer.attention(hidden)
            residual = residual + collectives.all_reduce(partial, "sum", group_name)
            hidden = norm(residual, layer.attention_norm)
            partial = layer.moe(hidden)
            residual = residual + collectives.all_reduce(partial, "sum", group_name)
            hidden = norm(residual, layer.experts_norm)
        return hidden, residual


@torch.no_grad()
def make_rank(shape: Shape, rank: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A rank's shard: what is replicated is the same on all, the rest is drawn for each."""
    with torch.device("meta"):
        empty = Decoder(shape)
    decoder = empty.to_empty(device=device).to(dtype)
    own = torch.Generator(device).manual_seed(1 + rank)
    common = torch.Generator(device).manual_seed(0)
    for name, tensor in decoder.state_dict().items():
        generator = common if "norm" in name or "router" in name else own
        if "expert_ids" in name:
            choices = torch.rand(shape.num_tokens, shape.experts, generator=common, device=device)
            tensor.copy_(choices.argsort(-1)[:, : shape.top_k])
        elif "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    return decoder


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first layer's normalised rows and the residual."""
    common = torch.Generator(device).manual_seed(0)
    residual = torch.randn(shape.num_tokens, shape.hidden_dim, generator=common, device=device)
    hidden = norm(residual, torch.ones(shape.hidden_dim, device=device))
    return hidden.to(dtype), residual.to(dtype)


@torch.no_grad()
def together(ranks: Sequence[Decoder], hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The same step of all ranks, whose partials are added in fp32 without a collective."""

    def add(partials: list[Tensor]) -> Tensor:
        return torch.stack([partial.float() for partial in partials]).sum(0).to(residual.dtype)

    for layers in zip(*(rank.layers for rank in ranks), strict=True):
        residual = residual + add([layer.attention(hidden) for layer in layers])
        hidden = norm(residual, layers[0].attention_norm)
        residual = residual + add([layer.moe(hidden) for layer in layers])
        hidden = norm(residual, layers[0].experts_norm)
    return hidden, residual
