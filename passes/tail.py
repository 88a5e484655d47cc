"""One whole tail, matched: from the partial through the all_reduce to the norm.

Nothing is changed here. A match is a :class:`Tail`; anything else is a :class:`NoMatch` with a
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from moe_fusion.passes.addends import Addend, opened
from moe_fusion.passes.after import After, match_after
from moe_fusion.passes.collectives import AllReduce, is_reduced, match_all_reduce, reduced_by
from moe_fusion.passes.nodes import (
    NoMatch,
    Size,
    aten,
    calls,
    contiguous,
    describe,
    dtype,
    is_widening,
    num_rows,
    shape,
)
from moe_fusion.passes.partial import Partial, match_partial


@dataclass(frozen=True)
class Tail:
    """A tail that the op can express.

    Attributes:
        all_reduces: the reductions it takes the place of; the first gives ``partials[0]``.
        partials: what each of them sends.
        after: what happens to their sum.
    """

    all_reduces: tuple[AllReduce, ...]
    partials: tuple[Partial, ...]
    after: After

    @property
    def anchor(self) -> AllReduce:
        """The all_reduce that names the tail."""
        return self.all_reduces[0]

    @property
    def num_tokens(self) -> Size:
        """T."""
        return num_rows(self.anchor.input)

    @property
    def hidden_dim(self) -> int:
        """H."""
        size = shape(self.anchor.input)[-1]
        assert isinstance(size, int)
        return size

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        return dtype(self.anchor.input)

    @property
    def kind(self) -> str:
        """``"unfinalized"`` with a finalize in it, else ``"finalized"``."""
        return "unfinalized" if self.top_k is not None else "finalized"

    @property
    def top_k(self) -> int | None:
        """K, or None without a finalize."""
        finalize = self.partials[0].finalize
        return None if finalize is None else finalize.top_k

    @property
    def kept(self) -> tuple[Node, ...]:
        """The tensors of T * H elements that the op reads."""
        after = self.after
        residual = () if after.residual is None else (after.residual,)
        sent = tuple(p.routed for p in self.partials if p.finalize is None)
        shared = tuple(s.node for partial in self.partials for s in partial.shared)
        return (*residual, *(addend.node for addend in after.replicated), *sent, *shared)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that the op takes the place of, and the conversions in between."""
        ends = self.after.ends
        widened = tuple(user for end in ends for user in end.users if is_widening(user))
        return (*self.interior, *ends, *widened)

    @property
    def interior(self) -> tuple[Node, ...]:
        """Every node whose value nothing else may read."""
        collectives = tuple(n for ar in self.all_reduces for n in ar.nodes)
        sent = tuple(n for partial in self.partials for n in partial.interior)
        return (*sent, *collectives, *self.after.interior, *self.after.norm.interior)


RESTRIDED = "original_output_strides"  # Inductor's: a whole graph's outputs get these back


def match_tail(node: Node) -> Tail | NoMatch:
    """The tail around the all_reduce ``node``, or why there is none."""
    tail = _match(node)
    return tail if isinstance(tail, NoMatch) else _yields(tail) or tail


def _match(node: Node) -> Tail | NoMatch:
    first = match_all_reduce(node)
    if isinstance(first, NoMatch):
        return first
    sizes = shape(first.input)
    if not sizes:
        return NoMatch("the all_reduce is of a single number: expected rows, [T, H]", node)
    if not isinstance(sizes[-1], int):
        return NoMatch("the hidden size is symbolic: expected a constant", node)
    after = match_after(first)
    if isinstance(after, NoMatch):
        return after
    tail = _sent(first, after)
    return _check(tail) or tail


