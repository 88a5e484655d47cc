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
        waits: its ``wait_tensor``, and a second one where the author waited too.
        input: this rank's partial.
        group: the group's name.
    """

    node: Node
    waits: tuple[Node, ...]
    input: Node
    group: str

    @property
    def wait(self) -> Node:
        """What readers of the sum read."""
        return self.waits[-1]


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
    waits: list[Node] = []
    while calls(wait := sole_user(waits[-1] if waits else node), _c10d.wait_tensor.default):
        waits.append(wait)
    if not waits:
        return NoMatch("the all_reduce is not read by one wait_tensor alone", node)
    return AllReduce(node, tuple(waits), partial, group)


def reduced_by(value: Node) -> AllReduce | None:
    """The all_reduce whose sum ``value`` is, through views and conversions, or None."""
    source = strip(value)
    while calls(source, _c10d.wait_tensor.default):
        source = arg(source, 0)
    match = match_all_reduce(source) if calls(source, *_ALL_REDUCES) else None
    return match if isinstance(match, AllReduce) else None


def is_reduced(value: Node) -> bool:
    """Whether ``value`` is a collective's output, through views and conversions."""
    return calls(strip(value), _c10d.wait_tensor.default)
