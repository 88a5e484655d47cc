"""How the reduced sum is added: from the all_reduce down to the norm.

Matches ``view | convert | add | scale`` in any order and number between the all_reduce and the
residual sum: the node that an RMSNorm reads, or the sum that a registered op adds and normalises.
What is added last is the residual; what is added before it is added by every rank after the
reduction, so it is the op's ``replicated_output`` wherever its value came from. An addend that is
itself an all_reduce over the same group is a second partial of one reduction.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moe_fusion.op import OP, OP_EPS_TENSOR
from moe_fusion.passes.addends import Addend, added_in, adds_rows, adds_vector, times
from moe_fusion.passes.collectives import AllReduce, is_all_reduce
from moe_fusion.passes.merge import Merged, merge
from moe_fusion.passes.nodes import (
    NoMatch,
    add_operands,
    aten,
    calls,
    describe,
    dtype,
    is_cast,
    is_reshape,
    keeps_rows,
    mul_operands,
    same_shape,
    scaled_operand,
    shape,
    sole_user,
    strip_casts,
    tensor_divided_operand,
    tensor_scaled_operand,
    tensor_terms,
)
from moe_fusion.passes.norm_parts import Norm, ResidualSum
from moe_fusion.passes.norms import match_norm, reads_layer_norm, unknown_core


@dataclass(frozen=True)
class After:
    """What happens to the sum of one or two all_reduces up to the norm.

    Attributes:
        residual_sum: what is normalised, and where it is computed.
        norm: the RMSNorm.
        residual: what was added last, no wider than ``residual_sum``, or None.
        replicated: what else was added after the reduction.
        output_scale: multiplies the reduced sum.
        tensor_scales: tensors of one element that multiply it as well.
        merged: other all_reduces whose sums were added to this one's.
        interior: the nodes between the all_reduces and the residual sum, without either end.
    """

    residual_sum: ResidualSum
    norm: Norm
    residual: Node | None
    replicated: tuple[Addend, ...]
    output_scale: float
    tensor_scales: tuple[Node, ...]
    merged: tuple[Merged, ...]
    interior: tuple[Node, ...]

    @property
    def residual_dtype(self) -> torch.dtype:
        """The dtype of the residual sum."""
        return self.residual_sum.value.dtype

    @property
    def ends(self) -> tuple[Node, ...]:
        """The nodes whose readers will read the op: the residual sum, if read, and the norm's."""
        total = self.residual_sum.node
        return (self.norm.output,) if total is None else (total, self.norm.output)


@dataclass
class _Path:
    """The way down so far."""

    node: Node
    interior: list[Node] = field(default_factory=list)
    addends: list[Addend] = field(default_factory=list)
    scale: float = 1.0
    tensor_scales: tuple[Node, ...] = ()

    def multiply(self, factor: float, *tensors: Node) -> None:
        self.scale *= factor
        self.tensor_scales += tensors
        self.addends = [times(addend, factor, *tensors) for addend in self.addends]

    def step(self, user: Node) -> None:
        self.interior.append(self.node)
        self.node = user


_CORE = "x * rsqrt(mean(x ** 2, -1) + eps), eps >= 0"
_WHY_NOT: dict[Any, str] = {
    aten.slice.Tensor: "a slice comes between the all_reduce and the norm",
    aten.cat.default: "a cat comes between the all_reduce and the norm",
    aten.sum.dim_IntList: "the all_reduce comes before the finalize",
}


def _why_not(node: Node, user: Node | None) -> NoMatch:
    if reads_layer_norm(node):
        return NoMatch("a LayerNorm reads the sum: expected an RMSNorm", node)
    if user is None:
        readers = [n for n in node.users if n.op != "output"]
        if not readers:
            return NoMatch("no RMSNorm reads the sum", node)
        if (core := unknown_core(node)) is not None:
            return NoMatch(f"the RMSNorm is not one that is known: expected {_CORE}", core)
        names = ", ".join(sorted({describe(n) for n in readers}))
        return NoMatch(f"what the all_reduce feeds is read several times ({names})", node)
    if user.op == "output":
        return NoMatch("no RMSNorm reads the sum", node)
    return NoMatch(_what_comes_between(node, user), user)


def _what_comes_between(node: Node, user: Node) -> str:
    if is_reshape(user):
        return "a view splits the rows"
    if is_all_reduce(user):
        return "two all_reduces are chained"
    if calls(user, OP, OP_EPS_TENSOR):
        return "the sum is an operand of another tail, which is reduced apart"
    if mul_operands(user) is not None and same_shape(shape(user), shape(node)):
        return (
            "the sum is multiplied by several elements that may differ by rank: expected one number"
        )
    divided = tensor_divided_operand(user)
    if divided is not None and divided[0] is node:
        return "the sum is divided by a tensor: expected a factor, as its reciprocal is rounded"
    other = f"{describe(user)} comes between the all_reduce and the norm"
    return _WHY_NOT.get(user.target, other)


