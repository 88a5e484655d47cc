"""How the top-k reduction is written: from the all_reduce up to GEMM2's rows.

Matches a sum over K of weighted rows, ``sum(weight * rows, dim=K)``, and composes it from one small
step for each layer that may lie between the sum and the rows: the weight, the gather that puts
permuted rows back, the mask of rows that are not on this rank, views and conversions. A step is a
function listed in ``STEPS``; a new spelling is one more.

Until the gather is met, walking up, values are indexed by token and expert ([T, K, ...] or [T*K,
...]); above it they are indexed by permuted row.
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
    getitem_of,
    has_value,
    is_cast,
    is_reshape,
    is_scalar_tensor,
    is_widening,
    keeps_rows,
    mul_operands,
    prims,
    same,
    shape,
    strip_casts,
    strip_reshapes,
)


@dataclass(frozen=True)
class Weight:
    """A factor of the rows: one number for each token and expert, or for each permuted row."""

    node: Node
    permuted: bool


@dataclass(frozen=True)
class Finalize:
    """A top-k reduction.

    Attributes:
        rows: [R, H], what GEMM2 left.
        top_k: K.
        weights: the factors of the rows, at least one.
        index: for each token and expert its row, or None when the rows are token-major.
        index_may_wrap: whether a negative entry of ``index`` counts from the end, as torch indexes.
        scale: constant factors.
        interior: the nodes from below ``rows`` to the sum.
    """

    rows: Node
    top_k: int
    weights: tuple[Weight, ...]
    index: Node | None
    index_may_wrap: bool
    scale: float
    interior: tuple[Node, ...]


@dataclass
class Walk:
    """The way up so far; ``node`` is what has still to be explained."""

    node: Node
    weights: list[Weight] = field(default_factory=list)
    index: Node | None = None
    present: Node | None = None
    scale: float = 1.0
    interior: list[Node] = field(default_factory=list)

    def step(self, source: Node) -> bool:
        """Go up to ``source``, past the current node."""
        self.interior.append(self.node)
        self.node = source
        return True


def through_view(walk: Walk) -> bool:
    """Matches a view under which rows stay rows."""
    return keeps_rows(walk.node) and walk.step(arg(walk.node, 0))


def through_cast(walk: Walk) -> bool:
    """Matches a conversion, up of the rows or down of a product."""
    node = walk.node
    if not is_cast(node):
        return False
    return (is_widening(node) or bool(mul_operands(arg(node, 0)))) and walk.step(arg(node, 0))


def weighted(walk: Walk) -> bool:
    """Matches ``rows * weight[..., None]``, either way round, and ``rows * 2.5``."""
    for rows, factor in either_order(mul_operands(walk.node)):
        if not has_value(rows):
            continue
        number = constant(factor)
        if number is not None:
            walk.scale *= number
            return walk.step(rows)
        if is_scalar_tensor(factor) or not has_value(factor):
            continue
        if same(shape(factor)[-1], 1) and same(shape(rows)[-1], shape(walk.node)[-1]):
            walk.weights.append(Weight(factor, permuted=walk.index is not None))
            return walk.step(rows)
    return False


def gathered(walk: Walk) -> bool:
    """Matches ``rows[index]``, once: the permuted rows put back in token order."""
    node = walk.node
    if walk.index is not None or not calls(node, aten.index.Tensor):
        return False
    rows, indices = arg(node, 0), arg(node, 1)
    if len(indices) != 1 or not has_value(rows) or len(shape(rows)) != 2:
        return False
    walk.index = indices[0]
    return walk.step(rows)


def masked(walk: Walk) -> bool:
    """Matches ``where(present, rows, 0)`` and ``where(absent, 0, rows)`` below the gather."""
    node = walk.node
    if walk.index is not None or walk.present is not None or not calls(node, aten.where.self):
        return False
    mask, kept, dropped = (arg(node, index) for index in range(3))
    for rows, zero, keeps in ((kept, dropped, True), (dropped, kept, False)):
        if constant(zero) == 0.0 and has_value(rows) and same(shape(mask)[-1], 1):
            source = validity(strip_reshapes(mask), keeps=keeps)
            if source is None:
                return False
            walk.present = source
            return walk.step(rows)
    return False


STEPS: tuple[Callable[[Walk], bool], ...] = (through_view, through_cast, weighted, gathered, masked)


def validity(mask: Node, *, keeps: bool) -> Node | None:
    """The map of which ``mask`` says that an entry is (``keeps``) or is not on this rank."""
    present = {(aten.ge.Scalar, 0), (aten.gt.Scalar, -1), (aten.ne.Scalar, -1)}
    absent = {(aten.lt.Scalar, 0), (aten.le.Scalar, -1), (aten.eq.Scalar, -1)}
    if calls(mask, aten.bitwise_not.default, aten.logical_not.default):
        return validity(strip_reshapes(arg(mask, 0)), keeps=not keeps)
    if mask.op != "call_function" or len(mask.args) != 2:
        return None
    wanted = present if keeps else absent
    return strip_index(arg(mask, 0)) if (mask.target, arg(mask, 1)) in wanted else None


def strip_index(node: Any) -> Any:
    """A map before reshapes and integer conversions."""
    while is_reshape(node) or calls(node, prims.convert_element_type.default):
        node = arg(node, 0)
    return node


def unclamped(index: Any) -> Any:
    """The map that ``index`` was before its negative entries were replaced by a readable row."""
    index = strip_index(index)
    if calls(index, aten.clamp_min.default) and arg(index, 1) == 0:
        return strip_index(arg(index, 0))
    if calls(index, aten.clamp.default) and list(index.args[1:]) == [0]:
        return strip_index(arg(index, 0))
    if calls(index, aten.where.self) and constant(arg(index, 2)) == 0.0:
        source = strip_index(arg(index, 1))
        if validity(strip_reshapes(arg(index, 0)), keeps=True) is source:
            return source
    return index


def never_negative(index: Node) -> bool:
    """Whether no entry of ``index`` is below 0, by how it was made."""
    index = strip_index(index)
    return unclamped(index) is not index or inverted(index) is not None


def inverted(index: Node) -> Node | None:
    """The permutation of which ``index`` is the inverse.

    Matches ``index_put(empty, [perm], iota)``: entry ``perm[i]`` is ``i``, and no other entry is
    defined.
    """
    index = strip_index(index)
    if not calls(index, aten.index_put.default) or len(index.args) != 3:
        return None
    base, (perm,), positions = (arg(index, place) for place in range(3))
    counts = calls(positions, prims.iota.default) and positions.kwargs.get("start") == 0
    if not counts or positions.kwargs.get("step") != 1:
        return None
    undefined = calls(base, aten.empty.memory_format, aten.new_empty.default)
    return perm if undefined or is_permutation(perm, base) else None


def is_permutation(perm: Node, like: Node) -> bool:
    """Whether ``perm`` holds each of 0..N-1 once, N the number of entries of ``like``."""
    sort = getitem_of(perm, 1, aten.sort.default, aten.sort.stable)
    return sort is not None and len(shape(perm)) == 1 and same(shape(perm)[0], shape(like)[0])


def in_token_order(weight: Weight, index: Node | None) -> Node | None:
    """``weight`` by token and expert, if the graph has it: what was permuted to get it."""
    source = strip_reshapes(weight.node)
    if not weight.permuted:
        return source
    assert index is not None
    if not calls(source, aten.index.Tensor) or len(arg(source, 1)) != 1:
        return None
    perm = inverted(index)
    return strip_casts(arg(source, 0)) if perm is arg(source, 1)[0] else None


def _reduced_over_k(node: Node) -> tuple[Node, int] | None:
    """The [T, K, H] tensor that ``node`` sums over K, and K."""
    if not calls(node, aten.sum.dim_IntList) or set(node.kwargs) - {"dtype"}:
        return None
    source, dims, keepdim = arg(node, 0), arg(node, 1), node.args[2:]
    rank = len(shape(source))
    if any(keepdim) or rank < 3 or list(dims) not in ([rank - 2], [-2]):
        return None
    top_k = shape(source)[rank - 2]
    return (source, top_k) if isinstance(top_k, int) else None


def match_finalize(node: Node) -> Finalize | None:
    """The top-k reduction that ``node`` ends, or None."""
    reduced = _reduced_over_k(node)
    if reduced is None:
        return None
    walk = Walk(reduced[0])
    while any(step(walk) for step in STEPS):
        pass
    index = walk.index
    if not walk.weights or any(in_token_order(w, index) is None for w in walk.weights):
        return None
    if walk.present is not None:
        if index is None or unclamped(index) is not walk.present:
            return None
        index = walk.present
    may_wrap = walk.present is None and index is not None and not never_negative(index)
    interior = (node, *walk.interior)
    return Finalize(
        walk.node, reduced[1], tuple(walk.weights), index, may_wrap, walk.scale, interior
    )
