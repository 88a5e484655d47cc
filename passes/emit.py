"""Adds nodes to a graph, each with the ``meta["val"]`` that its call has on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moe_fusion.passes.nodes import (
    Size,
    arg,
    aten,
    dtype,
    is_reshape,
    prims,
    same,
    same_shape,
    shape,
)


@dataclass(frozen=True)
class Emitter:
    """Adds nodes where the graph's insertion point is.

    Attributes:
        graph: the graph.
        source: the node whose stack trace the new nodes take.
        fake_mode: the mode in which their values are computed.
        created: the nodes that were added.
    """

    graph: Graph
    source: Node
    fake_mode: FakeTensorMode
    created: list[Node] = field(default_factory=list)

    def call(
        self, target: Any, *args: Any, fake: Callable[..., Any] | None = None, **kwargs: Any
    ) -> Node:
        """A call of ``target``.

        Args:
            target: what to call.
            args: its arguments, nodes or values.
            kwargs: more of them, values only.
            fake: computes the result on fake tensors in the place of ``target``, without the
                dispatcher, which takes as long as all the rest of a rewrite.
        """
        node = self.graph.call_function(target, args, kwargs)
        self.created.append(node)
        values = map_arg(args, lambda arg: arg.meta["val"])
        with self.fake_mode:
            node.meta["val"] = (fake or target)(*values, **kwargs)
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack"):
            if key in self.source.meta:
                node.meta[key] = self.source.meta[key]
        return node

    def reshape(self, node: Node, *sizes: int | Node) -> Node:
        """``node`` in another shape, in which at most one size is -1."""
        return self.call(aten.reshape.default, node, list(sizes))

    def rows(self, node: Node) -> Node:
        """``node`` as [T, H]."""
        return self.columns(node, _static(shape(node)[-1]))

    def columns(self, node: Node, columns: int) -> Node:
        """``node`` as [-1, columns]: what it was reshaped from, if that had this shape."""
        source = node
        while not (len(shape(source)) == 2 and same(shape(source)[1], columns)):
            if not is_reshape(source):
                return self.reshape(node, -1, columns)
            source = arg(source, 0)
        return source

    def size(self, node: Node, dim: int) -> int | Node:
        """The size of ``node`` along ``dim``: a constant, or a node that holds it."""
        size = shape(node)[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, node, dim)

    def sizes(
        self, wanted: tuple[Size, ...], kept: Iterable[Node], views: Iterable[Node]
    ) -> list[int | Node]:
        """The shape of a node about to be erased, as arguments of a reshape.

        Args:
            wanted: the shape.
            kept: nodes that exist before the insertion point and stay.
            views: reshapes before it, whose size arguments stay.

        Raises:
            LookupError: the shape has several symbols and no other node has it.
        """
        symbolic = [dim for dim, size in enumerate(wanted) if isinstance(size, SymInt)]
        if len(symbolic) <= 1:
            return [-1 if dim in symbolic else _static(size) for dim, size in enumerate(wanted)]
        for view in views:
            if same_shape(shape(view), wanted):
                return list(arg(view, 1))
        for node in kept:
            if same_shape(shape(node), wanted):
                return [self.size(node, dim) for dim in range(len(wanted))]
        raise LookupError(f"no node holds the sizes {list(wanted)}")

    def shaped(self, node: Node, sizes: list[int | Node]) -> Node:
        """``node``, [T, H], in the shape ``sizes``."""
        return node if len(sizes) == 2 else self.reshape(node, *sizes)

    def undo(self) -> None:
        """Erase the nodes that were added."""
        for node in reversed(self.created):
            self.graph.erase_node(node)
        self.created.clear()

    def cast(self, node: Node, wanted: torch.dtype) -> Node:
        """``node`` in ``wanted`` dtype."""
        if dtype(node) == wanted:
            return node
        return self.call(prims.convert_element_type.default, node, wanted)

    def scaled(self, node: Node, factor: float, tensors: tuple[Node, ...] = ()) -> Node:
        """``node`` times a constant and tensors of one element, in the dtype of ``node``."""
        result = node if factor == 1.0 else self.call(aten.mul.Tensor, node, factor)
        for tensor in tensors:
            result = self.call(aten.mul.Tensor, result, self.scalar(tensor))
        return result

    def scalar(self, node: Node) -> Node:
        """A tensor of one element as a 0-d tensor, which changes no other's dtype."""
        return node if shape(node) == () else self.reshape(node)

    def product(self, tensors: tuple[Node, ...]) -> Node | None:
        """The product of tensors of one element as a 0-d float, None for none; of several, fp32."""
        if not tensors:
            return None
        first, *others = map(self.scalar, tensors)
        if others or not dtype(first).is_floating_point:
            first = self.cast(first, torch.float32)
        return self.scaled(first, 1.0, tuple(others))

    def total(self, terms: list[tuple[Node, float, tuple[Node, ...]]]) -> Node | None:
        """The sum of the nodes, each times its factors, rounded once to their dtype."""
        if not terms:
            return None
        roundings = sum((abs(factor) != 1.0) + len(tensors) for _, factor, tensors in terms)
        activation = dtype(terms[0][0])
        wanted = torch.float32 if roundings + len(terms) > 2 else activation
        first, *others = (
            self.scaled(self.cast(node, wanted), factor, tensors) for node, factor, tensors in terms
        )
        for other in others:
            first = self.call(aten.add.Tensor, first, other)
        return self.cast(first, activation)


def _static(size: Size) -> int:
    assert isinstance(size, int)
    return size
