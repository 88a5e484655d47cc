"""What a rank sends: finalize, routed scale and shared expert, in whatever order they were written.

Matches sums and constant multiples around a finalize, from the all_reduce up. A partial in which no
finalize is found is taken as it is: ``routed`` is then [T, H].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import Node

from moe_fusion.passes.finalize import Finalize, match_finalize
from moe_fusion.passes.nodes import (
    arg,
    aten,
    calls,
    constant,
    dtype,
    either_order,
    has_value,
    is_cast,
    is_scale,
    keeps_rows,
    num_rows,
    same,
    same_shape,
    scaled_operand,
    shape,
    strip_casts,
    tensor_divided_operand,
    tensor_scaled_operand,
    terms,
)
from moe_fusion.passes.routing import in_token_order


@dataclass(frozen=True)
class Shared:
    """An addend of the partial, and what multiplies it: a constant and tensors of one element.

    ``dtype`` is that of the sum; the addend itself may be narrower.
    """

    node: Node
    dtype: torch.dtype
    scale: float = 1.0
    tensor_scales: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Partial:
    """One rank's addend.

    Attributes:
        routed: the finalized rows, [..., H]; unused when ``finalize`` is given.
        finalize: the top-k reduction, or None.
        scale: multiplies the routed experts.
        tensor_scales: tensors of one element that multiply the routed experts.
        tensor_divisors: tensors of one element that divide them.
        shared: what is added to the routed experts.
        interior: the nodes that the op replaces, from below the rows to the all_reduce's input.
    """

    routed: Node
    finalize: Finalize | None = None
    scale: float = 1.0
    tensor_scales: tuple[Node, ...] = ()
    tensor_divisors: tuple[Node, ...] = ()
    shared: tuple[Shared, ...] = ()
    interior: tuple[Node, ...] = ()

    def scaled(self, factor: float) -> Partial:
        """This partial times a constant."""
        shared = tuple(replace(s, scale=s.scale * factor) for s in self.shared)
        return replace(self, scale=self.scale * factor, shared=shared)

    def scaled_by(self, tensor: Node) -> Partial:
        """This partial times a tensor of one element."""
        shared = [replace(s, tensor_scales=(*s.tensor_scales, tensor)) for s in self.shared]
        scales = (*self.tensor_scales, tensor)
        return replace(self, tensor_scales=scales, shared=tuple(shared))

    def under(self, node: Node) -> Partial:
        """This partial with ``node`` as one more node of its own."""
        return replace(self, interior=(*self.interior, node))


def _with_finalize(node: Node) -> Partial | None:
    """The partial that ends at ``node``, if there is a finalize in it."""
    finalize = match_finalize(node)
    if finalize is not None:
        base = finalize.base
        shared = () if base is None else (Shared(base, dtype(base)),)
        return Partial(node, finalize, finalize.scale, shared=shared, interior=finalize.interior)
    if keeps_rows(node) or is_cast(node):
        inner = _with_finalize(arg(node, 0))
        return inner and inner.under(node)
    scaled = scaled_operand(node)
    if scaled is not None:
        inner = _with_finalize(scaled[0])
        return inner and inner.scaled(scaled[1]).under(node)
    tensor_scaled = tensor_scaled_operand(node)
    if tensor_scaled is not None:
        inner = _with_finalize(tensor_scaled[0])
        if inner is not None:
            return inner.scaled_by(tensor_scaled[1]).under(node)
    divided = tensor_divided_operand(node)
    if divided is not None:
        inner = _with_finalize(divided[0])
        if inner is not None and not inner.shared:
            divisors = (*inner.tensor_divisors, divided[1])
            return replace(inner, tensor_divisors=divisors).under(node)
    return _with_shared(node)


def _with_shared(node: Node) -> Partial | None:
    for (operand, factor), (other, weight) in either_order(terms(node)):
        if not (has_value(operand) and has_value(other)):
            continue
        if not same_shape(shape(operand), shape(node)) or not same_shape(shape(other), shape(node)):
            continue
        inner = _with_finalize(operand)
        if inner is not None:
            inner, added = inner.scaled(factor), Shared(other, dtype(node), weight)
            return replace(inner, shared=(*inner.shared, added)).under(node)
    return _with_multiply_add(node)


def _with_multiply_add(node: Node) -> Partial | None:
    """Matches ``addcmul(shared, routed, scale)`` where the scale is a tensor of one element."""
    if not calls(node, aten.addcmul.default):
        return None
    base, value = arg(node, 0), constant(node.kwargs.get("value", 1))
    if value is None or not same_shape(shape(base), shape(node)):
        return None
    for operand, scale in either_order((arg(node, 1), arg(node, 2))):
        if not is_scale(scale) or not same_shape(shape(operand), shape(node)):
            continue
        inner = _with_finalize(operand)
        # It rounds once, where the sum of two addends would be rounded as well.
        if inner is not None and not inner.shared:
            inner = inner.scaled(value).scaled_by(scale)
            return replace(inner, shared=(Shared(base, dtype(node)),)).under(node)
    return None


def match_partial(node: Node, activation: torch.dtype) -> Partial:
    """What a rank sends to the all_reduce whose input is ``node``.

    Args:
        node: the all_reduce's input.
        activation: its dtype, which the rows and the shared expert's addend must have; otherwise
            the partial is taken as it is, since fusing the finalize would round elsewhere.
    """
    partial = _with_finalize(node)
    if partial is None or partial.finalize is None:
        return Partial(node)
    shared = tuple(replace(s, node=strip_casts(s.node)) for s in partial.shared)
    found = [partial.finalize.rows, *(each.node for each in shared)]
    if any(dtype(each) != activation for each in found) or _misshapen(partial.finalize, node):
        return Partial(node)
    count = len(partial.shared)
    if any(_rounds_elsewhere(each, count, activation) for each in partial.shared):
        return Partial(node)
    return replace(partial, shared=shared)


def _rounds_elsewhere(shared: Shared, count: int, activation: torch.dtype) -> bool:
    """Whether to scale or add up ``count`` addends in the activation dtype would lose something.

    The graph may do so in fp32; and in fp16 an addend may overflow where the sum does not.
    """
    changed = abs(shared.scale) != 1.0 or count > 1 or bool(shared.tensor_scales)
    grows = abs(shared.scale) > 1.0 or bool(shared.tensor_scales)
    overflows = activation == torch.float16 and grows
    return (changed and shared.dtype != activation) or overflows


def _misshapen(finalize: Finalize, node: Node) -> bool:
    """Whether the routing or token-major rows have not T * K entries."""
    hidden_dim = shape(node)[-1]
    entries = num_rows(node) * finalize.top_k
    routing = [in_token_order(w.node, finalize.index) for w in finalize.weights if w.permuted]
    routing += [w.node for w in finalize.weights if not w.permuted]
    routing += [mask.node for mask in finalize.masks if not mask.permuted]
    if finalize.index is None:
        rows_fit = same(prod(shape(finalize.rows)), entries * hidden_dim)
    else:
        routing.append(finalize.index.node)
        rows_fit = same(shape(finalize.rows)[-1], hidden_dim)
    sizes = [prod(shape(each)) for each in routing if each is not None]
    return not rows_fit or not all(same(size, entries) for size in sizes)
