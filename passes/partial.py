"""What a rank sends: finalize, routed scale and shared expert, in whatever order they were written.

Matches sums and constant multiples around a finalize, from the all_reduce up. A partial in which no
finalize is found is taken as it is: ``routed`` is then [T, H].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from moe_fusion.passes.finalize import Finalize, match_finalize
from moe_fusion.passes.nodes import (
    add_operands,
    arg,
    constant,
    dtype,
    either_order,
    has_value,
    is_cast,
    is_scalar_tensor,
    keeps_rows,
    mul_operands,
    same_shape,
    shape,
    strip_casts,
)


@dataclass(frozen=True)
class Shared:
    """An addend of the partial and the constant that multiplies it."""

    node: Node
    scale: float = 1.0


@dataclass(frozen=True)
class Partial:
    """One rank's addend.

    Attributes:
        routed: the finalized rows, [..., H]; unused when ``finalize`` is given.
        finalize: the top-k reduction, or None.
        scale: multiplies the routed experts.
        tensor_scales: 0-d tensors that multiply the routed experts.
        shared: what is added to the routed experts.
        interior: the nodes that the op replaces, from below the rows to the all_reduce's input.
    """

    routed: Node
    finalize: Finalize | None = None
    scale: float = 1.0
    tensor_scales: tuple[Node, ...] = ()
    shared: tuple[Shared, ...] = ()
    interior: tuple[Node, ...] = ()

    def scaled(self, factor: float) -> Partial:
        """This partial times a constant."""
        shared = tuple(replace(s, scale=s.scale * factor) for s in self.shared)
        return replace(self, scale=self.scale * factor, shared=shared)

    def under(self, node: Node) -> Partial:
        """This partial with ``node`` as one more node of its own."""
        return replace(self, interior=(*self.interior, node))


def _with_finalize(node: Node) -> Partial | None:
    """The partial that ends at ``node``, if there is a finalize in it."""
    finalize = match_finalize(node)
    if finalize is not None:
        shared = () if finalize.base is None else (Shared(finalize.base),)
        return Partial(node, finalize, finalize.scale, shared=shared, interior=finalize.interior)
    if keeps_rows(node) or is_cast(node):
        inner = _with_finalize(arg(node, 0))
        return inner and inner.under(node)
    for operand, other in either_order(mul_operands(node)):
        if not has_value(operand):
            continue
        factor = constant(other)
        inner = _with_finalize(operand) if factor is not None or is_scalar_tensor(other) else None
        if inner is not None and factor is not None:
            return inner.scaled(factor).under(node)
        if inner is not None and not inner.shared:
            scales = (*inner.tensor_scales, other)
            return replace(inner, tensor_scales=scales).under(node)
    return _with_shared(node)


def _with_shared(node: Node) -> Partial | None:
    for operand, other in either_order(add_operands(node)):
        if not (has_value(operand) and has_value(other)):
            continue
        inner = _with_finalize(operand)
        if inner is not None and same_shape(shape(other), shape(node)):
            shared = (*inner.shared, Shared(strip_casts(other)))
            return replace(inner, shared=shared).under(node)
    return None


def match_partial(node: Node, activation: torch.dtype) -> Partial:
    """What a rank sends to the all_reduce whose input is ``node``.

    Args:
        node: the all_reduce's input.
        activation: its dtype, which the rows and the shared expert's addend must have; otherwise
            the
            partial is taken as it is, since fusing the finalize would round elsewhere.
    """
    partial = _with_finalize(node)
    if partial is None or partial.finalize is None:
        return Partial(node)
    addends = [partial.finalize.rows, *(shared.node for shared in partial.shared)]
    if any(dtype(addend) != activation for addend in addends):
        return Partial(node)
    return partial
