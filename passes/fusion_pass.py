"""The pass object that torch.compile runs: match, guard, rewrite, report."""

from __future__ import annotations

import logging

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from moe_fusion.admission import Refusal
from moe_fusion.config import FusionConfig
from moe_fusion.errors import UnfusedTailError
from moe_fusion.op import OP, OP_EPS_TENSOR
from moe_fusion.passes.assertions import erase_assertions
from moe_fusion.passes.collectives import all_reduce_nodes
from moe_fusion.passes.guards import disagreements, refuse, refuse_graph
from moe_fusion.passes.identity import answer_early, cache_key
from moe_fusion.passes.nodes import NoMatch, dtype, has_value
from moe_fusion.passes.partial import match_partial
from moe_fusion.passes.render import node_texts
from moe_fusion.passes.report import (
    FusionReport,
    Left,
    Site,
    counted,
    describe_left,
    describe_tail,
)
from moe_fusion.passes.rewrite import rewrite
from moe_fusion.passes.surroundings import surroundings
from moe_fusion.passes.tail import Tail, match_tail
from moe_fusion.topology import resolve_group

logger = logging.getLogger("moe_fusion")


class MoEFusionPass(CustomGraphPass):
    """Matches the tails of un-reduced layers and rewrites each to one call of the fused op.

    Runs as ``post_grad_custom_pre_pass``; ``moe_fusion.install`` and ``moe_fusion.fusing`` put it
    there, or pass it to ``torch.compile(..., options={"post_grad_custom_pre_pass":
    MoEFusionPass()})``.

    Args:
        config: what to fuse; None takes the environment and the defaults.
        render: keep the text of the graph around each tail, before and after, in the report.
        served: the numbers of tokens that the graphs serve, for a compiler that drops guards. No
            guard is recorded then: where the range crosses the token ceiling, the op chooses its
            path in each call.

    Raises:
        ConfigError: the environment has a wrong or unknown ``MOE_FUSION_*`` variable.
        TypeError: ``config`` is something else.

    Attributes:
        report: what the pass has done so far.
        served: as above; may be set before each call.
    """

    def __init__(
        self,
        config: FusionConfig | None = None,
        *,
        render: bool = False,
        served: range | None = None,
    ) -> None:
        if not isinstance(config, FusionConfig | None):
            raise TypeError(f"config: expected a FusionConfig or None, got {type(config).__name__}")
        self.config = FusionConfig() if config is None else config
        self.render = render
        self.served = served
        self.report = FusionReport()
        answer_early(self.config)

    def __call__(self, graph: Graph) -> None:
        """Rewrite ``graph`` in place; a graph with no tail that may be fused is left untouched.

        Raises:
            UnfusedTailError: in strict mode, for a refused tail whose partial has a finalize in it.
        """
        report = self.report
        anchors = all_reduce_nodes(graph)
        index, report.graphs = report.graphs, report.graphs + 1
        fused_before = report.fused
        refused = refuse_graph(graph)
        disagreed = {} if refused else disagreements(anchors, self.config)
        if anchors:
            erase_assertions(graph)
        report.called += sum(node.target in (OP, OP_EPS_TENSOR) for node in graph.nodes)
        refusals: dict[Node, Left] = {}
        for order, node in enumerate(anchors):
            if not node._erased:
                left = self._visit(graph, node, (index, order), refused, disagreed)
                refusals |= {} if left is None else {node: left}
        # One that was refused may have become a part of a tail since.
        remaining = [(node, left) for node, left in refusals.items() if not node._erased]
        for node, left in remaining:
            self._refuse(node, left)
        report.all_reduces_before += len(anchors)
        report.all_reduces_after += len(all_reduce_nodes(graph))
        if report.fused > fused_before:
            graph.lint()
        reasons = dict.fromkeys(left.reason for _, left in remaining)
        logger.info(
            "graph %d: fused %s, all_reduces %d -> %d%s",
            index,
            counted(report.fused - fused_before, "tail"),
            len(anchors),
            len(all_reduce_nodes(graph)),
            "".join(f"; left: {reason}" for reason in reasons),
        )

    def _visit(
        self,
        graph: Graph,
        node: Node,
        where: tuple[int, int],
        refused: NoMatch | None,
        disagreed: dict[str, Refusal],
    ) -> Left | None:
        """Fuse the tail of ``node``, or say why not."""
        match = refused or match_tail(node)
        refusal: NoMatch | Refusal | None
        if isinstance(match, NoMatch):
            refusal = match
        else:
            refusal = refuse(match, self.config, disagreed, self.served)
        if refusal is None:
            assert isinstance(match, Tail)
            refusal = self._fuse(graph, match, where)
        if refusal is None:
            return None
        stopped_at = refusal.node if isinstance(refusal, NoMatch) else None
        nodes = node_texts(graph, surroundings(node, stopped_at)) if self.render else ()
        return describe_left(node, where, refusal.reason, stopped_at, nodes)

    def _fuse(self, graph: Graph, tail: Tail, where: tuple[int, int]) -> NoMatch | None:
        facts = describe_tail(tail, where, resolve_group(tail.anchor.group).size())
        before = node_texts(graph, tail.nodes) if self.render else ()
        known = set(graph.nodes) if self.render else set()
        call = rewrite(graph, tail)
        if isinstance(call, NoMatch):
            return call
        new = (node for node in graph.nodes if node not in known)
        after = node_texts(graph, new) if self.render else ()
        self.report.sites.append(Site(**facts, nodes_before=before, nodes_after=after))
        return None

    def _refuse(self, node: Node, left: Left) -> None:
        self.report.left.append(left)
        logger.debug("%s", left)
        if self.config.strict and _ends_a_finalize(node):
            anchor = f"{node.name} ({left.source})" if left.source else node.name
            raise UnfusedTailError(anchor, left.reason)

    def uuid(self) -> bytes | None:
        """Identifies the pass in compile-cache keys: another answer here means another graph.

        Covers the package's sources, the versions of torch and triton, the whole configuration, the
        sizes that are served, the registered ops, and of each of this process's groups the name,
        the topology and whether its ranks agree. None, so that nothing is cached, while that is not
        known of a group: the pass then runs, and waits for the ranks of the tails that it finds.
        """
        return cache_key(self.config, self.served)


def _ends_a_finalize(node: Node) -> bool:
    """Whether a MoE producer's finalize is in what ``node``, an all_reduce of any kind, reduces."""
    reduced = [value for value in node.all_input_nodes if has_value(value)]
    return any(match_partial(value, dtype(value)).finalize is not None for value in reduced)
