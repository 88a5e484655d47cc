"""The op's operands in their order, and the checks of one call."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_fusion.contract import TailArguments
from moe_fusion.topology import resolve_group

ALONE = ""  # the group_name of a rank that reduces over nobody else

_FIELDS = [field.name for field in fields(TailArguments)]
EPS = _FIELDS.index("eps")  # the tensors come before it
GROUP = _FIELDS.index("output_scale_tensor")  # which follows the group, as it may be left out


def read_eps(eps: float | Tensor) -> float:
    """``eps`` as a number; a fake tensor holds none, and none is needed for the outputs' shapes.

    Raises:
        ValueError: it is a tensor that is not 0-d or not in host memory, or a number that is
            negative or NaN.
    """
    if not isinstance(eps, Tensor):
        if not eps >= 0.0:
            raise ValueError(f"eps: expected a float >= 0, got {eps}")
        return eps
    if eps.dim() != 0 or eps.device.type != "cpu":
        raise ValueError(
            "eps: expected a float or a 0-d CPU tensor, "
            f"got shape {list(eps.shape)} on {eps.device}"
        )
    return 0.0 if isinstance(eps, FakeTensor) or eps.is_meta else float(eps.item())


def check_operands(*operands: Any) -> TailArguments:
    """The op's operands without the group, checked; an ``eps`` that is a tensor is read."""
    values = [*operands[:GROUP], *operands[GROUP + 1 :]]
    values[EPS] = read_eps(values[EPS])
    args = TailArguments(*values)
    args.check()
    return args


def group_to_reduce(name: str) -> dist.ProcessGroup | None:
    """The group of that name, or None: this rank alone.

    Raises:
        ValueError: this process has no such group.
    """
    return resolve_group(name) if name != ALONE else None
