"""Calls of custom ops, read by argument name, and of those that mutate, as they are at this stage.

Matches ``op(...)``, and ``auto_functionalized(op, ...)`` and ``auto_functionalized_v2(op, ...)`` in
which functionalization wraps an op that mutates its arguments. A wrapper returns what the op
returns (at least a None) and then the tensors that it would have overwritten, after the call: the
first wrapper the arguments themselves, the second the *bases* whose views they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from moe_fusion.passes.nodes import (
    NoMatch,
    Size,
    arg,
    aten,
    calls,
    contiguous,
    is_reshape,
    same,
)

_functionalized = torch.ops.higher_order.auto_functionalized
_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default)
_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True)
class OpCall:
    """One call.

    Attributes:
        node: the call, or the wrapper around it.
        arguments: what each argument is, defaults included; for a mutated one, what it was before.
        positions: where among the node's outputs each mutated argument is afterwards.
    """

    node: Node
    arguments: dict[str, Any]
    positions: dict[str, int]

    def result(self, place: int | str) -> Node | None:
        """The node that holds a result, or None if nothing reads it.

        Args:
            place: a position among what the op returns, or the name of a mutated argument.
        """
        if isinstance(self.node.meta["val"], Tensor):
            return self.node
        index = self._index(place)
        takers = (user for user in self.node.users if calls(user, operator.getitem))
        return next((taker for taker in takers if arg(taker, 1) == index), None)

    def value(self, place: int | str) -> Tensor:
        """The fake tensor of a result."""
        value = self.node.meta["val"]
        result = value if isinstance(value, Tensor) else value[self._index(place)]
        assert isinstance(result, Tensor)
        return result

    @property
    def sizes(self) -> tuple[Node, ...]:
        """The nodes that serve only to tell the call the sizes and strides of symbolic views."""
        own = {self.node}
        for given in self.node.all_input_nodes:
            node = given if calls(given, *_SIZES) else None
            while node is not None and own.issuperset(node.users):
                own.add(node)
                source = arg(node, 0)
                node = source if is_reshape(source) else None
        return tuple(sorted(own - {self.node}))

    def _index(self, place: int | str) -> int:
        return self.positions[place] if isinstance(place, str) else place


def called_op(node: Node) -> OpOverload | None:
    """The op that ``node`` calls, itself or through a wrapper."""
    if node.op != "call_function":
        return None
    wrapped = calls(node, _functionalized, _functionalized_v2)
    target = arg(node, 0) if wrapped else node.target
    return target if isinstance(target, OpOverload) else None


def read_call(node: Node) -> OpCall | NoMatch:
    """The call of an op that ``node`` is.

    Returns:
        The call, or a NoMatch where it overwrites only a part of some tensor.
    """
    op = called_op(node)
    assert op is not None
    schema = op._schema
    given = {each.name: each.default_value for each in schema.arguments}
    if node.target is op:
        names = [each.name for each in schema.arguments]
        given |= dict(zip(names, node.args, strict=False)) | node.kwargs
        return OpCall(node, given, {})
    given |= {name: node.kwargs[name] for name in given if name in node.kwargs}
    mutated = [each.name for each in schema.arguments if each.is_write]
    first = max(1, len(schema.returns))
    if calls(node, _functionalized):
        return OpCall(node, given, {name: first + i for i, name in enumerate(mutated)})
    return _read_bases(node, given, mutated, first)


def _read_bases(
    node: Node, given: dict[str, Any], mutated: list[str], first: int
) -> OpCall | NoMatch:
    """Find the mutated arguments among the bases."""
    bases: Any = node.kwargs["_all_bases"]
    positions: dict[str, int] = {}
    for name in mutated:
        index: Any = node.kwargs.get(f"_{name}_base_index")
        if index is None:
            given[name] = None
            continue
        if not _is_whole(node, name, bases[index]):
            return NoMatch(f"the op overwrites a part of {bases[index].name}", node)
        given[name] = bases[index]
        positions[name] = first + index
    if len(set(positions.values())) != len(positions):
        return NoMatch("the op overwrites one tensor twice", node)
    return OpCall(node, given, positions)


def _is_whole(node: Node, name: str, base: Node) -> bool:
    """Whether the argument ``name`` is its base, or a view of all of it that keeps the rows."""
    if f"_{name}_slice_dim" in node.kwargs:
        return False
    if f"_{name}_size" not in node.kwargs:
        return True
    sizes = _sizes(node.kwargs[f"_{name}_size"])
    strides = _sizes(node.kwargs[f"_{name}_stride"])
    (offset,) = _sizes((node.kwargs[f"_{name}_storage_offset"],))
    held = base.meta["val"]
    return (
        bool(sizes and held.dim())
        and same(offset, held.storage_offset())
        and same(sizes[-1], held.shape[-1])
        and same(prod(sizes), held.numel())
        and contiguous(sizes, strides)
        and contiguous(tuple(held.shape), held.stride())
    )


def _sizes(values: Any) -> tuple[Size, ...]:
    """``values`` as sizes: symbolic ones are nodes."""
    return tuple(each.meta["val"] if isinstance(each, Node) else each for each in values)
