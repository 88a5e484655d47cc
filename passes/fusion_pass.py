"""The pass object that torch.compile runs: match, guard, rewrite, report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from functools import cache
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

import moe_fusion
from moe_fusion.admission import Refusal
from moe_fusion.config import FusionConfig
from moe_fusion.errors import UnfusedTailError
from moe_fusion.passes.collectives import AllReduce, all_reduce_nodes, match_all_reduce
from moe_fusion.passes.custom_ops import registrations
from moe_fusion.passes.guards import has_backward, refuse
from moe_fusion.passes.nodes import NoMatch, dtype
from moe_fusion.passes.partial import match_partial
from moe_fusion.passes.render import render
from moe_fusion.passes.report import FusionReport, Site, describe_left, describe_tail
from moe_fusion.passes.rewrite import rewrite
from moe_fusion.passes.tail import Tail, match_tail
from moe_fusion.topology import known_groups, resolve_group

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
        self.config = FusionConfig() if config is None else config
        self.render = render
        self.served = served
        self.report = FusionReport()

    def __call__(self, graph: Graph) -> None:
        """Rewrite ``graph`` in place; a graph with no tail that may be fused is left untouched.

        Raises:
            UnfusedTailError: in strict mode, for a refused tail whose partial has a finalize in it.
        """
        report = self.report
        anchors = all_reduce_nodes(graph)
        index, report.graphs = report.graphs, report.graphs + 1
        fused_before, left_before = report.fused, len(report.left)
        backward = (
            NoMatch("the graph has a backward: inference only") if has_backward(graph) else None
        )
        for node in anchors:
            if not node._erased:
                self._visit(graph, node, index, backward)
        remaining = len(all_reduce_nodes(graph))
        report.all_reduces_before += len(anchors)
        report.all_reduces_after += remaining
        if report.fused > fused_before:
            graph.lint()
        reasons = dict.fromkeys(left.reason for left in report.left[left_before:])
        logger.info(
            "graph %d: fused %d tails, all_reduces %d -> %d%s",
            index,
            report.fused - fused_before,
            len(anchors),
            remaining,
            "".join(f"; left: {reason}" for reason in reasons),
        )

    def _visit(self, graph: Graph, node: Node, index: int, backward: NoMatch | None) -> None:
        match = backward or match_tail(node)
        refusal: NoMatch | Refusal | None
        refusal = match if isinstance(match, NoMatch) else refuse(match, self.config, self.served)
        if refusal is None:
            assert isinstance(match, Tail)
            refusal = self._fuse(graph, match, index)
        if refusal is not None:
            self._refuse(node, index, refusal)

    def _fuse(self, graph: Graph, tail: Tail, index: int) -> NoMatch | None:
        facts = describe_tail(tail, index, resolve_group(tail.anchor.group).size())
        before = render(graph, tail.nodes) if self.render else ""
        known = set(graph.nodes) if self.render else set()
        call = rewrite(graph, tail)
        if isinstance(call, NoMatch):
            return call
        after = render(graph, [n for n in graph.nodes if n not in known]) if self.render else ""
        self.report.sites.append(Site(**facts, before=before, after=after))
        return None

    def _refuse(self, node: Node, index: int, refusal: NoMatch | Refusal) -> None:
        stopped_at = refusal.node if isinstance(refusal, NoMatch) else None
        left = describe_left(node, index, refusal.reason, stopped_at)
        self.report.left.append(left)
        logger.debug("%s", left)
        if self.config.strict and _ends_a_finalize(node):
            anchor = f"{node.name} ({left.source})" if left.source else node.name
            raise UnfusedTailError(anchor, refusal.reason)

    def uuid(self) -> bytes:
        """Identifies the pass in compile-cache keys: another answer here means another graph.

        Covers the package's sources, the versions of torch and triton, the whole configuration, the
        names and sizes of this process's groups, and the registered ops.
        """
        facts = (
            self.config,
            sorted((name, group.size()) for name, group in known_groups().items()),
            registrations(),
        )
        return hashlib.sha256(_sources_hash() + repr(facts).encode()).digest()


def _ends_a_finalize(node: Node) -> bool:
    reduction = match_all_reduce(node)
    if not isinstance(reduction, AllReduce):
        return False
    return match_partial(reduction.input, dtype(reduction.input)).finalize is not None


@cache
def _sources_hash() -> bytes:
    digest = hashlib.sha256(torch.__version__.encode())
    try:
        digest.update(importlib.metadata.version("triton").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"no triton")
    root = Path(moe_fusion.__file__).parent
    # passes/ is reached through a symlink in a checkout, which rglob does not follow.
    for folder in (root, root / "passes"):
        for path in sorted(folder.resolve().rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()
