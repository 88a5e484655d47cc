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

from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_fusion import reference
from moe_fusion.admission import Refusal
from moe_fusion.buffers import Workspace
from moe_fusion.contract import TailArguments
from moe_fusion.errors import InferenceOnlyError
from moe_fusion.topology import resolve_group
from moe_fusion.workspace import workspace_for

ALONE = ""  # the group_name of a rank that reduces over nobody else

_FIELDS = [field.name for field in fields(TailArguments)]
_EPS = _FIELDS.index("eps")
_GROUP = _FIELDS.index("output_scale_tensor")  # which follows the group, as it may be left out

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


def check_operands(*operands: object) -> TailArguments:
    """The op's operands without the group, checked; an ``eps`` that is a tensor is read."""
    values = [*operands[:_GROUP], *operands[_GROUP + 1 :]]
    eps = values[_EPS]
    if isinstance(eps, Tensor):
        if eps.dim() != 0 or eps.device.type != "cpu":
            raise ValueError(
                "eps: expected a float or a 0-d CPU tensor, "
                f"got shape {list(eps.shape)} on {eps.device}"
            )
        # A fake tensor holds no number, and none is needed for the outputs' shapes.
        values[_EPS] = 0.0 if isinstance(eps, FakeTensor) or eps.is_meta else eps.item()
    elif eps < 0.0:  # type: ignore[operator]
        raise ValueError(f"eps: expected a float >= 0, got {eps}")
    args = TailArguments(*values)  # type: ignore[arg-type]
    args.check()
    return args


def _group(name: str) -> dist.ProcessGroup | None:
    """The group to reduce over, or None: this rank alone."""
    return resolve_group(name) if name != ALONE else None


def _reference_kernel(*operands: object) -> tuple[Tensor, Tensor]:
    """Reference numerics around the group's own all_reduce, whatever its backend."""
    args = check_operands(*operands)
    group = _group(operands[_GROUP])  # type: ignore[arg-type]
    partial = reference.partial(args).to(args.routed.dtype).contiguous()
    if partial.shape[0] and group is not None:
        dist.all_reduce(partial, group=group)
    norm_out, residual_out = reference.finish(partial, args)
    return norm_out.contiguous(), residual_out.contiguous()


def _host_scale_read(args: TailArguments) -> TailArguments:
    """The same arguments with a scale that is in host memory as a number."""
    scale = args.output_scale_tensor
    if scale is None or scale.device.type != "cpu":
        return args
    return replace(args, output_scale=reference.scale(args).item(), output_scale_tensor=None)


def _cuda_kernel(*operands: object) -> tuple[Tensor, Tensor]:
    """One kernel where the group has a workspace that holds this call, else the composite path."""
    args = _host_scale_read(check_operands(*operands))
    group = _group(operands[_GROUP])  # type: ignore[arg-type]
    if args.num_tokens == 0:
        return _outputs(args)
    from moe_fusion.kernels.composite import composite
    from moe_fusion.kernels.one_shot import one_shot

    found: Workspace | Refusal = Refusal("this rank is alone")
    if group is not None:
        found = workspace_for(
            args.num_tokens, args.hidden_dim, args.routed.dtype, group, top_k=args.top_k
        )
    with torch.cuda.device(args.routed.device):
        if isinstance(found, Refusal):
            return composite(args, group)
        found.order.take_turn()
        return one_shot(args, found)


def _outputs(args: TailArguments) -> tuple[Tensor, Tensor]:
    """Fresh outputs, [T, H] each, not filled."""
    shape = (args.num_tokens, args.hidden_dim)
    return args.routed.new_empty(shape), args.routed.new_empty(shape, dtype=args.residual_dtype)


def fake_outputs(*operands: object) -> tuple[Tensor, Tensor]:
    """The outputs' shapes, dtypes and strides, as the op's fake kernel gives them."""
    return _outputs(check_operands(*operands))


def _backward(*_: object) -> None:
    raise InferenceOnlyError


for _overload in _OVERLOADS:
    _name = f"finalize_allreduce_rms_norm{_overload}"
    _library.impl(_name, _reference_kernel, "CPU")
    _library.impl(_name, _cuda_kernel, "CUDA")
    torch.library.register_fake(f"moe_fusion::{_name}", fake_outputs, lib=_library)
    torch.library.register_autograd(f"moe_fusion::{_name}", _backward, lib=_library)
