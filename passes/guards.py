"""Whether a matched tail may be fused: what all ranks share decides, so all ranks agree.

A reason against is a :class:`~moe_fusion.admission.Refusal`. A new limit goes into
:mod:`moe_fusion.limits` and :mod:`moe_fusion.admission`, not here: this module only finds out what
the graph and the shape environment say.
"""

from __future__ import annotations

from torch import SymInt
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    StrictMinMaxConstraint,
    free_unbacked_symbols,
    guard_or_false,
    statically_known_true,
)

from moe_fusion import limits
from moe_fusion.admission import Refusal, admit, over_ceiling, token_ceiling
from moe_fusion.config import FusionConfig
from moe_fusion.passes import identity
from moe_fusion.passes.collectives import AllReduce, match_all_reduce
from moe_fusion.passes.nodes import NoMatch, Size
from moe_fusion.passes.tail import Tail
from moe_fusion.topology import known_groups, probe, resolve_group


def has_backward(graph: Graph) -> bool:
    """Whether the graph is the forward or backward half of a training step.

    AOTAutograd names the inputs of such graphs ``primals_*`` and ``tangents_*``, those of an
    inference graph ``arg*``; Inductor itself tells them apart in this way.
    """
    return any(
        node.op == "placeholder" and str(node.target).startswith(("primals_", "tangents_"))
        for node in graph.nodes
    )


def refuse_graph(graph: Graph) -> NoMatch | None:
    """Why no tail of ``graph`` may be fused, whatever it looks like, or None."""
    if has_backward(graph):
        return NoMatch("the graph has a backward: inference only")
    if V.aot_compilation:
        return NoMatch(
            "the graph is compiled ahead of time (AOTInductor): its package runs without Python, "
            "which the op needs"
        )
    return None


def disagreements(anchors: list[Node], config: FusionConfig) -> dict[str, Refusal]:
    """Why the ranks of a group do not agree, by the group's name; those that agree are left out.

    Asks for every group that sums something in the graph, also where this rank would refuse: its
    peers are told, and do not wait for it.
    """
    found: dict[str, Refusal] = {}
    groups = known_groups()
    matches = [match for node in anchors if isinstance(match := match_all_reduce(node), AllReduce)]
    for name in dict.fromkeys(match.group for match in matches):
        group = groups.get(name)
        if group is not None and group.size() in limits.FUSED_WORLD_SIZES:
            reason = identity.verdict(config, group).reason
            if reason is not None:
                found[name] = Refusal(f"the ranks disagree: {reason}")
    return found


def refuse(
    tail: Tail,
    config: FusionConfig,
    disagreed: dict[str, Refusal],
    served: range | None = None,
) -> Refusal | None:
    """The reason why ``tail`` may not be fused, or None; may record a guard on T.

    Args:
        tail: what was matched.
        config: the configuration.
        disagreed: groups whose ranks do not agree, by name.
        served: the sizes of a symbolic T that the graph serves; with it no guard is recorded.
    """
    if tail.anchor.group in disagreed:
        return disagreed[tail.anchor.group]
    if tail.kind not in config.fuse:
        return Refusal(f"the configuration does not fuse {tail.kind} tails: fuse={config.fuse}")
    try:
        group = resolve_group(tail.anchor.group)
    except ValueError as error:
        return Refusal(str(error))
    device_type = tail.anchor.input.meta["val"].device.type
    topology = probe(group, device_type)
    refusal = admit(tail.hidden_dim, tail.dtype, topology, top_k=tail.top_k)
    if refusal is not None:
        return refusal
    ceiling = token_ceiling(tail.hidden_dim, tail.dtype, topology, config)
    return (
        None
        if under_ceiling(tail.num_tokens, ceiling, served)
        else over_ceiling(tail.num_tokens, ceiling)
    )


def under_ceiling(num_tokens: Size, ceiling: int, served: range | None = None) -> bool:
    """Whether this graph only ever sees batches that the op may take.

    A symbolic size is decided by a guard, never by its hint: the graph for small batches is fused,
    a larger batch compiles once more, unfused, and both stay cached. Where there can be no guard
    the op is used for every size, and chooses its path in each call. So it does where the compiler
    keeps no guards and says which sizes it ``served`` instead, if the smallest is under the
    ceiling.
    """
    if ceiling == 0 or not isinstance(num_tokens, SymInt):
        return ceiling > 0 and num_tokens <= ceiling
    if statically_known_true(num_tokens <= ceiling):
        return True
    if statically_known_true(num_tokens > ceiling):
        return False
    if served is not None:
        return _serves_few(num_tokens, ceiling, served)
    if not guardable(num_tokens):
        return True
    return bool(guard_or_false(num_tokens <= ceiling))


def _serves_few(num_tokens: SymInt, ceiling: int, served: range) -> bool:
    """Whether some of the ``served`` sizes are under the ceiling, as far as is known.

    They are sizes of one symbol; what else is computed from it is not looked into.
    """
    return not num_tokens.node.expr.is_symbol or served.start <= ceiling


def guardable(size: SymInt) -> bool:
    """Whether a guard may be recorded on ``size``.

    Not where ``mark_dynamic(..., min=, max=)`` declared a range, which the guard would contradict
    (``ConstraintViolationError``); not on an unbacked size; and not where the user gave a hint of
    his own (``hint_override``), since torch evaluates guards with it instead of the real size.
    """
    shape_env = size.node.shape_env
    symbols = size.node.expr.free_symbols
    hinted = getattr(shape_env, "var_to_hint_override", {})
    special = {*_declared_symbols(shape_env), *hinted, *free_unbacked_symbols(size)}
    return not symbols & special


def _declared_symbols(shape_env: ShapeEnv) -> set[object]:
    declared: set[object] = set()
    for tracked in shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for dim, constraint in enumerate(constraints):
            if isinstance(constraint, StrictMinMaxConstraint):
                size = tracked.fake.shape[dim]
                if isinstance(size, SymInt):
                    declared |= size.node.expr.free_symbols
    return declared
