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
    addends: list[Addend], first: AllReduce, tensor_scales: tuple[Node, ...]
) -> tuple[list[Addend], list[Merged], list[Node]]:
    """Takes the sums over the group of ``first`` out of the addends, which stay whole without one.

    Args:
        addends: what is added to the sum of ``first``.
        first: the all_reduce.
        tensor_scales: the tensors that multiply its sum.

    Returns:
        What is still added, the sums, and the nodes from these to the add.
    """
    kept: list[Addend] = []
    merged: list[Merged] = []
    passed: list[Node] = []
    for addend in addends:
        parts, nodes = opened(addend)
        alike = [(part, _reduced_alike(part, first, tensor_scales)) for part in parts]
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
    addend: Addend, first: AllReduce, tensor_scales: tuple[Node, ...]
) -> AllReduce | None:
    """The all_reduce whose sum ``addend`` is, if that of ``first`` can take its partial."""
    other = reduced_by(addend.node)
    if addend.is_vector or other is None or other.group != first.group:
        return None
    if other.sum is first.sum or dtype(other.input) != dtype(first.input):
        return None
    if Counter(addend.tensor_scales) != Counter(tensor_scales):
        return None  # a tensor may differ between ranks: it never crosses a reduction
    if addend.dtype != dtype(first.input) or addend.dtype == torch.float16:
        # What the graph sums in fp32 would be rounded once too often; in fp16 a rank's sum of two
        # partials may overflow where that of all ranks does not.
        return None
    if not all(sole_user(node) for node in _between(other, addend.node)):
        return None
    return other


def _between(reduced: AllReduce, node: Node) -> list[Node]:
    """The nodes from ``node`` up to the sum."""
    nodes = [node]
    while nodes[-1] is not reduced.sum:
        nodes.append(arg(nodes[-1], 0))
    return nodes
