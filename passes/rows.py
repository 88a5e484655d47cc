"""What may lie between the sum over K and GEMM2's rows: one small step for each layer.

A :class:`Walk` goes up from the summed tensor. Each step looks at the node it stands on and either
goes past it, noting what it was, or says no; where every step says no, the node is the rows. A new
layer is one more function in ``STEPS``.

Until the gather is met, walking up, values are indexed by token and expert ([T, K, ...] or [T*K,
...]); above it they are in the order of the permuted rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moe_fusion.passes.nodes import (
    arg,
    aten,
    calls,
    constant,
    either_order,
    has_value,
    is_cast,
    is_float,
    is_scalar_tensor,
    is_widening,
    keeps_rows,
    mul_operands,
    past_units,
    same,
    same_shape,
    scaled_operand,
    shape,
    strip_reshapes,
)
from moe_fusion.passes.routing import Index, Mask, covers, is_index, replaced, validity


@dataclass(frozen=True)
class Weight:
    """A factor of the rows: one number for each token and expert, or for each permuted row."""

    node: Node
    permuted: bool


@dataclass
class Walk:
    """The way up so far.

    Attributes:
        node: what has still to be explained.
        index: the map, once the gather has been passed.
        weights: factors.
        masks: what keeps or drops rows.
        present: the map whose negative entries drop their row, and the mask that says so.
        scale: constant factors.
        interior: the nodes that were passed.
    """

    node: Node
    index: Index | None = None
    weights: list[Weight] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    present: tuple[Node, Mask | None] | None = None
    scale: float = 1.0
    interior: list[Node] = field(default_factory=list)

    def step(self, source: Node) -> bool:
        """Go up to ``source``, past the current node."""
        self.interior.append(self.node)
        self.node = source
        return True

    def run(self) -> None:
        """Go up as far as the steps know the way."""
        while any(step(self) for step in STEPS):
            pass


def through_view(walk: Walk) -> bool:
    """Matches a view under which rows stay rows."""
    return keeps_rows(walk.node) and walk.step(arg(walk.node, 0))


def through_units(walk: Walk) -> bool:
    """Matches views of token-major rows that only move, add or drop dimensions of size 1."""
    passed = past_units(walk.node) if walk.index is None else []
    if not passed:
        return False
    source = arg(passed[-1], 0)
    sizes = [[n for n in shape(node) if not same(n, 1)] for node in (walk.node, source)]
    if not same_shape(tuple(sizes[0]), tuple(sizes[1])):
        return False
    walk.interior.extend(passed)
    walk.node = source
    return True


def through_cast(walk: Walk) -> bool:
    """Matches a conversion, up of the rows or down of a product."""
    node = walk.node
    if not is_cast(node):
        return False
    return (is_widening(node) or mul_operands(arg(node, 0)) is not None) and walk.step(arg(node, 0))


def weighted(walk: Walk) -> bool:
    """Matches ``rows * weight[..., None]``, either way round, and ``rows * 2.5``."""
    scaled = scaled_operand(walk.node)
    if scaled is not None:
        walk.scale *= scaled[1]
        return walk.step(scaled[0])
    for rows, factor in either_order(mul_operands(walk.node)):
        if not (has_value(rows) and has_value(factor)) or is_scalar_tensor(factor):
            continue
        if is_float(factor) and _is_column(factor, rows, walk.node):
            walk.weights.append(Weight(factor, permuted=walk.index is not None))
            return walk.step(rows)
    return False


def _is_column(column: Node, rows: Node, product: Node) -> bool:
    """Whether ``column`` has one number for each row of ``rows``, and neither is broadcast."""
    *leading, last = shape(column)
    *sizes, width = shape(rows)
    if not same(last, 1) or not same(width, shape(product)[-1]) or len(leading) != len(sizes):
        return False
    return all(map(same, leading, sizes)) and len(shape(product)) == len(shape(rows))


def gathered(walk: Walk) -> bool:
    """Matches ``rows[map]``, once, however it is written: permuted rows put back in token order."""
    found = None if walk.index is not None else _gather(walk.node)
    if found is None:
        return False
    rows, index = found
    if not has_value(rows) or len(shape(rows)) != 2 or not is_index(index):
        return False
    walk.index = Index(index)
    return walk.step(rows)


def _gather(node: Node) -> tuple[Any, Any] | None:
    if calls(node, aten.index.Tensor) and len(arg(node, 1)) == 1:
        return arg(node, 0), arg(node, 1)[0]
    if calls(node, aten.embedding.default):
        return arg(node, 0), arg(node, 1)
    if calls(node, aten.index_select.default) and arg(node, 1) == 0:
        return arg(node, 0), arg(node, 2)
    return None


def scattered(walk: Walk) -> bool:
    """Matches ``buffer[perm] = rows``, once: the permuted rows put back by a permutation."""
    node = walk.node
    if walk.index is not None or not calls(node, aten.index_put.default) or len(node.args) != 3:
        return False
    base, indices, rows = (arg(node, place) for place in range(3))
    if len(indices) != 1 or len(shape(rows)) != 2 or not is_index(indices[0]):
        return False
    # Of an index that may name a row twice, the rows that it does not name are the base's.
    if not same(shape(rows)[0], shape(base)[0]) or not covers(indices[0], base):
        return False
    index = Index(indices[0], inverse=True)
    if index.may_wrap:
        return False
    walk.index = index
    return walk.step(rows)


def padded(walk: Walk) -> bool:
    """Matches ``cat([rows, zeros])`` above a gather that sends absent entries to the zero row."""
    node, index = walk.node, walk.index
    if index is None or not calls(node, aten.cat.default) or len(node.args) != 1:
        return False
    if index.inverse or len(shape(node)) != 2:
        return False
    parts = arg(node, 0)
    found = replaced(index.node)
    if len(parts) != 2 or found is None or constant(parts[1]) != 0.0:
        return False
    source, row = found
    if not same(shape(parts[0])[0], int(row)) or not same(shape(parts[1])[0], 1):
        return False
    if walk.present is not None and walk.present[0] is not source:
        return False
    walk.present = (source, None)
    walk.index = Index(source)  # there is no weight for the row of zeros
    return walk.step(parts[0])


def masked(walk: Walk) -> bool:
    """Matches ``where(present, rows, 0)`` and ``where(absent, 0, rows)``, gathered or not."""
    node = walk.node
    if not calls(node, aten.where.self):
        return False
    mask, kept, dropped = (arg(node, place) for place in range(3))
    for rows, zero, keeps in ((kept, dropped, True), (dropped, kept, False)):
        if constant(zero) == 0.0 and has_value(rows) and _is_column(mask, rows, node):
            source = strip_reshapes(mask)
            found = Mask(source, keeps, permuted=walk.index is not None)
            of_map = None if found.permuted else validity(source, keeps=keeps)
            if of_map is not None and walk.present is None:
                walk.present = (of_map, found)
            else:
                walk.masks.append(found)
            return walk.step(rows)
    return False


STEPS: tuple[Callable[[Walk], bool], ...] = (
    through_view,
    through_units,
    through_cast,
    weighted,
    gathered,
    scattered,
    padded,
    masked,
)
