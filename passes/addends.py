"""What is added to the reduced sum: rows or one vector for all of them, and what multiplies it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moe_fusion.passes.collectives import is_reduced
from moe_fusion.passes.nodes import (
    add_operands,
    arg,
    dtype,
    has_value,
    is_cast,
    is_widening,
    keeps_rows,
    same,
    same_shape,
    scaled_operand,
    shape,
    sole_user,
    strip_casts,
    tensor_scaled_operand,
    terms,
)


@dataclass(frozen=True)
class Addend:
    """Something added after the reduction, and what multiplies it later on.

    Attributes:
        node: the addend.
        dtype: to which the sum is rounded, see :func:`added_in`; the addend itself may be narrower.
        scale: a constant factor.
        tensor_scales: factors that are tensors of one element.
        is_vector: it is one vector for every row, such as a bias, instead of the sum's shape.
    """

    node: Node
    dtype: torch.dtype
    scale: float = 1.0
    tensor_scales: tuple[Node, ...] = ()
    is_vector: bool = False

    @property
    def scaled(self) -> bool:
        """Whether anything but a sign changes it."""
        return abs(self.scale) != 1.0 or bool(self.tensor_scales)

    @property
    def may_overflow(self) -> bool:
        """Whether it could overflow alone where a sum with it does not."""
        grows = abs(self.scale) > 1.0 or bool(self.tensor_scales)
        return grows and self.dtype == torch.float16


def times(addend: Addend, factor: float, *tensors: Node) -> Addend:
    """``addend`` times a constant and tensors of one element."""
    scales = (*addend.tensor_scales, *tensors)
    return replace(addend, scale=addend.scale * factor, tensor_scales=scales)


def adds_rows(addend: Any, node: Node) -> bool:
    """Whether ``addend`` has the shape of ``node``, to which it is added."""
    return has_value(addend) and same_shape(shape(addend), shape(node))


def adds_vector(addend: Any, node: Node, total: Node) -> bool:
    """Whether ``total`` adds one vector of H elements to each row of ``node``."""
    if not has_value(addend) or not shape(addend) or adds_rows(addend, node):
        return False
    *leading, last = shape(addend)
    one_row = all(same(size, 1) for size in leading) and same(last, shape(node)[-1])
    return one_row and same_shape(shape(total), shape(node))


def added_in(total: Node) -> torch.dtype:
    """The dtype to which ``total``, a sum, is rounded: its own, or that of both its terms.

    The latter where it widens them and all that reads it rounds it back: as if added unwidened.
    """
    pair, user = terms(total), sole_user(total)
    while user is not None and keeps_rows(user):
        user = sole_user(user)
    if pair is None or user is None or not is_cast(user):
        return dtype(total)
    rounded = all(has_value(n) and dtype(strip_casts(n)) == dtype(user) for n, _ in pair)
    return dtype(user if rounded else total)


def opened(whole: Addend) -> tuple[list[Addend], list[Node]]:
    """The parts of an addend that is a sum or a multiple of a reduced sum, and its nodes."""
    found: list[Addend] = []
    passed: list[Node] = []
    pending = [whole]
    while pending:
        addend = pending.pop()
        parts = _parts(addend)
        if any(_holds_sum(part) for part in parts):
            passed.append(addend.node)
            pending.extend(parts)
        else:
            found.append(addend)
    return found, passed


def _holds_sum(addend: Addend) -> bool:
    """Whether a reduced sum is among the terms of an addend that nothing else reads."""
    if addend.is_vector:
        return False
    return is_reduced(addend.node) or any(map(_holds_sum, _parts(addend)))


def _parts(addend: Addend) -> list[Addend]:
    """The terms of a sum, or what is scaled; none of what is read elsewhere."""
    node = addend.node
    if sole_user(node) is None or addend.is_vector:
        return []
    if is_widening(node) and dtype(arg(node, 0)) == addend.dtype:
        return [replace(addend, node=arg(node, 0))]
    pair = add_operands(node)
    if pair is not None and not addend.may_overflow:
        wanted = torch.promote_types(addend.dtype, added_in(node))
        parts = [
            replace(addend, node=n, dtype=wanted, is_vector=adds_vector(n, node, node))
            for n in pair
        ]
        return parts if all(p.is_vector or adds_rows(p.node, node) for p in parts) else []
    scaled = scaled_operand(node)
    if scaled is not None:
        return [times(replace(addend, node=scaled[0]), scaled[1])]
    by_tensor = tensor_scaled_operand(node)
    # Of a promoted product the addends would be rounded, where the graph adds it as it is.
    if by_tensor is not None and dtype(by_tensor[0]) == dtype(node):
        return [times(replace(addend, node=by_tensor[0]), 1.0, by_tensor[1])]
    return []
