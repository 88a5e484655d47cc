# ruff: noqa: A002 - the ops' own argument names
"""vLLM's ops with its schemas (0.33.0), for tests where vLLM itself is not installed.

What they compute is written here: an all_reduce over the fake group, which leaves its input as it
is, norms that read the rounded sum, and experts that are two matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in ("vllm", "vllm_ir", "_C")}


def _define(namespace: str, schema: str, function, fake=None) -> None:
    library = _LIBRARIES[namespace]
    name = library.define(schema)
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"{namespace}::{name}", fake or function, lib=library)


def _normalised(x: Tensor, weight: Tensor | None, epsilon: float, size: int | None) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    part = wide if size is None else wide[..., :size]
    wide = wide * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide if weight is None else wide * weight.to(wide.dtype)).to(x.dtype)


def _rms_norm(x, weight, epsilon, variance_size=None):
    return _normalised(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size=None):
    total = x + x_residual
    return _normalised(total, weight, epsilon, variance_size), total


def _c_rms_norm(result, input, weight, epsilon) -> None:
    result.copy_(_normalised(input, weight, epsilon, None))


def _c_fused_add_rms_norm(input, residual, weight, epsilon) -> None:
    residual.add_(input)
    input.copy_(_normalised(residual, weight, epsilon, None))


def _moe(hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    return hidden_states * router_logits.softmax(-1).amax(-1, keepdim=True)


def _moe_forward(hidden_states, router_logits, shared_in, ids, layer_name, unpadded) -> Tensor:
    return _moe(hidden_states, router_logits)


def _moe_forward_shared(hidden_states, router_logits, shared_in, ids, layer_name, unpadded):
    return hidden_states * 0.5, _moe(hidden_states, router_logits)


def _nothing(*_: object) -> None: ...


_EXPERTS = (
    "Tensor router_logits, Tensor? shared_experts_input, Tensor? input_ids, str layer_name, "
    "SymInt hidden_dim_unpadded"
)
_define(
    "vllm",
    "all_reduce(Tensor tensor, str group_name) -> Tensor",
    lambda tensor, group_name: tensor.clone(),
)
_define("vllm", f"moe_forward(Tensor(a0!) hidden_states, {_EXPERTS}) -> Tensor", _moe_forward)
_define(
    "vllm",
    f"moe_forward_shared(Tensor hidden_states, {_EXPERTS}) -> (Tensor, Tensor)",
    _moe_forward_shared,
)
_define(
    "vllm_ir",
    "rms_norm(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    _rms_norm,
)
_define(
    "vllm_ir",
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
    "SymInt? variance_size=None) -> (Tensor, Tensor)",
    _fused_add_rms_norm,
)
_define(
    "_C",
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    _c_rms_norm,
    _nothing,
)
_define(
    "_C",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    _c_fused_add_rms_norm,
    _nothing,
)
