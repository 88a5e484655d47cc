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


def dataclass_form(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    if rows.dtype == torch.float64:  # an oracle: the dataclasses take the activation dtypes only
        return where_masked(rows, weights, index)
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index)).finalize()


def unmasked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index] * weights.unsqueeze(-1)).sum(1)


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


MASKED = {
    "where": where_masked,
    "clamp_min and masked_fill": clamp_masked,
    "fp32, mask after the weight": fp32_masked,
    "MoEOutput.finalize": dataclass_form,
}
UNMASKED = {
    "plain gather": unmasked,
    "inverse permutation": inverse_permutation,
    "token-major": token_major,
}
FINALIZE = {**MASKED, **UNMASKED}


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


ALL_REDUCES = {"functional": functional, "waited": waited, "in place": in_place}
