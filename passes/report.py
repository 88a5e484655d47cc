"""What the pass did: fused tails, and every all_reduce that it left alone with the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Node

from moe_fusion.passes.nodes import describe
from moe_fusion.passes.render import NodeText
from moe_fusion.passes.tail import Tail


@dataclass(frozen=True)
class Site:
    """One fused tail.

    Attributes:
        anchor: the name of the all_reduce that it was found at.
        graph: which of the compiled graphs it is in, from 0.
        num_tokens: T, a number or an expression of symbols.
        hidden_dim: H, elements in a row.
        top_k: K, or None when no finalize was fused.
        dtype: the activation dtype.
        finalize: ``"permuted rows"``, ``"token-major rows"`` or ``"finalized"`` ([T, H] as they
            were).
        shared: where the shared expert or another addend came in: ``"none"``, ``"before the
            all_reduce"``, ``"its own all_reduce"``, ``"after the all_reduce"``, or several.
        norm: the spelling of the RMSNorm.
        residual: the residual's dtype, or ``"none"``.
        group: the process group's name.
        world_size: W, ranks in the group.
        source: the line of the model that wrote the residual sum, or ``""``.
        order: which of the graph's all_reduces it is, from 0.
        module: the module that the all_reduce is in, by its path in the model, or ``""``.
        norm_module: the module that the RMSNorm is in, or ``""``.
        nodes_before: the tail's nodes before the rewrite, when they were asked for.
        nodes_after: what took their place.
    """

    anchor: str
    graph: int
    num_tokens: str
    hidden_dim: int
    top_k: int | None
    dtype: str
    finalize: str
    shared: str
    norm: str
    residual: str
    group: str
    world_size: int
    source: str
    order: int
    module: str
    norm_module: str
    nodes_before: tuple[NodeText, ...] = ()
    nodes_after: tuple[NodeText, ...] = ()

    @property
    def before(self) -> str:
        """The graph around the tail before the rewrite, one node a line, when it was asked for."""
        return text_of(self.nodes_before)

    @property
    def after(self) -> str:
        """The same after it."""
        return text_of(self.nodes_after)

    def __str__(self) -> str:
        """One line."""
        experts = "" if self.top_k is None else f", top-{self.top_k}"
        return (
            f"{self.anchor}: {self.finalize} [{self.num_tokens}, {self.hidden_dim}] {self.dtype}"
            f"{experts}; shared: {self.shared}; norm: {self.norm}; residual: {self.residual}; "
            f"group {self.group} of {self.world_size}"
        )


@dataclass(frozen=True)
class Left:
    """One all_reduce that was left alone.

    Attributes:
        anchor: the name of the all_reduce.
        graph: which of the compiled graphs it is in, from 0.
        reason: one sentence.
        node: the node that stopped the match, ``name = target``, or ``""`` where a guard refused.
        source: the line of the model that wrote that node, else the all_reduce, or ``""``.
        order: which of the graph's all_reduces it is, from 0.
        module: the module that the all_reduce is in, by its path in the model, or ``""``.
        nodes: the graph around the all_reduce, when it was asked for.
    """

    anchor: str
    graph: int
    reason: str
    node: str
    source: str
    order: int
    module: str
    nodes: tuple[NodeText, ...] = ()

    def __str__(self) -> str:
        """One line."""
        stopped = f"; stopped at {self.node}" if self.node else ""
        where = f" ({self.source})" if self.source else ""
        return f"{self.anchor}: {self.reason}{stopped}{where}"


@dataclass
class FusionReport:
    """What happened in every graph that the pass saw.

    A graph that is served from a compile cache does not reach the pass and is not counted.

    Attributes:
        sites: the fused tails.
        left: the all_reduces that were left alone.
        graphs: how many graphs the pass saw.
        all_reduces_before: all_reduces in them before the pass.
        all_reduces_after: all_reduces left after it.
        called: tails that the model closed itself, by ``finalize_allreduce_rms_norm``.
    """

    sites: list[Site] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    graphs: int = 0
    all_reduces_before: int = 0
    all_reduces_after: int = 0
    called: int = 0

    @property
    def fused(self) -> int:
        """How many tails were fused."""
        return len(self.sites)

    @property
    def refusals(self) -> Counter[str]:
        """How many all_reduces were left alone, by reason."""
        return Counter(left.reason for left in self.left)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return {
            "graphs": self.graphs,
            "all_reduces_before": self.all_reduces_before,
            "all_reduces_after": self.all_reduces_after,
            "called": self.called,
            "fused": self.fused,
            "sites": [asdict(site) for site in self.sites],
            "refusals": dict(self.refusals),
            "left": [asdict(left) for left in self.left],
        }

    def __str__(self) -> str:
        """The whole report, one line for each all_reduce."""
        if not self.graphs:
            return (
                "moe-fusion: no graph reached the pass; one that comes from the compile cache does "
                "not (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles anew)"
            )
        change = f"all_reduces {self.all_reduces_before} -> {self.all_reduces_after}"
        tails, graphs = counted(self.fused, "tail"), counted(self.graphs, "graph")
        lines = [f"moe-fusion: fused {tails} in {graphs}, {change}"]
        if self.called:
            lines[0] += f"; {counted(self.called, 'tail')} closed by the model itself"
        lines += [f"  fused {site}" for site in self.sites]
        lines += [f"  left {left}" for left in self.left]
        return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """``1 tail``, ``2 tails``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def text_of(nodes: Iterable[NodeText]) -> str:
    """The nodes of a selection as text, one line each."""
    return "\n".join(node.text for node in nodes if not node.outside)


