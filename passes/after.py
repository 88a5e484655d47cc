"""How the reduced sum is added: from the all_reduce down to the norm.

Matches ``view | convert | add | scale`` in any order and number between the all_reduce and the
residual sum: the node that an RMSNorm reads, or the sum that a registered op adds and normalises.
What is added last is the residual; what is added before it is added by every rank after the
reduction, so it is the op's ``replicated_output`` wherever its value came from. An addend that is
itself an all_reduce over the same group is a second partial of one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moe_fusion.passes.collectives import AllReduce, is_all_reduce, is_reduced, reduced_by
from moe_fusion.passes.nodes import (
    NoMatch,
    add_operands,
    arg,
    aten,
    describe,
    dtype,
    either_order,
    has_value,
    is_cast,
    is_reshape,
    keeps_rows,
    same_shape,
    scaled_operand,
    shape,
    sole_user,
    strip_casts,
    terms,
)
from moe_fusion.passes.norm_parts import Norm, ResidualSum
from moe_fusion.passes.norms import match_norm, reads_layer_norm


@dataclass(frozen=True)
class Addend:
    """Something added after the reduction, and the scale that multiplies it later on."""

    node: Node
    scale: float = 1.0


@dataclass(frozen=True)
class Merged:
    """Another all_reduce whose sum is added to the first one's, and the scale of its sum."""

    all_reduce: AllReduce
    scale: float


@dataclass(frozen=True)
class After:
    """What happens to the sum of one or two all_reduces up to the norm.

    Attributes:
        residual_sum: what is normalised, and where it is computed.
        norm: the RMSNorm.
        residual: what was added last, no wider than ``residual_sum``, or None.
        replicated: what else was added after the reduction.
        output_scale: multiplies the reduced sum.
        merged: other all_reduces whose sums were added to this one's.
        interior: the nodes between the all_reduces and the residual sum, without either end.
    """

    residual_sum: ResidualSum
    norm: Norm
    residual: Node | None
    replicated: tuple[Addend, ...]
    output_scale: float
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

    def multiply(self, factor: float) -> None:
        self.scale *= factor
        self.addends = [replace(addend, scale=addend.scale * factor) for addend in self.addends]

    def step(self, user: Node) -> None:
        self.interior.append(self.node)
        self.node = user


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
        names = ", ".join(sorted({describe(n) for n in readers}))
        return NoMatch(f"what the all_reduce feeds is read several times ({names})", node)
    if user.op == "output":
        return NoMatch("no RMSNorm reads the sum", node)
    reason = _WHY_NOT.get(user.target)
    if is_reshape(user):
        reason = "a view splits the rows"
    if is_all_reduce(user):
        reason = "two all_reduces are chained"
    if reason is None:
        reason = f"{describe(user)} comes between the all_reduce and the norm"
    return NoMatch(reason, user)


def _advance(path: _Path) -> NoMatch | None:
    """One step down, through the only reader."""
    node, user = path.node, sole_user(path.node)
    if user is None:
        return _why_not(node, None)
    if keeps_rows(user) or is_cast(user):
        path.step(user)
        return None
    for (operand, factor), (other, weight) in either_order(terms(user)):
        if operand is node and has_value(other) and same_shape(shape(other), shape(node)):
            path.multiply(factor)
            path.addends.append(Addend(other, weight))
            path.step(user)
            return None
    scaled = scaled_operand(user)
    if scaled is not None and scaled[0] is node:
        if path.addends and dtype(node) == torch.float16 and abs(scaled[1]) > 1.0:
            return NoMatch("a factor above 1 could overflow float16 in an addend alone", user)
        path.multiply(scaled[1])
        path.step(user)
        return None
    return _why_not(node, user)


def _split_sums(path: _Path) -> None:
    """Open the addends that are themselves a sum or a multiple of an all_reduce's sum."""
    opened: list[Addend] = []
    pending = path.addends[::-1]
    while pending:
        addend = pending.pop()
        parts = _parts(addend) if sole_user(addend.node) else []
        if parts:
            path.interior.append(addend.node)
            pending.extend(parts)
        else:
            opened.append(addend)
    path.addends = opened


def _parts(addend: Addend) -> list[Addend]:
    """The terms of a sum with a reduced sum in it, or the reduced sum that is scaled."""
    pair = add_operands(addend.node)
    if pair is not None and _opens(pair, addend.node):
        return [Addend(node, addend.scale) for node in pair]
    scaled = scaled_operand(addend.node)
    if scaled is not None and is_reduced(scaled[0]):
        return [Addend(scaled[0], addend.scale * scaled[1])]
    return []


