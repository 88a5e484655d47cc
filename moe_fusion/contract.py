"""The un-reduced MoE output, and the arguments of one tail.

Shape legend: T num_tokens, K top_k, H hidden_dim, R rows of GEMM2's output (padded, never read as a
size), W world size of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_fusion import expect


def _check_routing(rows: Tensor, weights: Tensor, permutation: Tensor | None) -> None:
    """Check [T,K] weights and map against [R,H] rows."""
    expect.floating("expert_weights", weights)
    expect.rank("expert_weights", weights, "[T, K]")
    expect.device("expert_weights", weights, rows.device)
    if permutation is not None:
        name = "expanded_idx_to_permuted_idx"
        expect.dtype(name, permutation, torch.int32)
        expect.shape(name, permutation, "[T, K]", *weights.shape)
        expect.device(name, permutation, rows.device)
    elif rows.shape[0] < weights.shape[0] * weights.shape[1]:
        raise ValueError(
            "routed: expected at least one row for each entry of expert_weights "
            f"{expect.sizes(weights)} when there is no map, got {expect.sizes(rows)}"
        )


@dataclass(frozen=True, eq=False)
class UnfinalizedMoEOutput:
    """GEMM2's permuted rows, before the top-k reduction.

    ``finalize[t] = sum_k expert_weights[t, k] * gemm2_permuted[expanded_idx_to_permuted_idx[t,
    k]]``, where -1 means that the expert is not on this rank: no row is read for it.

    Attributes:
        gemm2_permuted: [R, H] bf16, fp16 or fp32; last dim contiguous, row stride free.
        expert_weights: [T, K] bf16, fp16 or fp32, read in its own dtype.
        expanded_idx_to_permuted_idx: [T, K] int32, each -1 or in [0, R).

    Raises:
        TypeError: a field is not a tensor, or its dtype is wrong.
        ValueError: a shape, the last dim's stride or a device is wrong.
    """

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor

    def __post_init__(self) -> None:
        """Validate kinds, shapes, dtypes and devices."""
        for name in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"):
            expect.tensor(name, getattr(self, name))
        rows = self.gemm2_permuted
        expect.floating("gemm2_permuted", rows)
        expect.rank("gemm2_permuted", rows, "[R, H]")
        if rows.stride(1) != 1:
            raise ValueError(
                "gemm2_permuted: expected a contiguous last dim (stride 1), "
                f"got strides {rows.stride()}"
            )
        _check_routing(rows, self.expert_weights, self.expanded_idx_to_permuted_idx)

    def finalize(self) -> Tensor:
        """The top-k reduction in plain torch: [T, H] fp32."""
        # Not at the head of the file: it imports sympy.
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        index = self.expanded_idx_to_permuted_idx
        rows = self.gemm2_permuted
        if guard_or_false(rows.shape[0] == 0):
            # Every entry is -1, but the gather below reads row 0 in its place.
            return rows.new_zeros((index.shape[0], rows.shape[1]), dtype=torch.float32)
        present = index >= 0
        rows = rows[torch.where(present, index, 0)].float()
        rows = torch.where(present.unsqueeze(-1), rows, 0.0)
        return (rows * self.expert_weights.float().unsqueeze(-1)).sum(1)


@dataclass(frozen=True, eq=False)
class MoEOutput:
    """What an un-reduced MoE layer returns: this rank's addend, still open.

    Attributes:
        routed: the routed experts, [T, H] or an ``UnfinalizedMoEOutput``.
        shared_output: [T, H], the shared expert's partial, or None.
        routed_scaling_factor: multiplies the routed experts only, never the shared expert.

    Raises:
        TypeError: a field has a wrong kind or dtype.
        ValueError: a shape or device is wrong.
    """

    routed: Tensor | UnfinalizedMoEOutput
    shared_output: Tensor | None = None
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        """Validate kinds, shapes, dtypes and devices."""
        if not isinstance(self.routed, UnfinalizedMoEOutput):
            expect.tensor("routed", self.routed)
            expect.floating("routed", self.routed)
            expect.rank("routed", self.routed, "[T, H]")
        if not isinstance(self.routed_scaling_factor, (int, float)):
            got = type(self.routed_scaling_factor).__name__
            raise TypeError(f"routed_scaling_factor: expected a float, got {got}")
        if self.shared_output is not None:
            expect.tensor("shared_output", self.shared_output)
            expect.dtype("shared_output", self.shared_output, self.dtype)
            sizes = (self.num_tokens, self.hidden_dim)
            expect.shape("shared_output", self.shared_output, "[T, H]", *sizes)
            expect.device("shared_output", self.shared_output, self._rows.device)

    @property
    def _rows(self) -> Tensor:
        routed = self.routed
        return routed.gemm2_permuted if isinstance(routed, UnfinalizedMoEOutput) else routed

    @property
    def num_tokens(self) -> int:
        """T."""
        routed = self.routed
        if isinstance(routed, UnfinalizedMoEOutput):
            return routed.expert_weights.shape[0]
        return routed.shape[0]

    @property
    def hidden_dim(self) -> int:
        """H."""
        return self._rows.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        return self._rows.dtype

    def finalize(self) -> Tensor:
        """This rank's partial in plain torch: [T, H] in the activation dtype.

        ``routed_scaling_factor * finalize + shared_output``, summed in fp32 and rounded once. The
        caller's all_reduce, residual add and RMSNorm close the tail; the pass recognises this form.
        """
        routed = self.routed
        total = routed.finalize() if isinstance(routed, UnfinalizedMoEOutput) else routed.float()
        total = total * self.routed_scaling_factor
        if self.shared_output is not None:
            total = total + self.shared_output.float()
        return total.to(self.dtype)


def _register_pytree(cls: type, *names: str, static: tuple[str, ...] = ()) -> None:
    """Register ``cls`` as a pytree node.

    Unflattening does not validate: pytree's users put anything in a leaf's place.
    """

    def flatten(value: Any) -> tuple[list[Any], list[Any]]:
        children = [getattr(value, name) for name in names]
        return children, [getattr(value, name) for name in static]

    def unflatten(children: Iterable[Any], context: list[Any]) -> Any:
        value: Any = object.__new__(cls)
        pairs = zip((*names, *static), (*children, *context), strict=True)
        for name, child in pairs:
            object.__setattr__(value, name, child)
        return value

    def flatten_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        children, context = flatten(value)
        keys: list[pytree.KeyEntry] = [pytree.GetAttrKey(name) for name in names]
        return list(zip(keys, children, strict=True)), context

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"moe_fusion.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


_register_pytree(
    UnfinalizedMoEOutput, "gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"
)
_register_pytree(MoEOutput, "routed", "shared_output", static=("routed_scaling_factor",))


@dataclass(frozen=True, eq=False)
class TailArguments:
    """One rank's arguments of the fused op, in its order, but for the group.

    The fields are those of ``moe_fusion::finalize_allreduce_rms_norm``: see
    ``moe_fusion.op``, where each has its shape and meaning.
    """

    routed: Tensor
    expert_weights: Tensor | None = None
    expanded_idx_to_permuted_idx: Tensor | None = None
    shared_output: Tensor | None = None
    replicated_output: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 1e-6
    weight_bias: float = 0.0
    routed_scaling_factor: float = 1.0
    output_scale: float = 1.0
    output_scale_tensor: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T; never taken from R, which is padded."""
        rows = self.routed if self.expert_weights is None else self.expert_weights
        return rows.shape[0]

    @property
    def hidden_dim(self) -> int:
        """H."""
        return self.routed.shape[1]

    @property
    def top_k(self) -> int | None:
        """K; None for a tail without a finalize."""
        return None if self.expert_weights is None else self.expert_weights.shape[1]

    @property
    def residual_dtype(self) -> torch.dtype:
        """The dtype of ``residual_out``: that of the residual, else the activation dtype."""
        return self.routed.dtype if self.residual is None else self.residual.dtype

    def check(self) -> None:
        """Validate every field.

        Raises:
            TypeError: a dtype is wrong.
            ValueError: a shape, a device or a combination of fields is wrong.
        """
        expect.floating("routed", self.routed)
        expect.rank("routed", self.routed, "[R, H]")
        if self.expert_weights is not None:
            _check_routing(self.routed, self.expert_weights, self.expanded_idx_to_permuted_idx)
        elif self.expanded_idx_to_permuted_idx is not None:
            raise ValueError(
                "expanded_idx_to_permuted_idx: expected None without expert_weights, got a tensor"
            )
        self._check_addends()
        self._check_output_scale()
        if self.norm_weight is not None:
            expect.floating("norm_weight", self.norm_weight)
            expect.shape("norm_weight", self.norm_weight, "[H]", self.hidden_dim)
            expect.device("norm_weight", self.norm_weight, self.routed.device)
        elif self.weight_bias != 0.0:
            raise ValueError(
                f"weight_bias: expected 0.0 without norm_weight, got {self.weight_bias}"
            )

    def _check_output_scale(self) -> None:
        scale, name = self.output_scale_tensor, "output_scale_tensor"
        if scale is None:
            return
        if scale.dim() != 0:
            raise ValueError(f"{name}: expected a 0-d tensor, got shape {expect.sizes(scale)}")
        if not scale.is_floating_point():
            raise TypeError(f"{name}: expected a float dtype, got {scale.dtype}")
        if scale.device.type != "cpu":
            expect.device(name, scale, self.routed.device)

    def _check_addends(self) -> None:
        for name in ("shared_output", "replicated_output", "residual"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if name == "residual":
                expect.floating(name, tensor)
            else:
                expect.dtype(name, tensor, self.routed.dtype)
            expect.shape(name, tensor, "[T, H]", self.num_tokens, self.hidden_dim)
            expect.device(name, tensor, self.routed.device)