def _sent(first: AllReduce, after: After) -> Tail:
    """The tail with what each reduction sends.

    The op has one finalize: the reduction that has it comes first, the others are addends, taken as
    they are. Where their sums' scales differ, the partials take them: that of the first one rounds
    nothing.
    """
    sums = [(first, after.output_scale), *((m.all_reduce, m.scale) for m in after.merged)]
    if any(scale != after.output_scale for _, scale in sums):
        after = replace(after, output_scale=1.0)
    else:
        sums = [(all_reduce, 1.0) for all_reduce, _ in sums]
    partials = [match_partial(ar.input, dtype(ar.input)) for ar, _ in sums]
    order = sorted(
        range(len(sums)),
        key=lambda place: (partials[place].finalize is None, abs(sums[place][1]) == 1.0),
    )
    (leader, scale), *others = (sums[place] for place in order)
    sent = [Partial(all_reduce.input, scale=factor) for all_reduce, factor in others]
    routed = partials[order[0]].scaled(scale)
    read = {*(each.routed for each in sent), *(each.node for each in routed.shared)}
    if read & {*routed.interior}:  # an addend is what the finalize gives: it is made in any case
        routed = Partial(leader.input, scale=scale)
    return Tail(
        (leader, *(all_reduce for all_reduce, _ in others)),
        (routed, *sent),
        after,
    )


def _yields(tail: Tail) -> NoMatch | None:
    """Leaves the norm to another all_reduce of the same sum, if only that one has a finalize."""
    if tail.partials[0].finalize is not None:
        return None
    after = tail.after
    addends = [Addend(node, dtype(node)) for node in (after.residual,) if node is not None]
    for part in (part for addend in (*after.replicated, *addends) for part in opened(addend)[0]):
        other = reduced_by(part.node)
        better = None if other is None else _match(other.node)  # which does not yield in turn
        if isinstance(better, Tail) and better.top_k is not None:
            return NoMatch(
                "another all_reduce of the same sum has the finalize", better.anchor.node
            )
    return None


def _check(tail: Tail) -> NoMatch | None:
    """What the op cannot express, or what would change something that is read elsewhere."""
    after = tail.after
    for partial in tail.partials:
        if is_reduced(partial.routed):
            return NoMatch("two all_reduces are chained", partial.routed)
    for name, node in (("weight", after.norm.weight), ("eps", after.norm.eps)):
        if isinstance(node, Node) and _depends_on(node, after.residual_sum.place):
            return NoMatch(f"the norm's {name} is computed from the sum", node)
    for node in after.ends:
        if (reader := _strided_reader(node)) is None:
            continue
        if reader.op == "output":
            return NoMatch("a branch returns what is not contiguous, and keeps its strides", reader)
        return NoMatch("as_strided reads the memory of the sum or of the norm's output", reader)
    return _read_elsewhere(tail)


def _strided_reader(node: Node) -> Node | None:
    """What depends on the strides of ``node``, or has its own from them: the op's are contiguous.

    That is an ``as_strided``, or the end of a graph whose outputs Inductor does not restride, as it
    does those of a whole graph: one of a ``torch.cond``, whose branches have to agree.
    """
    value = node.meta["val"]
    if contiguous(tuple(value.shape), value.stride()):
        return None
    pending, seen = [node], set[Node]()
    while pending:
        for user in pending.pop().users:
            if calls(user, aten.as_strided.default):
                return user
            if user.op == "output" and RESTRIDED not in user.meta:
                return user
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return None


def _read_elsewhere(tail: Tail) -> NoMatch | None:
    ends = set(tail.after.ends)
    own = {*tail.interior, *ends}
    for node in sorted(own - ends):
        reader = next((user for user in node.users if user not in own), None)
        if reader is not None:
            what = f"{describe(node)} ({node.name}) is also read by {describe(reader)}"
            return NoMatch(f"an intermediate is read elsewhere: {what}", node)
    return None


def _depends_on(node: Node, ancestor: Node) -> bool:
    """Whether ``node`` is computed from ``ancestor``."""
    pending, seen = [node], set[Node]()
    while pending:
        current = pending.pop()
        if current is ancestor:
            return True
        # What comes before the ancestor in the graph cannot depend on it.
        if current not in seen and ancestor < current:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False
