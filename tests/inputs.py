"""Random inputs of a tail, poisoned where nothing may read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

T, K, H = 6, 2, 64
PADDING_ROWS = 5


@dataclass
class Inputs:
    """One rank's tensors."""

    rows: Tensor
    weights: Tensor
    index: Tensor
    shared: Tensor
    residual: Tensor
    norm_weight: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """All float tensors in ``dtype``."""
        values = [getattr(self, f.name) for f in fields(self)]
        return Inputs(*(v.to(dtype) if v.is_floating_point() else v for v in values))

    def args(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]


def make(
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = T,
    top_k: int = K,
    hidden: int = H,
    missing: bool = False,
    rank: int = 0,
    weights: torch.dtype | None = None,
    norm_weight: torch.dtype | None = None,
) -> Inputs:
    """Inputs that differ by rank; with ``missing`` a third of the map is -1.

    The first T * K rows hold numbers, since some spellings have no map; of the others the map names
    none, and they hold NaN. With ``missing`` every row that no entry names is NaN as well.
    """
    g = torch.Generator().manual_seed(1000 * tokens + rank)
    count = tokens * top_k
    rows = torch.randn(count + PADDING_ROWS, hidden, generator=g)
    rows[count:] = float("nan")
    index = torch.randperm(count, generator=g).view(tokens, top_k).to(torch.int32)
    if missing:
        gone = torch.rand(tokens, top_k, generator=g) < 0.34
        rows[index[gone].long()] = float("nan")
        index[gone] = -1
        if tokens:
            rows[index[0][index[0] >= 0].long()] = float("nan")
            index[0] = -1
    routing = torch.rand(tokens, top_k, generator=g) + 0.1
    shared_gen = torch.Generator().manual_seed(7 + rank)
    common = torch.Generator().manual_seed(11)
    return Inputs(
        rows.to(dtype),
        routing.to(weights or dtype),
        index,
        torch.randn(tokens, hidden, generator=shared_gen).to(dtype),
        torch.randn(tokens, hidden, generator=common).to(dtype),
        (1.0 + 0.1 * torch.randn(hidden, generator=common)).to(norm_weight or dtype),
    )
