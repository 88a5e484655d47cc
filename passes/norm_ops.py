"""RMSNorms that are one op of another library, registered by :mod:`moe_fusion.passes.custom_ops`.

Matches ``norm(x, weight, eps)`` and ``add_norm(x, residual, weight, eps)``, functional or inside
the wrapper that functionalization puts around an op that overwrites its arguments.
"""

from __future__ import annotations

from math import prod

from torch.fx import Node

from moe_fusion.passes.custom_ops import NormOp, norm_op
from moe_fusion.passes.nodes import NoMatch, describe, has_value, num_rows, same, shape
from moe_fusion.passes.norm_parts import Added, Norm, ResidualSum, as_eps, as_weight, same_rows
from moe_fusion.passes.op_calls import OpCall, read_call


def registered_norm(residual_sum: Node) -> Norm | NoMatch | None:
    """Matches a call of a registered op that normalises ``residual_sum``, or adds to it first."""
    for rows in same_rows(residual_sum):
        for user in rows.users:
            known = norm_op(user)
            if known is None or (known.residual is not None and rows is not residual_sum):
                continue
            call = read_call(user)
            if isinstance(call, NoMatch):
                return call
            if rows in (call.arguments[known.input], call.arguments.get(known.residual or "")):
                return _norm_of_op(known, call, rows)
    return None


def _norm_of_op(known: NormOp, call: OpCall, rows: Node) -> Norm | NoMatch:
    name = describe(call.node)
    eps = as_eps(call.arguments[known.eps])
    if eps is None:
        found = call.arguments[known.eps]
        return NoMatch(f"{name}'s eps is {found}: expected a constant", call.node)
    for argument, value in known.requires:
        if call.arguments[argument] != value:
            found = call.arguments[argument]
            return NoMatch(f"{name}'s {argument} is {found}: expected {value}", call.node)
    given = None if known.weight is None else call.arguments[known.weight]
    weight = None if given is None else as_weight(given, shape(rows)[-1])
    if given is not None and weight is None:
        return NoMatch(f"{name}'s weight is not one row", call.node)
    vector, bias = (None, 0.0) if weight is None else (weight[0], weight[1] + known.weight_bias)
    output = call.result(known.norm_result)
    if output is None:
        return NoMatch(f"nothing reads the rows that {name} normalises", call.node)
    added = None if known.residual is None else _added(known, call, rows)
    if isinstance(added, NoMatch):
        return added
    interior = () if output is call.node else (*call.sizes, call.node)
    return Norm(name, output, vector, bias, eps, interior, added)


def _added(known: NormOp, call: OpCall, rows: Node) -> Added | NoMatch:
    """What the op adds to ``rows``, whichever of its two addends these are."""
    assert known.residual is not None
    assert known.sum_result is not None
    name = describe(call.node)
    pair = (call.arguments[known.input], call.arguments[known.residual])
    addend = pair[0] if rows is pair[1] else pair[1]
    if not has_value(addend) or addend is rows:
        return NoMatch(f"{name} is called without a residual of its own", call.node)
    total = call.value(known.sum_result)
    for size in (shape(addend), tuple(total.shape)):
        if not (same(prod(size[:-1]), num_rows(rows)) and same(size[-1], shape(rows)[-1])):
            return NoMatch(f"{name} adds rows of other shapes", call.node)
    return Added(addend, ResidualSum(call.node, call.result(known.sum_result), total))
