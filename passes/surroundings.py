"""The part of a graph that shows why an all_reduce was left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

STEPS_UP = 2
STEPS_DOWN = 4
NODES_MAX = 32
# Source: what a page can draw so that a person can read it.


def surroundings(anchor: Node, stopped_at: Node | None) -> list[Node]:
    """The all_reduce, the nearest nodes above and below it, and where the match stopped."""
    chosen = [anchor]
    if stopped_at is not None and stopped_at is not anchor:
        chosen.append(stopped_at)
    chosen += _walk(anchor, lambda node: node.users, STEPS_DOWN)
    chosen += _walk(anchor, lambda node: node.all_input_nodes, STEPS_UP)
    calls = [node for node in dict.fromkeys(chosen) if node.op == "call_function"]
    return calls[:NODES_MAX]


def _walk(start: Node, following: Callable[[Node], Iterable[Node]], steps: int) -> list[Node]:
    found: dict[Node, None] = {}
    edge = [start]
    for _ in range(steps):
        edge = [node for last in edge for node in following(last) if node not in found]
        found.update(dict.fromkeys(edge))
    return list(found)
