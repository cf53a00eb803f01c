"""Copies of graphs, node for node, to try something on."""

from __future__ import annotations

from torch import fx


def copy_nodes(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy whose nodes have the names and the metadata of the original, and what each node's copy is."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda n: nodes[n])
        nodes[node].name = node.name
    return copy, nodes
