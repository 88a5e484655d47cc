"""Questions about FX nodes that every matcher asks: kind, shape, readers, and what a view keeps.

Shapes and dtypes come from ``node.meta["val"]``. Sizes are compared with ``statically_known_true``,
which adds no guard, so that a question never changes what is compiled.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard, cast

import torch
from torch import SymInt, Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

Size = int | SymInt

_RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
_COPIES = {aten.clone.default, aten.alias.default, aten.contiguous.default}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class NoMatch:
    """Why a pattern does not hold: one sentence and the node that stopped it."""

    reason: str
    node: Node | None = None

    def __str__(self) -> str:
        """The sentence."""
        return self.reason


def arg(node: Any, index: int) -> Any:
    """A positional argument of a call, of the type that the op's schema gives it."""
    return node.args[index]


def calls(node: object, *targets: Any) -> TypeGuard[Node]:
    """Whether ``node`` is a call of one of ``targets``."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def has_value(node: object) -> TypeGuard[Node]:
    """Whether ``node`` is a node that holds one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def dtype(node: Node) -> torch.dtype:
    """The dtype of the tensor that ``node`` holds."""
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def shape(node: Node) -> tuple[Size, ...]:
    """The shape of the tensor that ``node`` holds."""
    return tuple(node.meta["val"].shape)


def num_rows(node: Node) -> Size:
    """The number of rows of the last dimension's size."""
    return prod(shape(node)[:-1])


