"""How the top-k reduction is written: from the all_reduce up to GEMM2's rows.

A *reduction* is one way to sum over K: a function in ``REDUCTIONS`` that says where the walk up to
the rows (:mod:`moe_fusion.passes.rows`) begins. A new way to sum is one more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from moe_fusion.limits import TOP_K_MAX_EXPERTS
from moe_fusion.passes.nodes import (
    Size,
    arg,
    aten,
    calls,
    constant,
    either_order,
    has_value,
    is_cast,
    is_reshape,
    mul_operands,
    past_units,
    same,
    same_shape,
    shape,
    strip_reshapes,
)
from moe_fusion.passes.routing import (
    Index,
    Mask,
    in_token_order,
    strip_index,
    tokens_of,
    unclamped,
)
from moe_fusion.passes.rows import Walk, Weight


@dataclass(frozen=True)
class Finalize:
    """A top-k reduction.

    Attributes:
        rows: [R, H], what GEMM2 left.
        top_k: K.
        weights: the factors of the rows.
        index: the map, or None when the rows are token-major.
        absent: a map whose negative entries drop their row, or None.
        masks: what else drops rows.
        scale: constant factors.
        base: what the sum is added to, or None.
        interior: the nodes from below ``rows`` to the sum.
    """

    rows: Node
    top_k: int
    weights: tuple[Weight, ...]
    index: Index | None
    absent: Node | None
    masks: tuple[Mask, ...]
    scale: float
    base: Node | None
    interior: tuple[Node, ...]


@dataclass(frozen=True)
class Reduction:
    """Where the walk begins: the tensor that is summed over K, and what the sum already says."""

    walk: Walk
    top_k: int
    base: Node | None = None


def summed(node: Node) -> Reduction | None:
    """Matches ``x[T, K, H].sum(dim=1)``."""
    if not calls(node, aten.sum.dim_IntList) or set(node.kwargs) - {"dtype"}:
        return None
    source, dims = arg(node, 0), arg(node, 1)
    rank = len(shape(source))
    if rank < 3 or list(dims) not in ([rank - 2], [-2]):
        return None
    return _starting_at(source, shape(source)[rank - 2])


def _starting_at(source: Node, top_k: Size, *weights: Weight) -> Reduction | None:
    if not isinstance(top_k, int):
        return None
    return Reduction(Walk(source, weights=list(weights)), top_k)


def multiplied(node: Node) -> Reduction | None:
    """Matches ``w[T, 1, K] @ x[T, K, H]`` and ``x[T, H, K] @ w[T, K, 1]`` (einsum, bmm).

    Of one token every matrix product has that shape; with more terms than a token has experts it is
    a projection, and the partial is taken as it is.
    """
    if not calls(node, aten.bmm.default):
        return None
    left, right = arg(node, 0), arg(node, 1)
    tokens, rows, columns = shape(node)
    if same(tokens, 1) and not _may_be_top_k(shape(left)[2]):
        return None
    if same(rows, 1) and not same(columns, 1):
        return _starting_at(right, shape(right)[1], Weight(left, permuted=False))
    source = _transposed(left)
    if same(columns, 1) and source is not None:
        return _starting_at(source, shape(left)[2], Weight(right, permuted=False))
    return None


def _may_be_top_k(terms: Size) -> bool:
    return isinstance(terms, int) and terms <= TOP_K_MAX_EXPERTS


def _transposed(node: Node) -> Node | None:
    """The [T, K, H] tensor of which ``node`` is the [T, H, K] transpose."""
    axes = [0, 1, 2]
    while is_cast(node) or calls(node, aten.permute.default):
        if calls(node, aten.permute.default):
            axes = [arg(node, 1)[axis] for axis in axes]
        node = arg(node, 0)
        if axes == [0, 2, 1]:
            return node
    return None


def one_expert(node: Node) -> Reduction | None:
    """Matches ``x[T, H, 1] * w[T, 1, 1]``, what an einsum over K = 1 leaves."""
    for rows, weight in either_order(mul_operands(node)):
        if not (has_value(rows) and has_value(weight)) or len(shape(rows)) != 3:
            continue
        tokens = shape(rows)[0]
        source = _transposed(rows)
        fits = same(shape(rows)[2], 1) and same_shape(shape(weight), (tokens, 1, 1))
        if fits and source is not None and same_shape(shape(node), shape(rows)):
            return _starting_at(source, 1, Weight(weight, permuted=False))
    return None


def added_by_token(node: Node) -> Reduction | None:
    """Matches ``base.index_add(0, perm // K, rows)`` and the same with scatter_add.

    The base is zeros, or an addend such as the shared expert's output.
    """
    operands = _accumulation(node)
    if operands is None:
        return None
    base, tokens, rows = operands
    if len(shape(rows)) != 2 or len(shape(base)) != 2:
        return None
    for top_k in _divisor(tokens):
        perm = tokens_of(tokens, top_k)
        if perm is None or not same(shape(perm)[0], shape(base)[0] * top_k):
            continue
        if not same(shape(rows)[0], shape(perm)[0]):
            continue
        walk = Walk(rows, index=Index(perm, inverse=True))
        return Reduction(walk, top_k, None if constant(base) == 0.0 else base)
    return None


def _accumulation(node: Node) -> tuple[Node, Node, Node] | None:
    """The base, the index and the rows that ``node`` adds to the base along dimension 0."""
    if calls(node, aten.index_add.default, aten.scatter_add.default) and len(node.args) == 4:
        plain = node.kwargs.get("alpha", 1) == 1 and arg(node, 1) == 0
        base, index, rows = arg(node, 0), arg(node, 2), arg(node, 3)
        whole = calls(node, aten.index_add.default) or _in_every_column(index, rows)
        return (base, index, rows) if plain and whole else None
    # index_add decomposes into an accumulating index_put in most dtypes.
    if calls(node, aten.index_put.default) and node.args[3:] == (True,) and len(arg(node, 1)) == 1:
        return arg(node, 0), arg(node, 1)[0], arg(node, 2)
    return None


def _in_every_column(index: Node, rows: Node) -> bool:
    """Whether ``index`` is one number for each of the ``rows``, spread over all columns."""
    spread = strip_index(index)
    if not calls(spread, aten.expand.default):
        return False
    column = shape(arg(spread, 0))
    shapes_fit = all(same_shape(shape(each), shape(rows)) for each in (index, spread))
    return shapes_fit and len(column) == 2 and same(column[1], 1)


def _divisor(tokens: Node) -> tuple[int, ...]:
    """The constant by which a token index was divided, if there is one above it."""
    node = tokens
    while node.op == "call_function" and node.args:
        if calls(node, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default):
            number = constant(arg(node, 1))
            return () if number is None else (int(number),)
        if not isinstance(arg(node, 0), Node):
            break
        node = arg(node, 0)
    return ()


REDUCTIONS: tuple[Callable[[Node], Reduction | None], ...] = (
    summed,
    multiplied,
    one_expert,
    added_by_token,
)


def match_finalize(node: Node) -> Finalize | None:
    """The top-k reduction that ``node`` ends, or None."""
    ends: list[Node] = []
    reduction = _reduction_of(node)
    while reduction is None and (passed := past_units(node)):
        ends += passed
        node = arg(passed[-1], 0)
        reduction = _reduction_of(node)
    if reduction is None:
        return None
    return _explain(reduction, (*ends, node))


def _reduction_of(node: Node) -> Reduction | None:
    return next((found for form in REDUCTIONS if (found := form(node)) is not None), None)


def _zeroed(weight: Weight, index: Index | None) -> Mask | None:
    """The mask that makes entries of ``weight`` zero: their rows need not be read.

    Matches ``where(absent, 0, w)`` and ``where(present, w, 0)``, in token order.
    """
    node = in_token_order(weight.node, index) if weight.permuted else weight.node
    source = None if node is None else strip_reshapes(node)
    if not calls(source, aten.where.self):
        return None
    mask, kept, dropped = (arg(source, place) for place in range(3))
    for weights, zero, keeps in ((kept, dropped, True), (dropped, kept, False)):
        whole = has_value(weights) and same_shape(shape(weights), shape(source))
        if whole and constant(zero) == 0.0 and same_shape(shape(mask), shape(source)):
            return Mask(strip_reshapes(mask), keeps, permuted=False)
    return None


def _is_clamped(index: Index | None, source: Node) -> bool:
    """Whether ``index`` is the map ``source``, but for its negative entries."""
    return index is not None and not index.inverse and unclamped(index.node) is source


def _explain(reduction: Reduction, ends: tuple[Node, ...]) -> Finalize | None:
    walk = reduction.walk
    walk.run()
    # A view of the rows is the rows: whoever else reads it may.
    while walk.interior and (is_reshape(walk.interior[-1]) or past_units(walk.interior[-1])):
        walk.interior.pop()
    masks, absent = list(walk.masks), None
    if walk.present is not None:
        source, mask = walk.present
        if mask is None or _is_clamped(walk.index, source):
            absent = source
        else:
            masks.append(mask)
    if not walk.weights and walk.index is None:
        return None
    if absent is None and not masks:
        masks = [mask for weight in walk.weights if (mask := _zeroed(weight, walk.index))]
    return Finalize(
        walk.node,
        reduction.top_k,
        tuple(walk.weights),
        walk.index,
        absent,
        tuple(masks),
        walk.scale,
        reduction.base,
        (*ends, *walk.interior),
    )
