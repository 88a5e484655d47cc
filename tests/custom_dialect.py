# ruff: noqa: A002 - the ops' own argument names
"""Custom ops in the style of other libraries, defined once a process, and tails that call them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

LIBRARY = torch.library.Library("dialect", "DEF")
OPS = torch.ops.dialect


def define(schema: str, function, fake=None) -> None:
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"dialect::{name}", fake or function, lib=LIBRARY)


def summed(tensor: Tensor, group_name: str) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=dist.distributed_c10d._resolve_process_group(group_name))
    return total


def renamed(tensor: Tensor, group_name: str) -> Tensor:
    return summed(tensor, group_name.removeprefix("tp:"))


def several(reduce_op: str, group_name: str, *, tensor: Tensor) -> Tensor:
    return summed(tensor, group_name)


def empty(tensor: Tensor, *_: object) -> Tensor:
    return torch.empty_like(tensor)


define("all_reduce(Tensor tensor, str group_name) -> Tensor", summed, empty)
define("tp_all_reduce(Tensor tensor, str group_name) -> Tensor", renamed, empty)
define(
    "reduce(str reduce_op, str group_name, *, Tensor tensor) -> Tensor",
    several,
    lambda reduce_op, group_name, *, tensor: torch.empty_like(tensor),
)


def normalised(x: Tensor, weight: Tensor | None, eps: float, bias: float = 0.0) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * (bias + weight.to(wide.dtype))).to(x.dtype)


def rms_norm(input: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return normalised(input, weight, epsilon)


def gemma_rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return normalised(input, weight, epsilon, 1.0)


def rms_norm_out(result: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    result.copy_(normalised(input, weight, epsilon))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(input)
    input.copy_(normalised(residual, weight, epsilon))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return normalised(total, weight, epsilon).to(x.dtype), total


def gemma_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, normalised(total, weight, epsilon, 1.0).to(x.dtype)


def no_result(*_: object) -> None: ...


define("rms_norm(Tensor input, Tensor? weight, float epsilon) -> Tensor", rms_norm)
define("gemma_rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor", gemma_rms_norm)
define(
    "rms_norm_out(Tensor(a!) result, Tensor input, Tensor weight, float epsilon) -> ()",
    rms_norm_out,
    no_result,
)
define(
    "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
    fused_add_rms_norm,
    no_result,
)
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon=1e-6) "
    "-> (Tensor, Tensor)",
    add_rms_norm,
)
define(
    "gemma_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) "
    "-> (Tensor, Tensor)",
    gemma_add_rms_norm,
)
