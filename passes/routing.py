"""Which row belongs to which token and expert: maps, permutations and masks as graphs write them.

A *map* gives for each token and expert its row. A *permutation* gives for each permuted row its
token and expert, as a sort by expert leaves it; a map is its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moe_fusion.passes.nodes import (
    arg,
    aten,
    calls,
    constant,
    dtype,
    getitem_of,
    has_value,
    is_reshape,
    prims,
    same,
    same_shape,
    shape,
    strip_casts,
    strip_reshapes,
)

# Not `!= -1`: an entry of -2 would count from the end, and be there.
_PRESENT = {(aten.ge.Scalar, 0), (aten.gt.Scalar, -1)}
_ABSENT = {(aten.lt.Scalar, 0), (aten.le.Scalar, -1)}


@dataclass(frozen=True)
class Mask:
    """A boolean for each token and expert, or for each permuted row.

    Attributes:
        node: the boolean.
        keeps: whether True keeps the row (else True drops it).
        permuted: whether it is in the order of the rows.
    """

    node: Node
    keeps: bool
    permuted: bool


@dataclass(frozen=True)
class Index:
    """A map, as the graph has it or as it can be made.

    Attributes:
        node: the map, or, when ``inverse``, the permutation whose inverse is the map.
        inverse: see ``node``.
    """

    node: Node
    inverse: bool = False

    @property
    def permutation(self) -> Node | None:
        """The permutation of which this map is known to be the inverse, or None."""
        return strip_index(self.node) if self.inverse else inverted(self.node)

    @property
    def may_wrap(self) -> bool:
        """Whether an entry may be negative, which torch counts from the end."""
        source = strip_index(self.node)
        known = self.inverse or unclamped(source) is not source or inverted(source) is not None
        return not known and not is_sorted_order(source)


def strip_index(node: Any) -> Any:
    """A map before reshapes and conversions between index dtypes."""
    while is_reshape(node) or _converts_index(node):
        node = arg(node, 0)
    return node


def _converts_index(node: Any) -> bool:
    converts = calls(node, prims.convert_element_type.default, aten._to_copy.default)
    return converts and is_index(node) and is_index(arg(node, 0))


def is_index(node: Any) -> bool:
    """Whether ``node`` holds row numbers: not booleans, which select, nor narrower integers."""
    return has_value(node) and dtype(node) in (torch.int32, torch.int64)


def validity(mask: Node, *, keeps: bool) -> Node | None:
    """The map of which ``mask`` says that an entry is (``keeps``) or is not on this rank."""
    if calls(mask, aten.bitwise_not.default, aten.logical_not.default):
        return validity(strip_reshapes(arg(mask, 0)), keeps=not keeps)
    if mask.op != "call_function" or len(mask.args) != 2:
        return None
    wanted = _PRESENT if keeps else _ABSENT
    if not isinstance(arg(mask, 1), int) or (mask.target, arg(mask, 1)) not in wanted:
        return None
    source: Node = strip_index(arg(mask, 0))
    return source


def replaced(index: Any) -> tuple[Node, float] | None:
    """The map and the constant that stands in ``index`` for its negative entries.

    Matches ``clamp(map, min=0)`` and ``where(map >= 0, map, constant)``, either way round.
    """
    index = strip_index(index)
    lower = calls(index, aten.clamp_min.default) or (
        calls(index, aten.clamp.default) and len(index.args) == 2
    )
    if lower and arg(index, 1) == 0:
        return strip_index(arg(index, 0)), 0.0
    if calls(index, aten.where.self):
        mask = strip_reshapes(arg(index, 0))
        for keeps in (True, False):
            source: Node = strip_index(arg(index, 1 if keeps else 2))
            number = constant(arg(index, 2 if keeps else 1))
            if number is not None and validity(mask, keeps=keeps) is source:
                return source, number
    return None


def unclamped(index: Any) -> Any:
    """The map that ``index`` was before its negative entries were replaced by a readable row."""
    index = strip_index(index)
    found = replaced(index)
    return found[0] if found is not None and found[1] >= 0 else index


def is_sorted_order(node: Any) -> bool:
    """Whether ``node`` is the order that sorts a vector, which is a permutation."""
    sorts = (aten.sort.default, aten.sort.stable)
    orders = getitem_of(node, 1, *sorts) is not None or calls(node, aten.argsort.default)
    return orders and len(shape(node)) == 1


def inverted(index: Any) -> Node | None:
    """The permutation of which ``index`` is the inverse.

    Matches ``index_put(empty, [perm], iota)``, where entry ``perm[i]`` is ``i`` and no other entry
    is defined, and the order that sorts an order.
    """
    index = strip_index(index)
    sort = getitem_of(index, 1, aten.sort.default, aten.sort.stable)
    if sort is not None:
        order: Node = strip_index(arg(sort, 0))
        orders = is_sorted_order(order) and is_sorted_order(index)
        return order if orders and _is_ascending(sort) else None
    if not calls(index, aten.index_put.default) or len(index.args) != 3:
        return None
    base, indices, positions = (arg(index, place) for place in range(3))
    counts = calls(positions, prims.iota.default) and positions.kwargs.get("start") == 0
    if len(indices) != 1 or not counts or positions.kwargs.get("step") != 1:
        return None
    perm: Node = indices[0]
    counted = same_shape(shape(positions), shape(perm))
    return strip_index(perm) if counted and covers(perm, base) else None


def _is_ascending(sort: Node) -> bool:
    if sort.kwargs.get("descending"):
        return False
    return not any(value is True for value in sort.args[1:])


def covers(perm: Node, base: Node) -> bool:
    """Whether ``perm`` names every entry of ``base`` that is defined."""
    undefined = calls(base, aten.empty.memory_format, aten.new_empty.default)
    return undefined or (
        is_sorted_order(strip_index(perm)) and same(shape(perm)[0], shape(base)[0])
    )


def in_token_order(value: Node, index: Index | None) -> Node | None:
    """A value of the permuted rows by token and expert, if it was permuted from one: that one."""
    source = strip_reshapes(value)
    perm = None if index is None else index.permutation
    if perm is None or not calls(source, aten.index.Tensor) or len(arg(source, 1)) != 1:
        return None
    return strip_casts(arg(source, 0)) if strip_index(arg(source, 1)[0]) is perm else None


def tokens_of(node: Any, top_k: int) -> Node | None:
    """The permutation ``perm`` of which ``node`` is ``perm // top_k``, the token of each row."""
    source = strip_index(node)
    if calls(source, aten.expand.default):
        source = strip_index(arg(source, 0))
    floors = (
        source.kwargs.get("rounding_mode") == "floor"
        if calls(source, aten.div.Tensor_mode, aten.div.Scalar_mode)
        else calls(source, aten.floor_divide.default)
    )
    if not floors or constant(arg(source, 1)) != top_k:
        return None
    perm: Node = strip_index(arg(source, 0))
    return perm if is_sorted_order(perm) else None
