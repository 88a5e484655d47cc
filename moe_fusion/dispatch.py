"""The op on CUDA: one kernel where the group has a workspace that holds the call, else composite.

What depends on shapes, dtypes and the like only is checked and worked out at the first call of a
kind: at decode sizes the kernel takes a few microseconds, and the host must keep up.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fusion import reference
from moe_fusion.admission import Refusal
from moe_fusion.buffers import Workspace
from moe_fusion.config import FusionConfig, given_config
from moe_fusion.contract import TailArguments
from moe_fusion.operands import EPS, GROUP, group_to_reduce, read_eps
from moe_fusion.topology import known_group
from moe_fusion.workspace import note_capture, workspace_for

if TYPE_CHECKING:
    from moe_fusion.kernels.fused_launch import Launch

_ALIGNMENT_BYTES = 16
_PERMUTATION = 2  # expanded_idx_to_permuted_idx among the op's tensors
_SHAPE_OF_ROUTED = 2  # in a kind
_PLANS_MAX = 1024  # kinds of calls; a model that serves has some dozens


@dataclass(frozen=True)
class _Planned:
    """A call of one kind, good while its group, its workspace and its configuration last.

    The environment is not read again: four variables take the host longer than all the rest.
    """

    group: weakref.ReferenceType[dist.ProcessGroup]
    config: FusionConfig | None
    workspace: weakref.ReferenceType[Workspace]
    launch: Launch

    def workspace_of(self, group_name: str) -> Workspace | None:
        """The workspace, if the group of that name is still the one, and the configuration too."""
        group = self.group()
        same = (
            group is not None and group is known_group(group_name) and self.config is given_config()
        )
        return self.workspace() if same else None


_planned: dict[tuple[Any, ...], _Planned] = {}


def _kind(
    tensors: tuple[Tensor | None, ...], weight_bias: float, group_name: str
) -> tuple[tuple[Any, ...], list[int | None]]:
    """What checks and launch parameters depend on, and where the tensors are.

    It depends on what each tensor is but for its numbers and place, and not on R, which changes
    with the routing.
    """
    kind: list[Any] = [group_name, weight_bias == 0.0]
    addresses: list[int | None] = []
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
            addresses.append(None)
            continue
        address = tensor.data_ptr()
        addresses.append(address)
        strides = tensor.is_contiguous() or tensor.stride()
        alignment = address % _ALIGNMENT_BYTES
        kind += tensor.shape, tensor.dtype, strides, alignment, tensor.get_device()
    if tensors[_PERMUTATION] is not None:
        kind[_SHAPE_OF_ROUTED] = kind[_SHAPE_OF_ROUTED][1:]
    return tuple(kind), addresses


def _split(operands: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
    """The op's tensors and its numbers; what is a tensor in host memory is read."""
    scalars = operands[EPS:GROUP]
    scale = operands[GROUP + 1] if len(operands) > GROUP + 1 else None
    if type(scalars[0]) is not float or not scalars[0] >= 0.0:
        scalars = (read_eps(scalars[0]), *scalars[1:])
    if scale is not None and scale.device.type == "cpu" and scale.dim() == 0:
        scaled = TailArguments(operands[0], output_scale=scalars[-1], output_scale_tensor=scale)
        scalars, scale = (*scalars[:-1], reference.scale(scaled).item()), None
    return (*operands[:EPS], scale), scalars


def cuda_kernel(*operands: Any) -> tuple[Tensor, Tensor]:
    """The op's kernel for CUDA; operands and results as in :mod:`moe_fusion.op`."""
    device = operands[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return cuda_kernel(*operands)
    tensors, scalars = _split(operands)
    group_name = operands[GROUP]
    kind, addresses = _kind(tensors, scalars[1], group_name)
    planned = _planned.get(kind)
    workspace = None if planned is None else planned.workspace_of(group_name)
    if planned is None or workspace is None:
        args = TailArguments(operands[0], *tensors[1:-1], *scalars, tensors[-1])  # type: ignore[arg-type, call-arg]
        args.check()
        group = group_to_reduce(group_name)
        answer = _workspace_or_outputs(args, group)
        if isinstance(answer, tuple):
            return answer
        planned, workspace = _plan(kind, args, group, answer), answer
    workspace.check()
    if torch.cuda.is_current_stream_capturing():
        note_capture(planned.group, workspace)
    else:
        workspace.order.take_turn(device)
    return planned.launch(tensors, addresses, scalars)


def _workspace_or_outputs(
    args: TailArguments, group: dist.ProcessGroup | None
) -> Workspace | tuple[Tensor, Tensor]:
    """What to fuse a call like this one with, or this call's outputs where it is not fused."""
    if args.num_tokens == 0:
        return empty_outputs(args)
    from moe_fusion.kernels.composite import composite

    if group is None:
        return composite(args, None)
    found = workspace_for(
        args.num_tokens, args.hidden_dim, args.routed.dtype, group, top_k=args.top_k
    )
    return composite(args, group) if isinstance(found, Refusal) else found


def _plan(
    kind: tuple[Any, ...],
    args: TailArguments,
    group: dist.ProcessGroup | None,
    workspace: Workspace,
) -> _Planned:
    from moe_fusion.kernels.fused_launch import plan_launch

    assert group is not None  # whose workspace this is
    if len(_planned) >= _PLANS_MAX:
        _planned.clear()
    launch = plan_launch(args, workspace)
    planned = _Planned(weakref.ref(group), given_config(), weakref.ref(workspace), launch)
    _planned[kind] = planned
    return planned


def empty_outputs(args: TailArguments) -> tuple[Tensor, Tensor]:
    """Fresh outputs, [T, H] each, not filled."""
    shape = (args.num_tokens, args.hidden_dim)
    return args.routed.new_empty(shape), args.routed.new_empty(shape, dtype=args.residual_dtype)