def _opens(pair: tuple[Any, Any], total: Node) -> bool:
    """Whether ``pair``, the operands of ``total``, holds a reduced sum and broadcasts nothing."""
    whole = all(has_value(n) and same_shape(shape(n), shape(total)) for n in pair)
    return whole and any(map(is_reduced, pair))


def _merge(path: _Path, first: AllReduce) -> list[Merged]:
    """Take out the addends that are sums over the same group, whatever constant scales them."""
    merged = []
    for addend in list(path.addends):
        other = reduced_by(addend.node)
        if other is None or other.group != first.group or not _scales_fit(path, addend, first):
            continue
        nodes = _between(other, addend.node)
        # Where the graph adds the sums in fp32, to round the sum of partials is one too many.
        plain = dtype(other.input) == dtype(addend.node) == dtype(first.input)
        if nodes is not None and plain:
            merged.append(Merged(other, addend.scale))
            path.interior.extend(nodes)
            path.addends.remove(addend)
    return merged


def _scales_fit(path: _Path, addend: Addend, first: AllReduce) -> bool:
    """Whether one reduction can take both scales: if they differ, the partials are scaled.

    In fp16 a partial that is scaled up may overflow where the scaled sum does not.
    """
    if addend.scale == path.scale:
        return True
    grows = max(abs(addend.scale), abs(path.scale)) > 1.0
    return dtype(first.input) != torch.float16 or not grows


def _between(reduced: AllReduce, node: Node) -> list[Node] | None:
    """The nodes from the sum to ``node``, or None if another reader needs one of them."""
    nodes = [node]
    while nodes[-1] is not reduced.sum:
        nodes.append(arg(nodes[-1], 0))
    return nodes if all(sole_user(n) for n in nodes) else None


def _norm_comes_first(norm: Norm) -> bool:
    """Whether the norm's output is what is added to the residual."""
    readers = list(norm.output.users)
    while readers:
        user = readers.pop()
        if add_operands(user) and has_value(user):
            return True
        if keeps_rows(user) or is_cast(user):
            readers.extend(user.users)
    return False


def match_after(first: AllReduce) -> After | NoMatch:
    """From the all_reduce down to the norm."""
    path = _Path(first.sum)
    activation = dtype(first.input)
    while isinstance(norm := match_norm(path.node, activation), NoMatch):
        stop = _advance(path) if norm.node is path.node else norm
        if stop is not None:
            return stop
    total = _residual_sum(path, norm)
    _split_sums(path)
    merged = _merge(path, first)
    residual = _take_residual(path, total.value.dtype)
    if isinstance(residual, NoMatch):
        return residual
    after = After(
        total,
        norm,
        residual,
        tuple(path.addends),
        path.scale,
        tuple(merged),
        tuple(path.interior),
    )
    return _inexpressible(after, first) or after


def _residual_sum(path: _Path, norm: Norm) -> ResidualSum:
    """What ``norm`` normalises: the node that the path ends at, or what an op adds to it."""
    if norm.added is None:
        return ResidualSum(path.node, path.node, path.node.meta["val"])
    path.interior.append(path.node)
    path.addends.append(Addend(norm.added.addend))
    return norm.added.total


def _take_residual(path: _Path, wanted: torch.dtype) -> Node | NoMatch | None:
    """Take out what was added last and unscaled, in the dtype in which the sum is kept."""
    unscaled = [addend for addend in path.addends if addend.scale == 1.0]
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
    for addend in after.replicated:
        found = dtype(strip_casts(addend.node))
        if found != activation:
            what = f"what is added after the reduction is {found}: expected {activation}"
            return NoMatch(what, addend.node)
        changed = abs(addend.scale) != 1.0 or len(after.replicated) > 1
        if changed and dtype(addend.node) != activation:
            return NoMatch(f"addends are scaled or summed in {dtype(addend.node)}", addend.node)
    if after.residual is not None:
        return None
    if not after.merged and not after.replicated and _norm_comes_first(after.norm):
        return NoMatch("the norm comes before the residual add", after.norm.output)
    if after.residual_dtype != activation:
        return NoMatch(f"the sum is {after.residual_dtype}: expected {activation}", total)
    return None
