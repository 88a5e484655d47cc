"""Makes the op's [T, K] weights and map out of what the graph has."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from moe_fusion.passes.emit import Emitter
from moe_fusion.passes.finalize import Finalize
from moe_fusion.passes.nodes import aten, dtype, num_rows, prims, strip_reshapes
from moe_fusion.passes.routing import Mask, in_token_order


def emit_routing(
    emit: Emitter,
    finalize: Finalize,
    tensor_scales: tuple[Node, ...],
    tensor_divisors: tuple[Node, ...],
) -> tuple[Node, Node | None]:
    """The weights, and the int32 map or None where rows are token-major.

    Args:
        emit: where to add nodes.
        finalize: the reduction.
        tensor_scales: tensors of one element that multiply the routed experts, put into the
            weights.
        tensor_divisors: tensors of one element that divide them, put there as well.
    """
    routing = _Routing(emit, finalize)
    return routing.weights(tensor_scales, tensor_divisors), routing.index()


@dataclass
class _Routing:
    emit: Emitter
    finalize: Finalize

    @cached_property
    def _gather(self) -> Node:
        """For each token and expert its row, none of them negative: [T, K]."""
        emit, finalize = self.emit, self.finalize
        index = finalize.index
        if index is None:
            return self._count(finalize.weights[0].node)
        if index.inverse:
            inverse = emit.call(aten.empty_like.default, index.node, dtype=torch.int32)
            positions = self._count(index.node, flat=True)
            inverse = emit.call(aten.index_put.default, inverse, [index.node], positions)
            return emit.columns(inverse, finalize.top_k)
        node = emit.columns(index.node, finalize.top_k)
        if index.may_wrap:
            count = num_rows(finalize.rows)
            symbolic = not isinstance(count, int)
            held = emit.size(emit.rows(finalize.rows), 0) if symbolic else count
            node = emit.call(aten.remainder.Scalar, node, held)
        return node

    def _count(self, like: Node, *, flat: bool = False) -> Node:
        """0, 1, 2, ... for each entry of ``like``, int32."""
        emit = self.emit
        entries = emit.columns(like, self.finalize.top_k)
        size = emit.size(entries, 0)
        if not isinstance(size, int):
            size = emit.call(operator.mul, size, self.finalize.top_k)
        else:
            size = size * self.finalize.top_k
        device = like.meta["val"].device
        count = emit.call(
            prims.iota.default,
            size,
            start=0,
            step=1,
            dtype=torch.int32,
            device=device,
            requires_grad=False,
        )
        return count if flat else emit.columns(count, self.finalize.top_k)

    def _by_token(self, value: Node, *, permuted: bool) -> Node:
        """``value`` as [T, K]."""
        emit, finalize = self.emit, self.finalize
        source = strip_reshapes(value)
        if permuted:
            found = in_token_order(value, finalize.index)
            if found is None:
                flat = emit.reshape(source, -1)
                return emit.call(aten.index.Tensor, flat, [self._gather])
            source = found
        return emit.columns(source, finalize.top_k)

    def weights(self, scales: tuple[Node, ...], divisors: tuple[Node, ...]) -> Node:
        """[T, K] weights; a product of several is computed in fp32, so as not to round it."""
        emit, finalize = self.emit, self.finalize
        factors = [self._by_token(w.node, permuted=w.permuted) for w in finalize.weights]
        if not factors:
            factors = [emit.call(aten.full_like.default, self._gather, 1.0, dtype=torch.float32)]
        if len(factors) == 1 and not scales and not divisors:
            return factors[0]
        product = emit.cast(factors[0], torch.float32)
        for factor in factors[1:]:
            product = emit.call(aten.mul.Tensor, product, factor)
        product = emit.scaled(product, 1.0, scales)
        for divisor in divisors:
            product = emit.call(aten.div.Tensor, product, emit.scalar(divisor))
        return product

    def index(self) -> Node | None:
        """[T, K] int32, -1 where the row is dropped; None where it would only count."""
        emit, finalize = self.emit, self.finalize
        if finalize.index is None and not finalize.masks:
            return None
        if finalize.absent is not None:
            index = emit.columns(finalize.absent, finalize.top_k)
        else:
            index = self._gather
        index = emit.cast(index, torch.int32)
        for mask in finalize.masks:
            index = self._drop(index, mask)
        return index

    def _drop(self, index: Node, mask: Mask) -> Node:
        emit = self.emit
        keeps = self._by_token(mask.node, permuted=mask.permuted)
        device = index.meta["val"].device
        absent = emit.call(aten.full.default, [], -1, dtype=dtype(index), device=device)
        pair = (index, absent) if mask.keeps else (absent, index)
        return emit.call(aten.where.self, keeps, *pair)
