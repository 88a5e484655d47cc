"""Two reductions whose sums are added: one reduction of the partials' sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_fusion.passes.addends import Addend
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
) -> tuple[list[Merged], list[Node]]:
    """The addends that are sums over the group of ``first``, and the nodes from these to the add.

    Args:
        addends: what is added to the sum of ``first``.
        first: the all_reduce.
        scale: the constant that multiplies its sum.
        tensor_scales: the tensors that do.
    """
    merged: list[Merged] = []
    passed: list[Node] = []
    for addend in addends:
        other = reduced_by(addend.node)
        if addend.is_vector or other is None or other.group != first.group:
            continue
        if other.sum is first.sum or dtype(other.input) != dtype(first.input):
            continue
        if Counter(addend.tensor_scales) != Counter(tensor_scales):
            continue  # a tensor may differ between ranks: it never crosses a reduction
        if addend.dtype != dtype(first.input):
            continue  # the graph keeps their sum in fp32: to round the partials' is one too many
        nodes = _between(other, addend.node)
        if nodes is not None and _scales_fit(addend.scale, scale, addend.dtype):
            merged.append(Merged(other, addend))
            passed.extend(nodes)
    return merged, passed


def _scales_fit(one: float, other: float, activation: torch.dtype) -> bool:
    """Whether one reduction can take both scales: if they differ, the partials are scaled.

    In fp16 a partial that is scaled up may overflow where the scaled sum does not.
    """
    return one == other or activation != torch.float16 or max(abs(one), abs(other)) <= 1.0


def _between(reduced: AllReduce, node: Node) -> list[Node] | None:
    """The nodes from the sum to ``node``, or None if another reader needs one of them."""
    nodes = [node]
    while nodes[-1] is not reduced.sum:
        nodes.append(arg(nodes[-1], 0))
    return nodes if all(sole_user(n) for n in nodes) else None
