"""The tail in plain torch as Inductor compiles it, around an all_reduce that the caller names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fusion.contract import MoEOutput, TailArguments, UnfinalizedMoEOutput


def partial(rows: Tensor, weights: Tensor, permutation: Tensor, shared: Tensor) -> Tensor:
    """A rank's addend: [T, H] in the activation dtype."""
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, permutation), shared).finalize()


def finish(
    reduced: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual add and the RMSNorm: ``norm_out`` and ``residual_out``, [T, H] each."""
    residual_out = residual + reduced
    value = residual_out.float()
    norm = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (norm * norm_weight.float()).to(reduced.dtype), residual_out


def left_out(partial: Tensor) -> Tensor:
    """No all_reduce: what remains is a floor for every unfused path."""
    return partial


@dataclass(frozen=True)
class Unfused:
    """The two functions, compiled apart, as an all_reduce between them leaves them."""

    partial: Callable[..., Tensor] = partial
    finish: Callable[..., tuple[Tensor, Tensor]] = finish

    def __call__(
        self, args: TailArguments, all_reduce: Callable[[Tensor], Tensor] = left_out
    ) -> tuple[Tensor, Tensor]:
        """``norm_out`` and ``residual_out`` of one rank."""
        own = self.partial(
            args.routed, args.expert_weights, args.expanded_idx_to_permuted_idx, args.shared_output
        )
        return self.finish(all_reduce(own), args.residual, args.norm_weight, args.eps)


def compiled(*, dynamic: bool) -> Unfused:
    """Compiled by Inductor: for each T anew, or once for all T above 1."""
    options: dict[str, Any] = {"dynamic": dynamic, "fullgraph": True}
    return Unfused(torch.compile(partial, **options), torch.compile(finish, **options))
