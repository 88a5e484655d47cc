"""A graph as text, one node a line, the same on every run: for reports and snapshot tests.

``name: bf16[16, 64] = target(args)``, floats at six digits, symbols renumbered in order of
appearance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
}
_NAMESPACES = (("prims.convert_element_type", "cvt"), ("_c10d_functional.", "c10d."), ("aten.", ""))
_SYMBOL = re.compile(r"\b(?:s|u|zf)\d+\b")


@dataclass(frozen=True)
class NodeText:
    """One node of a selection, for a drawing of it.

    Attributes:
        name: the node's name.
        value: the dtype and shape of what it computes, or ``""``.
        target: the short name of what it calls; for an input of the graph ``"placeholder"``.
        text: the line that ``render`` writes for it.
        inputs: the names of the nodes that it reads.
        outside: it is not in the selection, but read by a node in it.
        leaves: it is in the selection and read by a node that is not.
    """

    name: str
    value: str
    target: str
    text: str
    inputs: tuple[str, ...] = ()
    outside: bool = False
    leaves: bool = False


def render(graph: Graph, nodes: Iterable[Node] | None = None) -> str:
    """The graph, or only ``nodes`` of it in the graph's order, one line each."""
    chosen = None if nodes is None else set(nodes)
    lines = [_line(node) for node in graph.nodes if chosen is None or node in chosen]
    return _renumber("\n".join(lines), {})


def node_texts(graph: Graph, nodes: Iterable[Node]) -> tuple[NodeText, ...]:
    """``nodes`` in the graph's order, then the nodes outside that they read."""
    chosen = set(nodes)
    inside = [node for node in graph.nodes if node in chosen]
    outside = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in chosen)
    symbols: dict[str, str] = {}
    return tuple(_node_text(node, chosen, symbols) for node in (*inside, *outside))


def _node_text(node: Node, chosen: set[Node], symbols: dict[str, str]) -> NodeText:
    inside = node in chosen
    text = _renumber(_line(node), symbols)
    inputs = tuple(_renumber(n.name, symbols) for n in node.all_input_nodes) if inside else ()
    return NodeText(
        name=_renumber(node.name, symbols),
        value=_renumber(_value(node.meta.get("val")), symbols),
        target="placeholder" if node.op == "placeholder" else target_name(node),
        text=text,
        inputs=inputs,
        outside=not inside,
        leaves=inside and any(user not in chosen for user in node.users),
    )


def _line(node: Node) -> str:
    value = _value(node.meta.get("val"))
    head = f"{node.name}: {value}" if value else node.name
    if node.op == "placeholder":
        return f"{head} = placeholder"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    return f"{head} = {target_name(node)}({', '.join(arguments)})"


def target_name(node: Node) -> str:
    """The short name of what ``node`` calls."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__name__", node.target))
    name = str(node.target).removesuffix(".default")
    for prefix, short in _NAMESPACES:
        name = name.replace(prefix, short, 1) if name.startswith(prefix) else name
    return name


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(item) for item in value)})"
    return "" if value is None else str(value)


def _argument(value: object) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    return str(value)


def _renumber(text: str, names: dict[str, str]) -> str:
    return _SYMBOL.sub(lambda match: names.setdefault(match[0], f"s{len(names)}"), text)
