"""How people write an RMSNorm: one small matcher for each spelling.

A norm that is written out ends in a *form*; a norm that is one op of another library needs no code
here: it is registered, and ``passes/norm_ops.py`` finds it.

What is written out has a core, ``x * rsqrt(mean(x ** 2, -1) + eps)``, which :func:`match_cores`
finds from the residual sum downwards. What follows the core is a form: a function from the core's
last node to a :class:`Norm`, listed in ``FORMS``. A new spelling is one such function and one
snapshot test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx import Node

from moe_fusion.passes.nodes import (
    NoMatch,
    add_operands,
    arg,
    aten,
    calls,
    constant,
    dtype,
    either_order,
    has_value,
    is_cast,
    is_widening,
    mul_operands,
    num_rows,
    operands,
    same,
    scaled_operand,
    shape,
    sole_user,
    strip,
)
from moe_fusion.passes.norm_ops import registered_norm
from moe_fusion.passes.norm_parts import Norm, as_eps, as_weight, same_rows


@dataclass(frozen=True)
class Core:
    """``x * rsqrt(mean(x ** 2, -1) + eps)``.

    Attributes:
        scaled: the product, in the dtype in which the norm is computed.
        eps: the constant, or the 0-d CPU tensor that holds it (``dynamic=True`` makes floats
            inputs).
        interior: the nodes from the square to the product.
    """

    scaled: Node
    eps: float | Node
    interior: tuple[Node, ...]


def _squares(x: Node) -> list[Node]:
    """The users of ``x`` that are its square."""
    return [
        user
        for user in x.users
        if (calls(user, aten.pow.Tensor_Scalar) and arg(user, 1) == 2)
        or mul_operands(user) == (x, x)
    ]


def _over_rows(node: Node | None, rank: int, *reductions: OpOverload) -> TypeGuard[Node]:
    """Whether ``node`` reduces the last one of ``rank`` dimensions."""
    if not calls(node, *reductions) or set(node.kwargs) - {"dtype"}:
        return False
    return list(arg(node, 1)) in ([-1], [rank - 1])


def _row_mean(square: Node) -> tuple[Node, ...]:
    """The nodes of the mean over rows, whose last keeps the dimension; none if there is no mean."""
    nodes = _reduced_rows(square)
    if not nodes or calls(nodes[0], aten.mean.dim):
        return nodes
    mean, size = sole_user(nodes[-1]), shape(square)[-1]
    if mean is None or not isinstance(size, int):
        return ()
    return (*nodes, mean) if scaled_operand(mean) == (nodes[-1], 1.0 / size) else ()


def _reduced_rows(square: Node) -> tuple[Node, ...]:
    """The nodes of the mean or the sum over rows, whose last keeps the dimension."""
    reduced = sole_user(square)
    rank = len(shape(square))
    if not _over_rows(reduced, rank, aten.mean.dim, aten.sum.dim_IntList):
        return ()
    if len(reduced.args) == 3 and arg(reduced, 2):
        return (reduced,)
    kept = sole_user(reduced)
    back = calls(kept, aten.unsqueeze.default) and arg(kept, 1) in (-1, rank - 1)
    return (reduced, kept) if kept is not None and back else ()


def _inverse_roots(shifted: Node) -> list[tuple[Node, ...]]:
    """The ways from ``mean + eps`` to its inverse root: ``rsqrt``, ``pow(-0.5)``, ``1 / sqrt``."""
    root = sole_user(shifted)
    if calls(root, aten.rsqrt.default) or _is_power(root, -0.5):
        return [(root,)]
    inverse = sole_user(root) if calls(root, aten.sqrt.default) else None
    if root is None or inverse is None or not _is_inverse_of(inverse, root):
        return []
    # `1 / x` is traced as a reciprocal times one.
    product = sole_user(inverse)
    if product is not None and scaled_operand(product) == (inverse, 1.0):
        return [(root, inverse, product)]
    return [(root, inverse)]


def _is_power(node: Node | None, exponent: float) -> TypeGuard[Node]:
    return calls(node, aten.pow.Tensor_Scalar) and arg(node, 1) == exponent


def _is_inverse_of(node: Node, root: Node) -> bool:
    quotient = operands(node, aten.div.Tensor)
    divides = quotient is not None and quotient[1] is root and constant(quotient[0]) == 1.0
    return calls(node, aten.reciprocal.default) or _is_power(node, -1) or divides


def _products(shifted: Node) -> list[tuple[Node, Node, tuple[Node, ...]]]:
    """What is multiplied by the inverse root: (factor, product, nodes of the root)."""
    found = []
    for nodes in _inverse_roots(shifted):
        product = sole_user(nodes[-1])
        for x, factor in either_order(mul_operands(product) if product is not None else None):
            if factor is nodes[-1] and product is not None:
                found.append((x, product, nodes))
    root = sole_user(shifted)
    quotient = sole_user(root) if calls(root, aten.sqrt.default) else None
    pair = None if quotient is None else operands(quotient, aten.div.Tensor)
    if root is not None and quotient is not None and pair is not None and pair[1] is root:
        found.append((pair[0], quotient, (root,)))
    return found


def _core_of(square: Node, residual_sum: Node) -> Core | None:
    mean = _row_mean(square)
    shifted = sole_user(mean[-1]) if mean else None
    for total, offset in either_order(add_operands(shifted) if shifted is not None else None):
        eps = as_eps(offset) if total is mean[-1] else None
        if eps is None or shifted is None:
            continue
        for x, product, root in _products(shifted):
            if has_value(x) and strip(x) is strip(residual_sum):
                return Core(product, eps, (square, *mean, shifted, *root))
    return None


def match_cores(residual_sum: Node) -> Iterator[Core]:
    """The cores of RMSNorms that read ``residual_sum``, directly, widened or viewed."""
    for x in same_rows(residual_sum):
        for square in _squares(x):
            if core := _core_of(square, residual_sum):
                yield core


def _weighted(node: Node | None, normalised: Node) -> tuple[Node, float] | None:
    """The (weight, bias) by which ``node`` multiplies ``normalised``."""
    for factor, weight in either_order(mul_operands(node) if node else None):
        if factor is normalised:
            return as_weight(weight, shape(normalised)[-1])
    return None


def _norm(
    form: str, core: Core, output: Node, weight: tuple[Node, float] | None, *more: Node
) -> Norm:
    vector, bias = weight or (None, 0.0)
    return Norm(form, output, vector, bias, core.eps, (*core.interior, *more))


def weight_after_cast(core: Core, activation: torch.dtype) -> Norm | None:
    """Matches ``weight * x32.to(activation)`` (Llama, Mixtral, Qwen)."""
    cast = sole_user(core.scaled)
    if cast is None or not is_cast(cast) or dtype(cast) != activation:
        return None
    output = sole_user(cast)
    weight = _weighted(output, cast)
    if weight is None:
        return None
    assert output is not None
    return _norm("weight after cast", core, output, weight, core.scaled, cast)


def weight_before_cast(core: Core, activation: torch.dtype) -> Norm | None:
    """Matches ``(weight * x32).to(activation)`` (gpt-oss, F.rms_norm; Gemma with 1 + weight)."""
    product = sole_user(core.scaled)
    weight = _weighted(product, core.scaled)
    if weight is None:
        return None
    assert product is not None
    cast = sole_user(product)
    form = "weight before cast" if weight[1] == 0.0 else "1 + weight before cast"
    if dtype(product) == activation:
        return _norm(
            "weight" if weight[1] == 0.0 else "1 + weight", core, product, weight, core.scaled
        )
    if cast is not None and is_cast(cast):
        return _norm(form, core, cast, weight, core.scaled, product)
    return _norm(form, core, product, weight, core.scaled)


def no_weight(core: Core, activation: torch.dtype) -> Norm | None:
    """Matches ``x32.to(activation)`` with no weight at all."""
    if dtype(core.scaled) == activation:
        return _norm("no weight", core, core.scaled, None)
    cast = sole_user(core.scaled)
    if cast is not None and is_cast(cast):
        return _norm("no weight", core, cast, None, core.scaled)
    return None


FORMS: tuple[Callable[[Core, torch.dtype], Norm | None], ...] = (
    weight_after_cast,
    weight_before_cast,
    no_weight,
)


def match_norm(residual_sum: Node, activation: torch.dtype) -> Norm | NoMatch:
    """An RMSNorm that reads ``residual_sum``: of several the first that the op can express.

    Args:
        residual_sum: the node whose rows are normalised, alone or after a registered op has added
            another to it.
        activation: the dtype that the norm's output must have.
    """
    registered = registered_norm(residual_sum)
    found = [] if registered is None else [registered]
    found += (_written_norm(core, activation) for core in match_cores(residual_sum))
    found = [_checked(norm, residual_sum, activation) for norm in found]
    norms = (norm for norm in found if isinstance(norm, Norm))
    return next(norms, (*found, NoMatch("no RMSNorm reads the sum", residual_sum))[0])


def _checked(norm: Norm | NoMatch, residual_sum: Node, activation: torch.dtype) -> Norm | NoMatch:
    """``norm``, unless its output is not what the op gives."""
    if isinstance(norm, NoMatch):
        return norm
    if dtype(norm.output) != activation:
        what = f"the norm's output is {dtype(norm.output)}: expected {activation}"
        return NoMatch(what, norm.output)
    if not same(num_rows(norm.output), num_rows(residual_sum)):
        return NoMatch("the norm's output has more rows than the sum", norm.output)
    return norm


def _written_norm(core: Core, activation: torch.dtype) -> Norm | NoMatch:
    """The norm that has ``core``, in one of the forms."""
    for form in FORMS:
        norm = form(core, activation)
        if norm is not None:
            return norm
    return NoMatch("the end of the RMSNorm is not one that is known", core.scaled)


def unknown_core(residual_sum: Node) -> Node | None:
    """The square of ``residual_sum`` that is averaged or added up over rows, if there is one."""
    squares = (square for x in same_rows(residual_sum) for square in _squares(x))
    return next((square for square in squares if _reduced_rows(square)), None)


def reads_layer_norm(residual_sum: Node) -> bool:
    """Whether a LayerNorm, whole or decomposed, reads ``residual_sum``."""
    readers = [residual_sum, *(user for user in residual_sum.users if is_widening(user))]
    return any(
        calls(user, aten.var_mean.correction, aten.native_layer_norm.default)
        or _over_rows(user, len(shape(residual_sum)), aten.mean.dim)
        for reader in readers
        for user in reader.users
    )
