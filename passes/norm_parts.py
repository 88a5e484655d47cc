"""What every RMSNorm has, written out or one op: the sum it reads, its epsilon, its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moe_fusion.passes.nodes import (
    Size,
    add_operands,
    arg,
    calls,
    constant,
    dtype,
    either_order,
    has_value,
    is_float,
    is_scalar_tensor,
    is_widening,
    keeps_rows,
    same,
    shape,
    strip_casts,
)


@dataclass(frozen=True)
class ResidualSum:
    """What a norm normalises.

    Attributes:
        place: the node that computes it: an add, or an op that also normalises.
        node: the node that holds it; None where nothing reads it.
        value: its shape and dtype, as a fake tensor.
    """

    place: Node
    node: Node | None
    value: Tensor


@dataclass(frozen=True)
class Added:
    """What a norm op adds before it normalises.

    Attributes:
        addend: the other addend, beside the node at which the norm was found.
        total: their sum.
    """

    addend: Node
    total: ResidualSum


@dataclass(frozen=True)
class Norm:
    """A whole RMSNorm of the residual sum.

    Attributes:
        form: its spelling.
        output: the normalised rows.
        weight: [H], or None.
        weight_bias: added to the weight (1.0 in Gemma's form).
        eps: as in :class:`Core`.
        interior: the nodes from the square up to the one before the output.
        added: for an op that adds the residual itself, what it adds.
    """

    form: str
    output: Node
    weight: Node | None
    weight_bias: float
    eps: float | Node
    interior: tuple[Node, ...]
    added: Added | None = None


def same_rows(residual_sum: Node) -> list[Node]:
    """``residual_sum`` and what it is, widened or viewed."""
    found = [residual_sum]
    for each in found:
        found += [user for user in each.users if is_widening(user) or keeps_rows(user)]
    return found


def as_eps(value: object) -> float | Node | None:
    """``value`` as an epsilon: a constant >= 0, or a 0-d tensor in host memory."""
    number = constant(value)
    if number is not None:
        return number if number >= 0.0 else None
    if not isinstance(value, Node) or not is_scalar_tensor(value):
        return None
    # Dynamo hands a float over in fp64; the graph then rounds it to the norm's dtype.
    source = value
    while is_widening(source) or _narrows_from_fp64(source):
        source = arg(source, 0)
    return source if source.meta["val"].device.type == "cpu" else None


def _narrows_from_fp64(node: Node) -> bool:
    converts = calls(node, torch.ops.prims.convert_element_type.default)
    return converts and dtype(arg(node, 0)) == torch.float64


def as_weight(value: Any, hidden_dim: Size) -> tuple[Node, float] | None:
    """``value`` as (weight, bias): a vector of H elements, or one plus a constant."""
    if not _is_vector(value, hidden_dim):
        return None
    for inner, offset in either_order(add_operands(value)):
        bias = constant(offset)
        if bias is not None and _is_vector(inner, hidden_dim):
            return strip_casts(inner), bias
    return strip_casts(value), 0.0


def _is_vector(value: Any, hidden_dim: Size) -> bool:
    """Whether ``value`` holds H floats along its last dimension and no more."""
    if not has_value(value) or not is_float(value) or not shape(value):
        return False
    *leading, last = shape(value)
    return same(last, hidden_dim) and all(same(size, 1) for size in leading)
