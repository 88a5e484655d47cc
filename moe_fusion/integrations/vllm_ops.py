"""vLLM's all_reduce and norm ops, and its groups, as the pass knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_fusion.passes.custom_ops import (
    register_add_rms_norm,
    register_all_reduce,
    register_rms_norm,
)

_FULL_ROWS = {"variance_size": None}


def device_group_name(group: str) -> str:
    """torch.distributed's name of the group that vLLM calls ``group``, such as ``"tp:0"``.

    Raises:
        LookupError: vLLM has no such group, or has destroyed it.
    """
    names = device_group_names()
    if group not in names:
        raise LookupError(f"expected one of vLLM's groups {sorted(names)}")
    return names[group]


def device_group_names() -> dict[str, str]:
    """torch.distributed's name of each of vLLM's groups, by vLLM's name."""
    from vllm.distributed import parallel_state

    alive = {name: reference() for name, reference in parallel_state._groups.items()}
    return {name: str(g.device_group.group_name) for name, g in alive.items() if g is not None}


def register_ops() -> None:
    """Tell the pass what vLLM's all_reduce and norm ops compute, those that this vLLM has.

    Raises:
        ValueError: an op does not have the arguments that it had when it was tested.
    """
    ops: dict[str, Callable[[Any], None]] = {
        "vllm::all_reduce": _all_reduce,
        "vllm_ir::rms_norm": _ir_rms_norm,
        "vllm_ir::fused_add_rms_norm": _ir_add_rms_norm,
        "_C::rms_norm": _c_rms_norm,
        "_C::fused_add_rms_norm": _c_add_rms_norm,
    }
    for name, describe in ops.items():
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            describe(packet)


def _all_reduce(op: Any) -> None:
    register_all_reduce(
        op, input_arg="tensor", group_arg="group_name", group_resolver=device_group_name
    )


def _ir_rms_norm(op: Any) -> None:
    register_rms_norm(op, input="x", weight="weight", eps="epsilon", requires=_FULL_ROWS)


def _ir_add_rms_norm(op: Any) -> None:
    register_add_rms_norm(
        op,
        input="x",
        residual="x_residual",
        weight="weight",
        eps="epsilon",
        requires=_FULL_ROWS,
    )


def _c_rms_norm(op: Any) -> None:
    register_rms_norm(op, input="input", weight="weight", eps="epsilon", mutates={"result": "norm"})


def _c_add_rms_norm(op: Any) -> None:
    register_add_rms_norm(
        op,
        input="input",
        residual="residual",
        weight="weight",
        eps="epsilon",
        mutates={"input": "norm", "residual": "residual"},
    )
