"""Where a tail is anchored: the graph's all_reduces.

Matches ``all_reduce(x, op, group) -> wait_tensor``, which is what functional collectives, DTensor's
Partial -> Replicate, in-place ``dist.all_reduce`` and transformers' own all leave at this stage,
and ``all_reduce_coalesced([x], op, group) -> getitem 0 -> wait_tensor`` of one tensor, whose wait
is ``wait_tensors([x]) -> getitem 0`` from torch 2.15 on. An op that was registered as an all_reduce
is one node, whose readers read the sum.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_fusion.passes.custom_ops import AllReduceOp, all_reduce_op
from moe_fusion.passes.nodes import (
    NoMatch,
    arg,
    calls,
    describe,
    dtype,
    has_value,
    same_shape,
    shape,
    sole_user,
    strip,
)
from moe_fusion.passes.op_calls import read_call
from moe_fusion.topology import known_groups

_c10d = torch.ops._c10d_functional
_COALESCED = (_c10d.all_reduce_coalesced.default, _c10d.all_reduce_coalesced_.default)
_ALL_REDUCES = (_c10d.all_reduce.default, _c10d.all_reduce_.default)
_WAITS_FOR_LISTS = (_c10d.wait_tensors.default,) if hasattr(_c10d, "wait_tensors") else ()


@dataclass(frozen=True)
class AllReduce:
    """One sum over a group.

    Attributes:
        node: the collective.
        after: the nodes from it to the sum: a coalesced one's getitem, its ``wait_tensor``, and a
            second one where the author waited too; none for a registered op.
        input: this rank's partial.
        group: the group's name.
    """

    node: Node
    after: tuple[Node, ...]
    input: Node
    group: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        """From the collective to the sum."""
        return (self.node, *self.after)

    @property
    def sum(self) -> Node:
        """What readers of the sum read."""
        return self.nodes[-1]


def is_all_reduce(node: object) -> bool:
    """Whether ``node`` is an all_reduce, of whatever kind."""
    return calls(node, *_ALL_REDUCES, *_COALESCED) or all_reduce_op(node) is not None


def all_reduce_nodes(graph: Graph) -> list[Node]:
    """The graph's all_reduce calls, in order, of whatever kind."""
    return [node for node in graph.nodes if is_all_reduce(node)]


def match_all_reduce(node: Node) -> AllReduce | NoMatch:
    """The sum over a group that ``node`` starts, or why it is not one."""
    known = all_reduce_op(node)
    return _match_collective(node) if known is None else _match_registered(node, known)


def _match_collective(node: Node) -> AllReduce | NoMatch:
    partial, reduce_op, group_arg = (arg(node, index) for index in range(3))
    after: list[Node] = []
    if calls(node, *_COALESCED):
        element = sole_user(node)
        if len(partial) != 1 or not calls(element, operator.getitem):
            return NoMatch("the all_reduce is coalesced with others", node)
        partial = partial[0]
        after.append(element)
    if reduce_op != "sum":
        return NoMatch(f"the reduction is {reduce_op!r}: expected 'sum'", node)
    group = _group_name(group_arg, node)
    if isinstance(group, NoMatch):
        return group
    issued = len(after)
    while waited := _waited_for((node, *after)[-1]):
        after += waited
    if len(after) == issued:
        return NoMatch("the all_reduce is not read by one wait_tensor alone", node)
    return AllReduce(node, tuple(after), partial, group)


def _waited_for(node: Node) -> list[Node]:
    """The nodes from ``node`` to what it is once waited for, where a wait alone reads it."""
    wait = sole_user(node)
    if calls(wait, _c10d.wait_tensor.default):
        return [wait]
    element = sole_user(wait) if calls(wait, *_WAITS_FOR_LISTS) and len(arg(wait, 0)) == 1 else None
    return [wait, element] if wait is not None and calls(element, operator.getitem) else []


def _match_registered(node: Node, known: AllReduceOp) -> AllReduce | NoMatch:
    call = read_call(node)
    if isinstance(call, NoMatch):
        return call
    partial = call.arguments[known.input]
    if known.reduce_op is not None and call.arguments[known.reduce_op] != "sum":
        found = call.arguments[known.reduce_op]
        return NoMatch(f"the reduction is {found!r}: expected 'sum'", node)
    if not (has_value(partial) and has_value(node)):
        return NoMatch("the registered all_reduce is not of one tensor", node)
    if not same_shape(shape(partial), shape(node)) or dtype(partial) != dtype(node):
        return NoMatch("the registered all_reduce changes the shape or dtype", node)
    group = _registered_group(call.arguments[known.group], node, known)
    return group if isinstance(group, NoMatch) else AllReduce(node, (), partial, group)


def _registered_group(value: object, collective: Node, known: AllReduceOp) -> str | NoMatch:
    """torch.distributed's name of the group that a registered op is given."""
    group = _group_name(value, collective)
    if isinstance(group, NoMatch):
        return group
    try:
        return known.group_name(group)
    except LookupError as error:
        return NoMatch(f"the group {group!r} is not known: {error}", collective)


def _group_name(value: object, collective: Node) -> str | NoMatch:
    """The name of the group that ``value``, an argument of ``collective``, stands for.

    Under ``torch.distributed.config.compile_on_one_rank`` it is the group itself, held by the graph
    module, or a call that takes it from a mesh which each rank hands over anew.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Node):
        return NoMatch(f"the group is {type(value).__name__}: expected its name", collective)
    if value.op != "get_attr":
        what = f"the group is computed in the graph by {describe(value)}"
        return NoMatch(f"{what}: expected its name or the group itself", collective)
    group = _held_by_module(value)
    for name, known in known_groups().items():
        if known is group:
            return name
    what = f"the graph's attribute {value.target} is {type(group).__name__}"
    return NoMatch(f"{what}: expected a process group of this process", collective)


def _held_by_module(node: Node) -> Any:
    """The object that a ``get_attr`` reads; None where there is none."""
    held: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        held = getattr(held, name, None)
    # Tracing wraps opaque objects in a stand-in that keeps the real one.
    return getattr(held, "real_obj", held)


def reduced_by(value: Node) -> AllReduce | None:
    """The all_reduce whose sum ``value`` is, through views and conversions, or None."""
    total = source = strip(value)
    waits = (_c10d.wait_tensor.default, *_WAITS_FOR_LISTS, operator.getitem)
    while calls(source, *waits):
        waited = arg(source, 0)
        source = waited[0] if isinstance(waited, (list, tuple)) else waited
    match = match_all_reduce(source) if is_all_reduce(source) else None
    return match if isinstance(match, AllReduce) and match.sum is total else None


def is_reduced(value: Node) -> bool:
    """Whether ``value`` is a collective's output, through views and conversions."""
    source = strip(value)
    if calls(source, operator.getitem) and calls(arg(source, 0), *_WAITS_FOR_LISTS):
        return True
    return calls(source, _c10d.wait_tensor.default) or all_reduce_op(source) is not None
