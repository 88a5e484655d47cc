"""Where a tail is anchored: the graph's all_reduces.

Matches ``all_reduce(x, op, group) -> wait_tensor``, which is what functional collectives, DTensor's
Partial -> Replicate, in-place ``dist.all_reduce`` and transformers' own all leave at this stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from moe_fusion.passes.nodes import NoMatch, arg, calls, sole_user, strip

_c10d = torch.ops._c10d_functional
_COALESCED = (_c10d.all_reduce_coalesced.default, _c10d.all_reduce_coalesced_.default)
_ALL_REDUCES = (_c10d.all_reduce.default, _c10d.all_reduce_.default)


@dataclass(frozen=True)
class AllReduce:
    """One sum over a group.

    Attributes:
        node: the collective.
        wait: its ``wait_tensor``, which is what readers of the sum read.
        input: this rank's partial.
        group: the group's name.
    """

    node: Node
    wait: Node
    input: Node
    group: str


def all_reduce_nodes(graph: Graph) -> list[Node]:
    """The graph's all_reduce calls, in order, of whatever kind."""
    return [node for node in graph.nodes if calls(node, *_ALL_REDUCES, *_COALESCED)]


def match_all_reduce(node: Node) -> AllReduce | NoMatch:
    """The sum over a group that ``node`` starts, or why it is not one."""
    if calls(node, *_COALESCED):
        return NoMatch("the all_reduce is coalesced with others", node)
    partial, reduce_op, group = (arg(node, index) for index in range(3))
    if reduce_op != "sum":
        return NoMatch(f"the reduction is {reduce_op!r}: expected 'sum'", node)
    if not isinstance(group, str):
        return NoMatch(f"the group is {type(group).__name__}: expected its name", node)
    wait = sole_user(node)
    if not calls(wait, _c10d.wait_tensor.default):
        return NoMatch("the all_reduce is not read by one wait_tensor alone", node)
    assert wait is not None
    return AllReduce(node, wait, partial, group)


def reduced_by(value: Node) -> AllReduce | None:
    """The all_reduce whose sum ``value`` is, through views and conversions, or None."""
    source = strip(value)
    if calls(source, _c10d.wait_tensor.default) and calls(arg(source, 0), *_ALL_REDUCES):
        match = match_all_reduce(arg(source, 0))
        return match if isinstance(match, AllReduce) else None
    return None


def is_reduced(value: Node) -> bool:
    """Whether ``value`` is a collective's output, through views and conversions."""
    return calls(strip(value), _c10d.wait_tensor.default)
