"""Inputs of one tail for every rank of a group, made from a seed so that any process can make them.

Shape legend: T num_tokens, K top_k, H hidden_dim, R rows of GEMM2's output, W world size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_fusion import reference
from moe_fusion.contract import TailArguments
from moe_fusion.reference import TOLERANCE, relative_error, tolerance

__all__ = [
    "TOLERANCE",
    "Case",
    "assert_close",
    "assert_ranks_agree",
    "oracle",
    "relative_error",
    "same_bits",
    "tolerance",
]

ROUTED_SEED_STRIDE = 1000


@dataclass(frozen=True)
class Case:
    """One tail; ``routing`` is "map" (with entries of -1), "token_major" or "finalized"."""

    num_tokens: int
    hidden_dim: int
    top_k: int = 4
    dtype: torch.dtype = torch.bfloat16
    routing: str = "map"
    weights_dtype: torch.dtype = torch.float32
    norm_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    shared: bool = True
    replicated: bool = False
    residual: bool = True
    norm: bool = True
    routed_scaling_factor: float = 1.0
    output_scale: float = 1.0
    output_scale_tensor: float | None = None
    scale_dtype: torch.dtype = torch.float32
    weight_bias: float = 0.0
    row_padding: int = 0
    seed: int = 0

    def rank(self, rank: int, device: str = "cpu") -> TailArguments:
        """The arguments of one rank: its own partials, and what all ranks have alike."""
        own = torch.Generator().manual_seed(self.seed * ROUTED_SEED_STRIDE + rank + 1)
        common = torch.Generator().manual_seed(self.seed * ROUTED_SEED_STRIDE)
        shape = (self.num_tokens, self.hidden_dim)

        def make(generator, *size, dtype=self.dtype):
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        routed, weights, permutation = self._routing(own)
        norm_dtype = self.norm_dtype or self.dtype
        residual_dtype = self.residual_dtype or self.dtype
        return TailArguments(
            routed=routed.to(device),
            expert_weights=None if weights is None else weights.to(device),
            expanded_idx_to_permuted_idx=None if permutation is None else permutation.to(device),
            shared_output=make(own, *shape) if self.shared else None,
            replicated_output=make(common, *shape) if self.replicated else None,
            residual=make(common, *shape, dtype=residual_dtype) if self.residual else None,
            norm_weight=make(common, self.hidden_dim, dtype=norm_dtype) if self.norm else None,
            weight_bias=self.weight_bias if self.norm else 0.0,
            routed_scaling_factor=self.routed_scaling_factor,
            output_scale=self.output_scale,
            output_scale_tensor=self._scale(device),
        )

    def _scale(self, device):
        """A 0-d tensor at an address that no vector load could take."""
        if self.output_scale_tensor is None:
            return None
        values = torch.tensor([torch.nan, self.output_scale_tensor], dtype=self.scale_dtype)
        return values.to(device)[1]

    def _routing(self, generator):
        tokens, hidden, top_k = self.num_tokens, self.hidden_dim, self.top_k
        if self.routing == "finalized":
            return torch.randn(tokens, hidden, generator=generator).to(self.dtype), None, None
        weights = torch.rand(tokens, top_k, generator=generator).to(self.weights_dtype)
        if self.routing == "token_major":
            rows = torch.randn(tokens * top_k, hidden, generator=generator)
            return rows.to(self.dtype), weights, None
        num_rows = tokens * top_k + 5
        padded = torch.full((num_rows, hidden + self.row_padding), torch.nan, dtype=self.dtype)
        present = torch.rand(tokens, top_k, generator=generator) < 0.7
        present[: tokens // 4] = False  # some tokens have no expert on this rank
        order = torch.randperm(num_rows, generator=generator)[: tokens * top_k]
        permutation = torch.where(present, order.view(tokens, top_k), -1).to(torch.int32)
        used = permutation[present].long()
        padded[used, :hidden] = torch.randn(len(used), hidden, generator=generator).to(self.dtype)
        weights[~present] = torch.nan  # neither row nor weight of -1 is read
        return padded[:, :hidden], weights, permutation


def oracle(case: Case, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm_out`` and ``residual_out`` of every rank, in fp64."""
    ranks = [case.rank(rank) for rank in range(world_size)]
    return reference.tail(ranks, torch.float64)[0]


def assert_close(case: Case, got: tuple[torch.Tensor, torch.Tensor], world_size: int) -> None:
    """Both outputs, dtypes and shapes against the oracle."""
    expected_dtypes = (case.dtype, case.rank(0).residual_dtype)
    exact = oracle(case, world_size)
    for name, value, want, dtype in zip(
        ("norm_out", "residual_out"), got, exact, expected_dtypes, strict=True
    ):
        assert value.dtype == dtype, (name, value.dtype)
        assert value.shape == want.shape, (name, value.shape)
        error = relative_error(value, want)
        assert error <= tolerance(case.dtype, want.numel()), f"{name}: error {error:.2e} in {case}"


def same_bits(left, right):
    pairs = zip(left, right, strict=True)
    return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in pairs)


def assert_ranks_agree(outputs):
    for other in outputs[1:]:
        for one, two in zip(outputs[0], other, strict=True):
            assert same_bits(one, two)
