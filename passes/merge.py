"""Two reductions whose sums are added: one reduction of the partials' sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_fusion.passes.addends import Addend, opened
from moe_fusion.passes.collectives import AllReduce, reduced_by
from moe_fusion.passes.nodes import arg, dtype, sole_user


@dataclass(frozen=True)
class Merged:
    """Another all_reduce whose sum is added to the first one's.

    Its factors that are tensors are those of the first.

    Attributes:
        all_reduce: the other one.
        addend: its sum, with the constant factor of it.
    """

    all_reduce: AllReduce
    addend: Addend

    @property
    def scale(self) -> float:
        """The constant that multiplies its sum."""
        return self.addend.scale


def merge(
    addends: list[Addend], first: AllReduce, scale: float, tensor_scales: tuple[Node, ...]
) -> tuple[list[Addend], list[Merged], list[Node]]:
    """Takes the sums over the group of ``first`` out of the addends, which stay whole without one.

    Args:
        addends: what is added to the sum of ``first``.
        first: the all_reduce.
        scale: the constant that multiplies its sum.
        tensor_scales: the tensors that do.

    Returns:
        What is still added, the sums, and the nodes from these to the add.
    """
    kept: list[Addend] = []
    merged: list[Merged] = []
    passed: list[Node] = []
    for addend in addends:
        parts, nodes = opened(addend)
        alike = [(part, _reduced_alike(part, first, scale, tensor_scales)) for part in parts]
        found = [Merged(other, part) for part, other in alike if other is not None]
        if not found:
            kept.append(addend)
            continue
        merged += found
        kept += [part for part, other in alike if other is None]
        passed += nodes
        passed += [node for each in found for node in _between(each.all_reduce, each.addend.node)]
    return kept, merged, passed


def _reduced_alike(
    addend: Addend, first: AllReduce, scale: float, tensor_scales: tuple[Node, ...]
) -> AllReduce | None:
    """The all_reduce whose sum ``addend`` is, if that of ``first`` can take its partial."""
    other = reduced_by(addend.node)
    if addend.is_vector or other is None or other.group != first.group:
        return None
    if other.sum is first.sum or dtype(other.input) != dtype(first.input):
        return None
    if Counter(addend.tensor_scales) != Counter(tensor_scales):
        return None  # a tensor may differ between ranks: it never crosses a reduction
    if addend.dtype != dtype(first.input):
        return None  # the graph keeps their sum in fp32: to round the partials' is one too many
    if not all(sole_user(node) for node in _between(other, addend.node)):
        return None
    return other if _scales_fit(addend.scale, scale, addend.dtype) else None


def _scales_fit(one: float, other: float, activation: torch.dtype) -> bool:
    """Whether one reduction can take both scales: if they differ, the partials are scaled.

    In fp16 a partial that is scaled up may overflow where the scaled sum does not.
    """
    return one == other or activation != torch.float16 or max(abs(one), abs(other)) <= 1.0


def _between(reduced: AllReduce, node: Node) -> list[Node]:
    """The nodes from ``node`` up to the sum."""
    nodes = [node]
    while nodes[-1] is not reduced.sum:
        nodes.append(arg(nodes[-1], 0))
    return nodes
