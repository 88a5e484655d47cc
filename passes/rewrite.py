"""Rewrites a matched tail into one call of the op and erases what it replaced.

Matches ``finalize -> add shared -> all_reduce -> add residual -> rms_norm`` and rewrites it to::

    norm_out, residual_out = moe_fusion::finalize_allreduce_rms_norm(...)

at the place of the residual sum, the first node at which every operand exists; where a custom op
adds the residual, that is the custom op. Readers of the residual sum and of the norm's output read
the op's outputs, in the shapes that those had.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import partial

from torch import Tensor
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from moe_fusion.op import OP, OP_EPS_TENSOR, fake_outputs
from moe_fusion.operands import check_operands
from moe_fusion.passes.addends import Addend
from moe_fusion.passes.emit import Emitter
from moe_fusion.passes.emit_routing import emit_routing
from moe_fusion.passes.nodes import NoMatch, arg, aten, calls, shape, strip_casts
from moe_fusion.passes.tail import Tail


def rewrite(graph: Graph, tail: Tail) -> Node | NoMatch:
    """Put the op in the place of ``tail``.

    Returns:
        The op's node, or why the op does not take the operands; the graph is then as it was.
    """
    after = tail.after
    place, total, output = after.residual_sum.place, after.residual_sum.node, after.norm.output
    with graph.inserting_before(place):
        emit = Emitter(graph, place, output.meta["val"].fake_mode)
        try:
            call = _emit_call(emit, tail)
            readers = () if total is None else tuple(total.users)
            views = _sized_before(place, (place, *after.interior, *readers))
            norm_out, residual_out = (emit.call(operator.getitem, call, index) for index in (0, 1))
            norm_out = emit.shaped(norm_out, emit.sizes(shape(output), tail.kept, views))
            sizes = tuple(after.residual_sum.value.shape)
            residual_out = emit.shaped(residual_out, emit.sizes(sizes, tail.kept, views))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            emit.undo()
            return NoMatch(f"the op does not take these operands: {error}", place)
    late = [n for n in (after.norm.weight, after.norm.eps) if isinstance(n, Node) and place < n]
    own = {*tail.interior, *after.ends}
    output.replace_all_uses_with(norm_out)
    if total is not None:
        total.replace_all_uses_with(residual_out, delete_user_cb=lambda user: user not in own)
    _erase(graph, own)
    if late:
        stable_topological_sort(graph)
    return call


def _sized_before(place: Node, views: Iterable[Node]) -> list[Node]:
    """The ``views`` whose size arguments exist at ``place``."""
    return [
        view
        for view in views
        if calls(view, aten.reshape.default)
        and all(size < place for size in arg(view, 1) if isinstance(size, Node))
    ]


def _emit_call(emit: Emitter, tail: Tail) -> Node:
    after = tail.after
    residual = after.residual
    routed, weights, index, shared = _emit_partial(emit, tail)
    replicated = emit.total([_emit_addend(emit, addend) for addend in after.replicated])
    if replicated is not None and len(shape(replicated)) == 1:
        num_tokens = emit.size(routed if weights is None else weights, 0)
        replicated = emit.call(aten.expand.default, replicated, [num_tokens, -1])
    scale = emit.product(after.tensor_scales)
    norm_weight = after.norm.weight
    if norm_weight is not None and len(shape(norm_weight)) != 1:
        norm_weight = emit.reshape(norm_weight, -1)
    return emit.call(
        OP_EPS_TENSOR if isinstance(after.norm.eps, Node) else OP,
        routed,
        weights,
        index,
        shared,
        replicated,
        None if residual is None else emit.cast(emit.rows(residual), after.residual_dtype),
        norm_weight,
        after.norm.eps,
        after.norm.weight_bias,
        tail.partials[0].scale,
        after.output_scale,
        tail.anchor.group,
        *(() if scale is None else (scale,)),
        fake=partial(_fake_outputs, tail),
    )


def _emit_addend(emit: Emitter, addend: Addend) -> tuple[Node, float, tuple[Node, ...]]:
    """What is added after the reduction, [T, H] or a vector of H, and its factors."""
    source = strip_casts(addend.node)
    node = emit.reshape(source, -1) if addend.is_vector else emit.rows(source)
    return node, addend.scale, addend.tensor_scales


def _fake_outputs(tail: Tail, *operands: object) -> tuple[Tensor, Tensor]:
    """The op's outputs as fake tensors: those of the nodes it replaces, where they are the same.

    To make new ones is a quarter of the cost of the whole pass.
    """
    values = [tail.after.norm.output.meta["val"], tail.after.residual_sum.value]
    if any(value.dim() != 2 or not isinstance(tail.num_tokens, int) for value in values):
        return fake_outputs(*operands)
    if not all(value.is_contiguous() for value in values):
        return fake_outputs(*operands)
    check_operands(*operands)
    return values[0], values[1]


def _emit_partial(emit: Emitter, tail: Tail) -> tuple[Node, Node | None, Node | None, Node | None]:
    """The op's first four operands: rows, weights, map, and the other addends of the partial."""
    first, *others = tail.partials
    shared = [(emit.rows(s.node), s.scale, s.tensor_scales) for s in first.shared]
    shared += [(emit.rows(p.routed), p.scale, p.tensor_scales) for p in others]
    if first.finalize is None:
        return emit.rows(first.routed), None, None, emit.total(shared)
    weights, index = emit_routing(emit, first.finalize, first.tensor_scales, first.tensor_divisors)
    rows = emit.columns(first.finalize.rows, tail.hidden_dim)
    return rows, weights, index, emit.total(shared)


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase ``nodes`` that nothing reads, collectives included, and what only they read."""
    owned = set(nodes)
    pending = sorted(owned)
    while pending:
        node = pending.pop()
        if node.users or node._erased or node.op not in ("call_function", "get_attr"):
            continue
        if node not in owned and node.is_impure():
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        pending.extend(sorted(n for n in inputs if not n.users and n not in pending))
        pending.sort()