def _advance(path: _Path) -> NoMatch | None:
    """One step down, through the only reader."""
    node, user = path.node, sole_user(path.node)
    if user is None:
        return _why_not(node, None)
    if keeps_rows(user) or is_cast(user):
        path.step(user)
        return None
    terms = tensor_terms(user)
    own = [factor for operand, factor, tensors in terms if operand is node and not tensors]
    if own and len(own) == len(terms):  # the sum is added to itself
        path.multiply(sum(own))
        path.step(user)
        return _overflow(path.addends, user)
    for (operand, factor, tensors), (other, scale, scales) in itertools.permutations(terms, 2):
        vector = adds_vector(other, node, user)
        if operand is node and other is not node and (vector or adds_rows(other, node)):
            path.multiply(factor, *tensors)
            path.addends.append(Addend(other, added_in(user), scale, scales, vector))
            path.step(user)
            return _overflow(path.addends[-1:], user)
    scaled = _scaled(node, user)
    if scaled is None:
        return _why_not(node, user)
    path.multiply(*scaled)
    path.step(user)
    return _overflow(path.addends, user)


def _overflow(changed: list[Addend], node: Node) -> NoMatch | None:
    """Why what ``node`` scales as a sum, or as it adds it, cannot be scaled alone."""
    if not any(addend.may_overflow for addend in changed):
        return None
    return NoMatch("an addend that is scaled up alone could overflow float16", node)


def _scaled(node: Node, user: Node) -> tuple[float, *tuple[Node, ...]] | None:
    """By what ``user`` multiplies ``node``: a constant, or 1 and a tensor of one element."""
    scaled = scaled_operand(user)
    if scaled is not None and scaled[0] is node:
        return (scaled[1],)
    by_tensor = tensor_scaled_operand(user)
    if by_tensor is not None and by_tensor[0] is node:
        return 1.0, by_tensor[1]
    return None


def _norm_comes_first(norm: Norm) -> bool:
    """Whether the norm's output is nothing but what is added to the residual."""
    user = sole_user(norm.output)
    while user is not None and (keeps_rows(user) or is_cast(user)):
        user = sole_user(user)
    return user is not None and add_operands(user) is not None


def match_after(first: AllReduce) -> After | NoMatch:
    """From the all_reduce down to the norm."""
    path = _Path(first.sum)
    activation = dtype(first.input)
    while isinstance(norm := match_norm(path.node, activation), NoMatch):
        stop = _advance(path) if norm.node is path.node else norm
        if stop is not None:
            return stop
    total = _residual_sum(path, norm)
    path.addends, merged, passed = merge(path.addends, first, path.tensor_scales)
    path.interior.extend(passed)
    residual = _take_residual(path, total.value.dtype)
    if isinstance(residual, NoMatch):
        return residual
    after = After(
        total,
        norm,
        residual,
        tuple(path.addends),
        path.scale,
        path.tensor_scales,
        tuple(merged),
        tuple(path.interior),
    )
    return _inexpressible(after, first) or after


def _residual_sum(path: _Path, norm: Norm) -> ResidualSum:
    """What ``norm`` normalises: the node that the path ends at, or what an op adds to it."""
    if norm.added is None:
        return ResidualSum(path.node, path.node, path.node.meta["val"])
    path.interior.append(path.node)
    path.addends.append(Addend(norm.added.addend, norm.added.total.value.dtype))
    return norm.added.total


def _take_residual(path: _Path, wanted: torch.dtype) -> Node | NoMatch | None:
    """Take out what was added last and unscaled, in the dtype in which the sum is kept."""
    rows = [addend for addend in path.addends if not addend.is_vector]
    unscaled = [a for a in rows if a.scale == 1.0 and not a.tensor_scales]
    if not unscaled:
        return None
    path.addends.remove(unscaled[-1])
    node = unscaled[-1].node
    for candidate in (node, strip_casts(node)):
        if dtype(candidate) == wanted:
            return candidate
    if wanted == torch.float32:
        return node  # the add widens it
    return NoMatch(f"the residual is {dtype(node)} but its sum is read rounded to {wanted}", node)


def _inexpressible(after: After, first: AllReduce) -> NoMatch | None:
    """Why the op cannot stand for ``after``, or None."""
    total, activation = after.residual_sum.place, dtype(first.input)
    if (stop := _inexpressible_addends(after, activation)) is not None:
        return stop
    if after.residual is not None:
        return None
    if not after.merged and not after.replicated and _norm_comes_first(after.norm):
        return NoMatch("the norm comes before the residual add", after.norm.output)
    if after.residual_dtype != activation:
        return NoMatch(f"the sum is {after.residual_dtype}: expected {activation}", total)
    return None


def _inexpressible_addends(after: After, activation: torch.dtype) -> NoMatch | None:
    for addend in after.replicated:
        found = dtype(strip_casts(addend.node))
        if found != activation:
            what = f"what is added after the reduction is {found}: expected {activation}"
            return NoMatch(what, addend.node)
        changed = addend.scaled or len(after.replicated) > 1
        if changed and addend.dtype != activation:
            return NoMatch(f"addends are scaled or summed in {addend.dtype}", addend.node)
    return None
