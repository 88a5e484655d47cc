"""``torch.ops.moe_fusion.finalize_allreduce_rms_norm``: the tail of a MoE layer as one op.

In this order, T num_tokens, K top_k, H hidden_dim, R padded rows, W world size:

    partial      = routed_scaling_factor * finalize(routed, ...) + shared_output
    y            = scale * all_reduce(partial) + replicated_output
    residual_out = residual + y
    norm_out     = residual_out * rsqrt(mean(residual_out ** 2) + eps) * (weight_bias + norm_weight)

where ``scale = output_scale * output_scale_tensor``.

The op is functional: both outputs are fresh and contiguous, never a view of an input. ``norm_out``
has the activation dtype (that of ``routed``), ``residual_out`` the residual's (without one, the
activation dtype). Numerics are those of ``moe_fusion.reference``. An empty ``group_name`` is this
rank alone: there is nothing to reduce, and ``all_reduce`` is the identity.

Errors: ``TypeError`` for a dtype, ``ValueError`` for a shape, a device or an unknown group, each
    with what was expected and what was got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fusion import reference
from moe_fusion.dispatch import cuda_kernel, empty_outputs
from moe_fusion.errors import InferenceOnlyError
from moe_fusion.operands import EPS, GROUP, check_operands, group_to_reduce

_OPERANDS = (
    "Tensor routed, "  # [R,H] rows when expert_weights is given, else [T,H] finalized
    "Tensor? expert_weights, "  # [T,K]
    "Tensor? expanded_idx_to_permuted_idx, "  # [T,K] int32; absent: rows are token-major [T*K,H]
    "Tensor? shared_output, "  # [T,H] partial: added before the reduction
    "Tensor? replicated_output, "  # [T,H] replicated: added after the reduction
    "Tensor? residual, "  # [T,H]
    "Tensor? norm_weight, "  # [H]
)
_SCALARS = (
    "float weight_bias, "  # 1.0 is the Gemma (1 + w) form
    "float routed_scaling_factor, "
    "float output_scale, "  # multiplies the reduced sum
    "str group_name, "
    # 0-d, and each rank's own: on the rows' device, or in host memory, where it is read on the host
    "Tensor? output_scale_tensor=None) -> (Tensor norm_out, Tensor residual_out)"
)
_OVERLOADS = {
    "": "float eps, ",
    # Under dynamic=True Dynamo makes a model's eps an input of the graph: a 0-d tensor in host
    # memory.
    ".eps_tensor": "Tensor eps, ",
}

_library = torch.library.Library("moe_fusion", "DEF")
for _overload, _eps in _OVERLOADS.items():
    _library.define(
        f"finalize_allreduce_rms_norm{_overload}({_OPERANDS}{_eps}{_SCALARS}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
OP = torch.ops.moe_fusion.finalize_allreduce_rms_norm.default
OP_EPS_TENSOR = torch.ops.moe_fusion.finalize_allreduce_rms_norm.eps_tensor


def _reference_kernel(*operands: object) -> tuple[Tensor, Tensor]:
    """Reference numerics around the group's own all_reduce, whatever its backend."""
    args = check_operands(*operands)
    group = group_to_reduce(operands[GROUP])  # type: ignore[arg-type]
    partial = reference.partial(args).to(args.routed.dtype).contiguous()
    if partial.shape[0] and group is not None:
        dist.all_reduce(partial, group=group)
    norm_out, residual_out = reference.finish(partial, args)
    return norm_out.contiguous(), residual_out.contiguous()


def fake_outputs(*operands: object) -> tuple[Tensor, Tensor]:
    """The outputs' shapes, dtypes and strides, as the op's fake kernel gives them."""
    return empty_outputs(check_operands(*operands))


class _InferenceOnly(torch.autograd.Function):
    """The op where a gradient may be asked for: it runs, and its backward is an error."""

    @staticmethod
    def forward(ctx: Any, op: Any, *operands: Any) -> Any:  # noqa: ARG004
        """Call ``op`` below autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            return op(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        """Say that there is no gradient.

        Raises:
            InferenceOnlyError: always.
        """
        raise InferenceOnlyError


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _is_plain(operands: tuple[Any, ...]) -> bool:
    """Whether these are CUDA tensors of no subclass, and nothing is tracing or faking."""
    if not operands[0].is_cuda or torch._C._len_torch_dispatch_stack():
        return False
    return _PLAIN.issuperset(map(type, (*operands[:EPS], *operands[GROUP + 1 :])))


def _above_autograd(op: Any) -> Callable[..., Any]:
    """What :func:`torch.library.register_autograd` would do, 40 us a call sooner."""

    def kernel(*operands: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in operands
        ):
            return _InferenceOnly.apply(op, *operands)
        if _is_plain(operands):
            return cuda_kernel(*operands)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*operands)

    return kernel


for _overload in _OVERLOADS:
    _name = f"finalize_allreduce_rms_norm{_overload}"
    _library.impl(_name, _reference_kernel, "CPU")
    _library.impl(_name, cuda_kernel, "CUDA")
    torch.library.register_fake(f"moe_fusion::{_name}", fake_outputs, lib=_library)
    _op = getattr(torch.ops.moe_fusion.finalize_allreduce_rms_norm, _overload[1:] or "default")
    _library.impl(_name, _above_autograd(_op), "Autograd")
