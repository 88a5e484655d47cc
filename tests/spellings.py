"""The ways in which people write each part of a tail, as plain functions.

T num_tokens, K top_k, H hidden_dim, R rows of GEMM2's output. The table tests compose them; the
generator of random tails draws from them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from moe_fusion import MoEOutput, UnfinalizedMoEOutput

EPS = 1e-6


def where_masked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    present = index >= 0
    gathered = rows[torch.where(present, index, 0).long()]
    gathered = torch.where(present.unsqueeze(-1), gathered, 0.0)
    return (gathered * weights.unsqueeze(-1)).sum(1)


def clamp_masked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    flat = index.flatten()
    gathered = rows[flat.clamp_min(0)].masked_fill((flat < 0).unsqueeze(-1), 0.0)
    return (weights.unsqueeze(-1) * gathered.view(*index.shape, -1)).sum(dim=-2)


def fp32_masked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    present = index > -1
    gathered = rows[index.clamp(min=0)].float() * weights.float()[..., None]
    gathered = torch.where(present[..., None], gathered, 0.0)
    return gathered.sum(dim=1).to(rows.dtype)


def not_missing(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The map as it is: -1 reads the last row, and the mask drops it."""
    gathered = torch.where((index != -1).unsqueeze(-1), rows[index], 0.0)
    return (gathered * weights.unsqueeze(-1)).sum(1)


def dataclass_form(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    if rows.dtype == torch.float64:  # an oracle: the dataclasses take the activation dtypes only
        return where_masked(rows, weights, index)
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index)).finalize()


def unmasked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index] * weights.unsqueeze(-1)).sum(1)


def embedding(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (torch.nn.functional.embedding(index, rows) * weights.unsqueeze(-1)).sum(1)


def index_select(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    gathered = rows.index_select(0, index.flatten()).view(*index.shape, -1)
    return (weights.unsqueeze(-1) * gathered).sum(1)


def kept_dimension(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index] * weights.unsqueeze(-1)).sum(1, keepdim=True).squeeze(1)


def inverse_permutation(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Weights applied in permuted order, then rows put back, as transformers' grouped_mm does."""
    order = torch.sort(index.flatten()).indices
    weighted = rows[: index.numel()] * weights.flatten()[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return weighted[inverse].view(*index.shape, -1).sum(dim=1).to(rows.dtype)


def token_major(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    weighted = rows[: index.numel()] * weights.reshape(-1).unsqueeze(-1)
    return weighted.view(index.shape[0], index.shape[1], -1).sum(dim=1).to(rows.dtype)


def zero_row(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Absent entries read a row of zeros that is appended."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    safe = torch.where(index >= 0, index, rows.shape[0])
    return (padded[safe] * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def expert_parallel(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Sorted by expert with absent ones last, masked in that order, as transformers does."""
    flat = index.flatten()
    absent = flat < 0
    order = torch.where(absent, flat.numel(), flat).sort().indices
    gone = absent[order]
    kept = torch.where(gone.unsqueeze(-1), 0.0, rows[: flat.numel()][flat[order].clamp(min=0)])
    routing = torch.where(absent.view(index.shape), 0.0, weights)
    weighted = kept * routing.flatten()[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return weighted[inverse].view(*index.shape, -1).sum(dim=1).to(rows.dtype)


MASKED = {
    "where": where_masked,
    "clamp_min and masked_fill": clamp_masked,
    "fp32, mask after the weight": fp32_masked,
    "!= -1": not_missing,
    "MoEOutput.finalize": dataclass_form,
    "zero row": zero_row,
    "expert parallel": expert_parallel,
}


def inverse_by_argsort(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    order = index.flatten().argsort(stable=True)
    weighted = rows[: index.numel()] * weights.flatten()[order].unsqueeze(-1)
    return weighted[order.argsort()].view(*index.shape, -1).sum(dim=1).to(rows.dtype)


def einsum(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """gpt-fast."""
    each = rows[: index.numel()].view(*index.shape, -1)
    return torch.einsum("tei,te->ti", each, weights.to(rows.dtype))


def _sorted(rows: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(index.flatten(), stable=True)
    scores = weights.flatten()[order].reshape(-1, 1)
    return (rows[: index.numel()].to(scores.dtype) * scores).to(rows.dtype), order


def scatter_add(rows: Tensor, weights: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    """torchtitan: sorted rows added to their tokens."""
    weighted, order = _sorted(rows, weights, index)
    token = (order // index.shape[1]).reshape(-1, 1).expand(-1, rows.shape[1])
    base = rows.new_zeros(index.shape[0], rows.shape[1]) if base is None else base
    return base.scatter_add(0, token, weighted)


def index_add(rows: Tensor, weights: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    weighted, order = _sorted(rows, weights, index)
    base = rows.new_zeros(index.shape[0], rows.shape[1]) if base is None else base
    return base.index_add(0, order // index.shape[1], weighted)


def index_put_bmm(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """torchtitan: rows put back in place, then a matrix product with fp32 weights."""
    order = torch.argsort(index.flatten(), stable=True)
    back = torch.zeros_like(rows[: index.numel()])
    back[order] = rows[: index.numel()]
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    each = back.view(*index.shape, -1).to(wide)
    return torch.bmm(weights.to(wide).unsqueeze(1), each).to(rows.dtype).squeeze(1)


UNMASKED = {
    "plain gather": unmasked,
    "embedding": embedding,
    "index_select": index_select,
    "sum with keepdim": kept_dimension,
    "inverse permutation": inverse_permutation,
    "inverse by argsort": inverse_by_argsort,
    "token-major": token_major,
    "einsum": einsum,
    "scatter_add": scatter_add,
    "index_add": index_add,
    "index_put and bmm": index_put_bmm,
}
FINALIZE = {**MASKED, **UNMASKED}


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def norm_a(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def norm_a_commuted(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = torch.rsqrt(eps + wide.pow(2).mean(-1, keepdim=True)) * wide
    return wide.to(x.dtype) * weight


def norm_a_square(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + eps)).type_as(
        x
    ) * weight


def norm_quotient(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def norm_power(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)
    return weight * wide.to(x.dtype)


def norm_reciprocal(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps).reciprocal()
    return (weight * wide).to(x.dtype)


def norm_unsqueezed(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1).unsqueeze(-1) + eps)
    return weight * wide.to(x.dtype)


def norm_added_up(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) / x.shape[-1]
    return weight * (wide * torch.rsqrt(mean + eps)).to(x.dtype)


def norm_b(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def norm_f(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def norm_f_no_weight(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), None, eps)


def norm_no_weight(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_gemma(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


NORMS = {
    "A": norm_a,
    "A, commuted": norm_a_commuted,
    "A, x * x": norm_a_square,
    "A, x / sqrt": norm_quotient,
    "A, pow(-0.5)": norm_power,
    "A, mean and unsqueeze": norm_unsqueezed,
    "A, sum / H": norm_added_up,
    "B, sqrt and reciprocal": norm_reciprocal,
    "B": norm_b,
    "F.rms_norm": norm_f,
    "F.rms_norm, no weight": norm_f_no_weight,
    "no weight": norm_no_weight,
    "Gemma": norm_gemma,
}


def functional(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", "0")


def waited(x: Tensor) -> Tensor:
    """Functional collectives wait when traced; some authors wait as well."""
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", "0"))


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def coalesced_alone(x: Tensor) -> Tensor:
    return funcol.all_reduce_coalesced([x], "sum", "0")[0]


ALL_REDUCES = {
    "functional": functional,
    "waited": waited,
    "in place": in_place,
    "coalesced alone": coalesced_alone,
}
