"""How people write an RMSNorm: one small matcher for each spelling.

All share a core, ``x * rsqrt(mean(x ** 2, -1) + eps)``, which :func:`match_core` finds from the
residual sum downwards. What follows the core is a *form*: a function from the core's last node to a
:class:`Norm`, listed in ``FORMS``. A new spelling is one such function and one snapshot test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from moe_fusion.passes.nodes import (
    NoMatch,
    Size,
    add_operands,
    arg,
    aten,
    calls,
    constant,
    dtype,
    either_order,
    has_value,
    is_cast,
    is_scalar_tensor,
    is_widening,
    mul_operands,
    same,
    shape,
    sole_user,
    strip,
    strip_casts,
)


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


@dataclass(frozen=True)
class Norm:
    """A whole RMSNorm of the residual sum.

    Attributes:
        form: its spelling.
        output: the normalised rows.
        weight: [H], or None.
        weight_bias: added to the weight (1.0 in Gemma's form).
        eps: as in :class:`Core`.
        interior: the nodes from the square up to the one before the output.
    """

    form: str
    output: Node
    weight: Node | None
    weight_bias: float
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


def _is_row_mean(node: Node | None, rank: int) -> TypeGuard[Node]:
    """Whether ``node`` is ``mean(., -1, keepdim=True)`` of a tensor with ``rank`` dimensions."""
    if not calls(node, aten.mean.dim) or len(node.args) != 3 or not arg(node, 2):
        return False
    dims = arg(node, 1)
    return list(dims) in ([-1], [rank - 1]) and set(node.kwargs) <= {"dtype"}


def _eps(value: object) -> float | Node | None:
    """``value`` as an epsilon: a constant, or a 0-d tensor in host memory."""
    number = constant(value)
    if number is not None:
        return number
    if isinstance(value, Node) and is_scalar_tensor(strip(value)):
        source = value
        while is_cast(source) or calls(source, torch.ops.prims.convert_element_type.default):
            source = arg(source, 0)
        if source.meta["val"].device.type == "cpu":
            return source
    return None


def _core_of(square: Node, residual_sum: Node) -> Core | None:
    mean = sole_user(square)
    if not _is_row_mean(mean, len(shape(square))):
        return None
    shifted = sole_user(mean)
    if shifted is None:
        return None
    for total, offset in either_order(add_operands(shifted)):
        eps = _eps(offset) if total is mean else None
        root = sole_user(shifted)
        if eps is None or not calls(root, aten.rsqrt.default):
            continue
        scaled = sole_user(root)
        if scaled is None:
            continue
        for x, factor in either_order(mul_operands(scaled)):
            if factor is root and has_value(x) and strip(x) is strip(residual_sum):
                return Core(scaled, eps, (square, mean, shifted, root))
    return None


def match_core(residual_sum: Node) -> Core | None:
    """The core of an RMSNorm that reads ``residual_sum``, directly or widened, or None."""
    widened = [user for user in residual_sum.users if is_widening(user)]
    for x in (residual_sum, *widened):
        for square in _squares(x):
            if core := _core_of(square, residual_sum):
                return core
    return None


def _as_weight(value: Any, hidden_dim: Size) -> tuple[Node, float] | None:
    """``value`` as (weight, bias): a vector of H elements, or one plus a constant."""
    if not has_value(value):
        return None
    *leading, last = shape(value)
    if not same(last, hidden_dim) or not all(same(size, 1) for size in leading):
        return None
    for inner, offset in either_order(add_operands(value)):
        bias = constant(offset)
        if bias is not None and has_value(inner):
            return strip_casts(inner), bias
    return strip_casts(value), 0.0


def _weighted(node: Node | None, normalised: Node) -> tuple[Node, float] | None:
    """The (weight, bias) by which ``node`` multiplies ``normalised``."""
    for factor, weight in either_order(mul_operands(node) if node else None):
        if factor is normalised:
            return _as_weight(weight, shape(normalised)[-1])
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
    """The RMSNorm that reads ``residual_sum``.

    Args:
        residual_sum: the node whose rows are normalised.
        activation: the dtype that the norm's output must have.
    """
    core = match_core(residual_sum)
    if core is None:
        return NoMatch("no RMSNorm reads the sum", residual_sum)
    for form in FORMS:
        norm = form(core, activation)
        if norm is None:
            continue
        if dtype(norm.output) != activation:
            return NoMatch(
                f"the norm's output is {dtype(norm.output)}: expected {activation}",
                norm.output,
            )
        return norm
    return NoMatch("the end of the RMSNorm is not one that is known", core.scaled)


def reads_layer_norm(residual_sum: Node) -> bool:
    """Whether a LayerNorm, whole or decomposed, reads ``residual_sum``."""
    readers = [residual_sum, *(user for user in residual_sum.users if is_widening(user))]
    return any(
        calls(user, aten.var_mean.correction, aten.native_layer_norm.default)
        or _is_row_mean(user, len(shape(residual_sum)))
        for reader in readers
        for user in reader.users
    )