def describe_tail(tail: Tail, where: tuple[int, int], world_size: int) -> dict[str, Any]:
    """The fields of a :class:`Site`, read from the match before it is rewritten.

    ``where`` is the tail's graph and the order of its all_reduce there.
    """
    after = tail.after
    return {
        "anchor": tail.anchor.node.name,
        "graph": where[0],
        "num_tokens": str(tail.num_tokens),
        "hidden_dim": tail.hidden_dim,
        "top_k": tail.top_k,
        "dtype": _dtype_name(tail.dtype),
        "finalize": _finalize_form(tail),
        "shared": _shared_form(tail),
        "norm": after.norm.form,
        "residual": "none" if after.residual is None else _dtype_name(after.residual_dtype),
        "group": tail.anchor.group,
        "world_size": world_size,
        "source": source_line(after.residual_sum.place),
        "order": where[1],
        "module": module_path(tail.anchor.node),
        "norm_module": module_path(after.norm.output),
    }


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _finalize_form(tail: Tail) -> str:
    finalize = tail.partials[0].finalize
    if finalize is None:
        return "finalized"
    return "token-major rows" if finalize.index is None else "permuted rows"


def _shared_form(tail: Tail) -> str:
    forms = {
        "before the all_reduce": tail.partials[0].shared,
        "its own all_reduce": tail.all_reduces[1:],
        "after the all_reduce": tail.after.replicated,
    }
    return " and ".join(form for form, found in forms.items() if found) or "none"


_LIBRARIES = ("/torch/distributed/", "/torch/_dynamo/", "/torch/nn/", "/torch/_inductor/")


def source_line(node: Node) -> str:
    """The innermost line of the model's own code in the node's stack trace, or ``""``."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in frames if line.startswith("File ")]
    own = [line for line in frames if not any(part in line for part in _LIBRARIES)]
    if not (own or frames):
        return ""
    path, line, *_ = (own or frames)[-1].removeprefix("File ").split(",")
    return f"{path.strip(chr(34))}:{line.removeprefix(' line ')}"


_ROOT = re.compile(r"^L\['\w+'\]\.?")  # how Dynamo names what was compiled


def module_path(node: Node) -> str:
    """The path of the innermost module whose forward made the node, or ``""``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _ROOT.sub("", str(stack[-1][0])) if stack else ""


def describe_left(
    anchor: Node,
    where: tuple[int, int],
    reason: str,
    stopped_at: Node | None,
    nodes: tuple[NodeText, ...],
) -> Left:
    """The record of an all_reduce that stays; ``where`` is its graph and its order there."""
    node = "" if stopped_at is None else f"{stopped_at.name} = {describe(stopped_at)}"
    source = (stopped_at is not None and source_line(stopped_at)) or source_line(anchor)
    return Left(
        anchor=anchor.name,
        graph=where[0],
        reason=reason,
        node=node,
        source=source,
        order=where[1],
        module=module_path(anchor),
        nodes=nodes,
    )