def same(left: Size, right: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return bool(statically_known_true(left == right))


def same_shape(left: tuple[Size, ...], right: tuple[Size, ...]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(left) == len(right) and all(map(same, left, right))


def contiguous(sizes: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether rows follow each other, asked without a guard."""
    expected: Size = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * size
    return True


def keeps_rows(node: Node) -> bool:
    """Whether ``node`` is a view or copy under which rows stay rows, in order."""
    if not has_value(node) or not node.args or not has_value(arg(node, 0)):
        return False
    before, after = shape(arg(node, 0)), shape(node)
    if not before or not after:
        return False
    if calls(node, *_RESHAPES):
        return same(before[-1], after[-1])
    if calls(node, aten.permute.default):
        return list(arg(node, 1)) == list(range(len(before)))
    if calls(node, aten.expand.default):
        return same_shape(before, after)
    return calls(node, *_COPIES)


def past_units(node: Node) -> list[Node]:
    """The views from ``node`` up under which the elements keep their order, or nothing.

    A reshape always keeps it; permutes keep it when together they only move dimensions of size 1.
    """
    if is_reshape(node):
        return [node]
    passed: list[Node] = []
    axes = list(range(len(shape(node)))) if has_value(node) else []
    while calls(node, aten.permute.default):
        passed.append(node)
        axes = [arg(node, 1)[axis] for axis in axes]
        node = arg(node, 0)
        sizes = shape(node)
        order = [axis for axis in axes if not same(sizes[axis], 1)]
        if order == sorted(order):
            return passed
    return []


def is_reshape(node: object) -> TypeGuard[Node]:
    """Whether ``node`` only gives its input, in the same order of elements, another shape."""
    return calls(node, *_RESHAPES, *_COPIES)


def is_float(node: Node) -> bool:
    """Whether ``node`` holds an activation dtype."""
    return dtype(node) in _FLOATS


def is_cast(node: object) -> TypeGuard[Node]:
    """Whether ``node`` converts between float dtypes."""
    return (
        calls(node, prims.convert_element_type.default, aten._to_copy.default)
        and has_value(node)
        and dtype(node) in _FLOATS
        and dtype(arg(node, 0)) in _FLOATS
    )


def is_widening(node: object) -> TypeGuard[Node]:
    """Whether ``node`` converts to a float dtype that holds every value of its input's."""
    return is_cast(node) and dtype(node) in (torch.float32, dtype(arg(node, 0)))


def strip(node: Node) -> Node:
    """What ``node`` was before row-keeping views and widening conversions."""
    while keeps_rows(node) or is_widening(node):
        node = arg(node, 0)
    return node


def strip_casts(node: Node) -> Node:
    """What ``node`` was before widening conversions."""
    while is_widening(node):
        node = arg(node, 0)
    return node


def strip_reshapes(node: Node) -> Node:
    """What ``node`` was before reshapes and conversions that only widen."""
    while is_reshape(node) or is_widening(node):
        node = arg(node, 0)
    return node


def sole_user(node: Node) -> Node | None:
    """The one node that reads ``node``, or None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def operands(node: Node, *targets: Any) -> tuple[Any, Any] | None:
    """Both operands of a binary call without kwargs."""
    if not calls(node, *targets) or len(node.args) != 2 or node.kwargs:
        return None
    return arg(node, 0), arg(node, 1)


def mul_operands(node: Node) -> tuple[Any, Any] | None:
    """Both operands of a multiplication."""
    return operands(node, aten.mul.Tensor, aten.mul.Scalar)


_SIGNS: dict[Any, float] = {
    aten.add.Tensor: 1.0,
    aten.add.Scalar: 1.0,
    aten.sub.Tensor: -1.0,
    aten.sub.Scalar: -1.0,
}


def terms(node: Node) -> tuple[tuple[Any, float], tuple[Any, float]] | None:
    """Both terms of an add or a subtraction, each with the constant that multiplies it.

    ``addcmul(base, x, 2.5)`` is one of them where a factor is a constant.
    """
    if calls(node, aten.addcmul.default):
        return _terms_of_addcmul(node)
    if not calls(node, *_SIGNS) or len(node.args) != 2 or set(node.kwargs) - {"alpha"}:
        return None
    alpha = constant(node.kwargs.get("alpha", 1))
    if alpha is None:
        return None
    return (arg(node, 0), 1.0), (arg(node, 1), alpha * _SIGNS[node.target])


def _terms_of_addcmul(node: Node) -> tuple[tuple[Any, float], tuple[Any, float]] | None:
    base, value = arg(node, 0), constant(node.kwargs.get("value", 1))
    for operand, factor in either_order((arg(node, 1), arg(node, 2))):
        number = constant(factor)
        if value is None or number is None or constant(operand) is not None:
            continue
        # Else the constant broadcasts them.
        if any(same_shape(shape(each), shape(node)) for each in (base, operand)):
            return (base, 1.0), (operand, value * number)
    return None


def tensor_terms(node: Node) -> tuple[tuple[Any, float, tuple[Node, ...]], ...]:
    """:func:`terms`, each also with the tensors of one element that multiply it; none for None."""
    pair = terms(node)
    if pair is not None:
        return tuple((operand, factor, ()) for operand, factor in pair)
    value = constant(node.kwargs.get("value", 1))
    if not calls(node, aten.addcmul.default) or value is None:
        return ()
    for operand, scale in either_order((arg(node, 1), arg(node, 2))):
        if is_scale(scale) and not is_scale(operand):
            factors: tuple[Node, ...] = (scale,)
            return (arg(node, 0), 1.0, ()), (operand, value, factors)
    return ()


def add_operands(node: Node) -> tuple[Any, Any] | None:
    """Both operands of a plain add."""
    pair = terms(node)
    return None if pair is None or pair[1][1] != 1.0 else (pair[0][0], pair[1][0])


def scaled_operand(node: Node) -> tuple[Node, float] | None:
    """The tensor that ``node`` multiplies by a constant, unless it broadcasts it; the constant."""
    operand, factor = _factor(node)
    if factor is None or not has_value(operand) or not same_shape(shape(operand), shape(node)):
        return None
    return operand, factor


def _factor(node: Node) -> tuple[Any, float | None]:
    for operand, other in either_order(mul_operands(node)):
        if constant(other) is not None and has_value(operand):
            return operand, constant(other)
    quotient = operands(node, aten.div.Tensor, aten.div.Scalar)
    divisor = None if quotient is None else constant(quotient[1])
    if quotient is not None and divisor:
        return quotient[0], 1.0 / divisor
    return (arg(node, 0), -1.0) if calls(node, aten.neg.default) else (None, None)


def either_order(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    """The pair both ways round; nothing for None."""
    return () if pair is None else (pair, pair[::-1])


def constant(value: object) -> float | None:
    """The number that ``value`` is or that a ``full`` of any shape holds, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if is_widening(value):
        return constant(arg(value, 0))
    if calls(value, aten.full.default, aten.scalar_tensor.default):
        number = constant(arg(value, -1))
        # A fill is rounded to the tensor's dtype.
        return None if number is None else float(torch.tensor(number, dtype=dtype(value)))
    return 0.0 if calls(value, aten.zeros.default) else None


def is_scalar_tensor(node: Any) -> bool:
    """Whether ``node`` holds a 0-d tensor."""
    return has_value(node) and shape(node) == ()


def is_scale(node: Any) -> bool:
    """Whether ``node`` holds one real number: a tensor of one element, of any rank."""
    if not has_value(node) or dtype(node).is_complex:
        return False
    return all(same(size, 1) for size in shape(node))


def tensor_scaled_operand(node: Node) -> tuple[Node, Node] | None:
    """The tensor that ``node`` multiplies by one element, unless it broadcasts it; the element."""
    for operand, scale in either_order(mul_operands(node)):
        if is_scale(scale) and has_value(operand) and same_shape(shape(operand), shape(node)):
            return operand, scale
    return None


def tensor_divided_operand(node: Node) -> tuple[Node, Node] | None:
    """The tensor that ``node`` divides by one element, unless it broadcasts it; the element."""
    pair = operands(node, aten.div.Tensor)
    if pair is None or not is_scale(pair[1]) or not has_value(pair[0]):
        return None
    return pair if same_shape(shape(pair[0]), shape(node)) else None


def getitem_of(node: Any, index: int, *targets: Any) -> Node | None:
    """The call of which ``node`` takes output ``index``, if it is one of ``targets``."""
    if calls(node, operator.getitem) and arg(node, 1) == index and calls(arg(node, 0), *targets):
        return cast("Node", arg(node, 0))
    return None


def describe(node: Node) -> str:
    """The node's target, as a reader of a report knows it."""
    if node.op != "call_function":
        return node.op
    # A wrapper around an op that mutates says nothing; its first argument is that op.
    wrapped = isinstance(node.target, HigherOrderOperator) and node.args
    target = arg(node, 0) if wrapped else node.target
    return str(target).removesuffix(".default")
