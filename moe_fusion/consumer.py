"""The tail of a MoE layer for people who write their own model: a function and a module.

Both call the op, compiled or not, so the numbers are the same either way. T num_tokens, H
hidden_dim; a partial or a residual may have more leading dimensions, as [B, S, H] with T = B * S.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_fusion import expect
from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput
from moe_fusion.op import OP
from moe_fusion.operands import ALONE, read_eps
from moe_fusion.topology import reducing_group


def finalize_allreduce_rms_norm(
    moe_output: MoEOutput | Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    *,
    group: str | dist.ProcessGroup | None = None,
    weight_bias: float = 0.0,
    replicated_output: Tensor | None = None,
    output_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Close a tail: finalize, all_reduce, residual add and RMSNorm.

    ``y = output_scale * all_reduce(partial) + replicated_output``; ``residual_out = residual + y``;
    ``norm_out = rms_norm(residual_out, eps) * (weight_bias + norm_weight)``. Numerics are those of
    ``moe_fusion.reference``.

    Args:
        moe_output: this rank's partial: a ``MoEOutput``, or a tensor [T, H] or [B, S, H] that
            needs no finalize, such as attention's output projection.
        residual: [T, H] or [B, S, H], the same on every rank, or None.
        norm_weight: [H], or None for a norm without a weight.
        eps: of the norm.
        group: the tensor-parallel group or its name. None is the default group. Over one rank, or
            where no group was initialised, nothing is reduced.
        weight_bias: 1.0 for Gemma's ``1 + weight``.
        replicated_output: [T, H] or [B, S, H], the same on every rank, added after the reduction.
        output_scale: multiplies the reduced sum.

    Returns:
        ``norm_out`` and ``residual_out``, in the shape of ``residual``, without one of
        ``moe_output`` (a ``MoEOutput`` is [T, H]); ``norm_out`` in the activation dtype,
        ``residual_out`` in the residual's.

    Raises:
        TypeError: a kind or dtype is wrong.
        ValueError: a shape, a device, ``eps`` or the group is wrong.
    """
    output, shape = _opened(moe_output, residual)
    if norm_weight is not None:
        expect.tensor("norm_weight", norm_weight)
    numbers = {"eps": eps, "weight_bias": weight_bias, "output_scale": output_scale}
    for name, value in numbers.items():
        expect.number(name, value)
    hidden_dim = output.hidden_dim
    weights = index = None
    rows = output.routed
    if isinstance(rows, UnfinalizedMoEOutput):
        weights, index = rows.expert_weights, rows.expanded_idx_to_permuted_idx
        rows = rows.gemm2_permuted
    reducing = reducing_group(group)
    norm_out, residual_out = OP(
        rows,
        weights,
        index,
        output.shared_output,
        _flat("replicated_output", replicated_output, shape),
        None if residual is None else residual.reshape(-1, hidden_dim),
        norm_weight,
        float(eps),
        float(weight_bias),
        float(output.routed_scaling_factor),
        float(output_scale),
        ALONE if reducing is None else reducing.group_name,
    )
    return norm_out.view(shape), residual_out.view(shape)


def _opened(
    moe_output: MoEOutput | Tensor, residual: Tensor | None
) -> tuple[MoEOutput, torch.Size]:
    """The partial as [T, H] rows, and the shape of what the tail returns."""
    if residual is not None:
        expect.tensor("residual", residual)
    if isinstance(moe_output, MoEOutput):
        sizes = torch.Size((moe_output.num_tokens, moe_output.hidden_dim))
        if residual is None:
            return moe_output, sizes
        _check_rows("residual", residual, sizes)
        return moe_output, residual.shape
    if not isinstance(moe_output, Tensor):
        raise TypeError(
            f"moe_output: expected a MoEOutput or a torch.Tensor, got {type(moe_output).__name__}"
        )
    if moe_output.dim() < 2:
        raise ValueError(
            f"moe_output: expected shape [T, H] or [B, S, H], got {expect.sizes(moe_output)}"
        )
    if residual is not None and residual.shape != moe_output.shape:
        raise ValueError(
            f"residual: expected shape {expect.sizes(moe_output)} (that of moe_output), "
            f"got {expect.sizes(residual)}"
        )
    return MoEOutput(moe_output.reshape(-1, moe_output.shape[-1])), moe_output.shape


def _check_rows(name: str, value: Tensor, sizes: torch.Size) -> None:
    """``value`` is [T, H], or the same rows with T split over more dimensions."""
    num_tokens, hidden_dim = sizes
    rows = value.shape[:-1].numel()
    if value.dim() < 2 or value.shape[-1] != hidden_dim or rows != num_tokens:
        raise ValueError(
            f"{name}: expected shape [T, H] = [{num_tokens}, {hidden_dim}] or [B, S, H] with "
            f"B * S = T, got {expect.sizes(value)}"
        )


def _flat(name: str, value: Tensor | None, shape: torch.Size) -> Tensor | None:
    if value is None:
        return None
    expect.tensor(name, value)
    _check_rows(name, value, torch.Size((shape[:-1].numel(), shape[-1])))
    return value.reshape(-1, shape[-1])


class MoETailRMSNorm(nn.Module):
    """The RMSNorm after a tail, with the tail: it reduces, adds the residual and normalises.

    Called with ``(moe_output, residual)`` it returns ``(norm_out, residual_out)``, as
    ``finalize_allreduce_rms_norm`` does. It takes a ``MoEOutput`` and a plain partial alike, so
    a decoder layer is written once for MoE and dense layers, large and small batches.

    Args:
        hidden_dim: H, at least 1.
        eps: of the norm, at least 0.
        weight_bias: 1.0 for Gemma's ``1 + weight``; the weight then starts at 0, else at 1.
        group: the tensor-parallel group or its name; None is the default group.
        device: of the weight.
        dtype: of the weight.

    Raises:
        TypeError: ``hidden_dim`` is no int or ``eps`` no number.
        ValueError: either is out of its range.
    """

    weight: nn.Parameter

    def __init__(
        self,
        hidden_dim: int,
        eps: float = 1e-6,
        *,
        weight_bias: float = 0.0,
        group: str | dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if type(hidden_dim) is not int:
            raise TypeError(f"hidden_dim: expected an int, got {type(hidden_dim).__name__}")
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim: expected at least 1, got {hidden_dim}")
        expect.number("eps", eps)
        self.eps = read_eps(eps)
        self.weight_bias = weight_bias
        # By name, so that the module can be copied and outlives a group that is made anew.
        self.group_name = group.group_name if isinstance(group, dist.ProcessGroup) else group
        start = torch.full((hidden_dim,), 1.0 - weight_bias, device=device, dtype=dtype)
        self.weight = nn.Parameter(start)

    def forward(
        self, moe_output: MoEOutput | Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``norm_out`` and ``residual_out``, each in the shape of ``residual``."""
        return finalize_allreduce_rms_norm(
            moe_output,
            residual,
            self.weight,
            self.eps,
            group=self.group_name,
            weight_bias=self.weight_bias,
        )

    def extra_repr(self) -> str:
        """The settings, as ``print(model)`` shows them."""
        return f"{self.weight.shape[0]}, eps={self.eps}, weight_bias={self.weight_bias}"
