"""Erases what would stand between the parts of a tail and does nothing.

Matches ``aten._assert_tensor_metadata(x, ...)``, which ``torch.export`` puts behind every
conversion, and erases it. Tracing has settled what it asserts; Inductor erases all of them too, but
only after this pass, for which they are readers of the tail's inside.
"""

from __future__ import annotations

from torch.fx import Graph

from moe_fusion.passes.nodes import aten


def erase_assertions(graph: Graph) -> None:
    """Erase the graph's assertions of a dtype, a device or a layout."""
    target = aten._assert_tensor_metadata.default
    for node in graph.find_nodes(op="call_function", target=target):
        graph.erase_node(node)
