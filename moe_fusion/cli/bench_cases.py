"""What ``moe-fusion bench`` measures: the cases, their inputs and the least that they could take.

Shape legend: T num_tokens, K top_k, H hidden_dim, W world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_fusion import reference
from moe_fusion.cli.models import DTYPES
from moe_fusion.contract import TailArguments

ROUTING_ENTRY_BYTES = 8  # an fp32 weight and an int32 of the map
PAST_CACHE_FACTOR = 2  # inputs in use between two reads of one, over the size of the L2


@dataclass(frozen=True)
class Case:
    """One tail: every expert present, shared output, residual and norm weight.

    Attributes:
        world_size: W.
        num_tokens: T.
        hidden_dim: H.
        top_k: K.
        dtype: of activations: "bf16", "fp16" or "fp32".
    """

    world_size: int
    num_tokens: int
    hidden_dim: int
    top_k: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The activation dtype."""
        return DTYPES[self.dtype]

    @property
    def partial_bytes(self) -> int:
        """One [T, H] tensor."""
        return self.num_tokens * self.hidden_dim * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """What one rank reads: rows, weights and map, shared output, residual, norm weight."""
        routing = self.num_tokens * self.top_k * ROUTING_ENTRY_BYTES
        norm_weight = self.hidden_dim * self.torch_dtype.itemsize
        return (self.top_k + 2) * self.partial_bytes + routing + norm_weight

    @property
    def bound(self) -> float:
        """The largest relative error of an output against the fp64 oracle."""
        return reference.tolerance(self.torch_dtype, self.num_tokens * self.hidden_dim)

    def inputs(self, rank: int, device: str | torch.device) -> TailArguments:
        """One rank's arguments: its own partials, and what all ranks have alike."""
        own = torch.Generator(device).manual_seed(rank + 1)
        common = torch.Generator(device).manual_seed(0)
        shape = (self.num_tokens, self.hidden_dim)

        def normal(generator: torch.Generator, *size: int) -> Tensor:
            numbers = torch.randn(*size, generator=generator, device=device)
            return numbers.to(self.torch_dtype)

        rows = self.num_tokens * self.top_k
        order = torch.randperm(rows, generator=own, device=device).int()
        return TailArguments(
            normal(own, rows, self.hidden_dim),
            torch.rand(self.num_tokens, self.top_k, generator=own, device=device),
            order.view(self.num_tokens, self.top_k),
            shared_output=normal(own, *shape),
            residual=normal(common, *shape),
            norm_weight=normal(common, self.hidden_dim),
        )


def every_case(
    world_sizes: Iterable[int],
    tokens: Iterable[int],
    hidden_dims: Iterable[int],
    top_ks: Iterable[int],
    dtypes: Iterable[str],
) -> list[Case]:
    """The cross product, T changing fastest."""
    tokens, hidden_dims, top_ks = list(tokens), list(hidden_dims), list(top_ks)
    return [
        Case(world_size, num_tokens, hidden_dim, top_k, dtype)
        for dtype in dtypes
        for hidden_dim in hidden_dims
        for top_k in top_ks
        for world_size in world_sizes
        for num_tokens in tokens
    ]


def copy_of(args: TailArguments) -> TailArguments:
    """The same numbers in memory of their own."""
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(args)}
    for name, value in values.items():
        values[name] = value.clone() if isinstance(value, Tensor) else value
    return TailArguments(**values)


def copies_past_cache(case: Case, ranks: int, cache_bytes: int) -> int:
    """Copies of ``ranks`` ranks' inputs, used in turn, that are gone from a cache in between."""
    return max(1, -(-PAST_CACHE_FACTOR * cache_bytes // (ranks * case.input_bytes)))


def exchanged_bytes(case: Case, *, two_shot: bool) -> int:
    """What one rank writes into its peers' workspaces and reads from its own."""
    peers = case.world_size - 1
    if two_shot:  # partials to the tokens' owners, then sums to all: each way 1 / W of the rows
        return 4 * peers * case.partial_bytes // case.world_size
    return 2 * peers * case.partial_bytes


def moved_bytes(case: Case, *, two_shot: bool) -> int:
    """What one rank has to read and write: its inputs, two outputs and the exchange."""
    return case.input_bytes + 2 * case.partial_bytes + exchanged_bytes(case, two_shot=two_shot)


def byte_floor_us(case: Case, *, two_shot: bool, ranks: int, terabytes_per_s: float) -> float:
    """Microseconds to move the bytes of ``ranks`` ranks that share one device's memory."""
    return ranks * moved_bytes(case, two_shot=two_shot) / terabytes_per_s / 1e6
