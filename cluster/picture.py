"""A ClusterShape as a table to read."""

from __future__ import annotations

from cluster.shape import ClusterShape, NodeType


def describe_shape(shape: ClusterShape) -> str:
    """Node types in rows: how many, what GPUs, how fast the links, what price."""
    rows: list[tuple[str, ...]] = [("node type", "nodes", "GPUs", "CPUs", "memory", "within", "across", "$/hour")]
    rows += [_row(kind) for kind in shape.types]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    most = shape.max_workers if shape.max_workers is not None else sum(t.max_nodes for t in shape.workers)
    head = f"{shape.name} ({shape.provider}): up to {shape.max_gpus} GPUs, the head and at most {most} workers"
    return "\n".join([head, "", *lines, "", "links: one direction, within a node per GPU, across nodes per node"])


def _row(kind: NodeType) -> tuple[str, ...]:
    nodes = str(kind.min_nodes) if kind.min_nodes == kind.max_nodes else f"{kind.min_nodes} to {kind.max_nodes}"
    name = f"{kind.name} (spot)" if kind.spot else kind.name
    return (
        name,
        nodes,
        f"{kind.gpus} x {kind.gpu or 'GPU'}" if kind.gpus else "none",
        f"{kind.cpus:g}",
        f"{kind.memory_bytes / 1e9:,.0f} GB" if kind.memory_bytes else "?",
        _rate(kind.link_within),
        _rate(kind.link_across),
        f"{kind.price_per_hour:.2f}" if kind.price_per_hour is not None else "?",
    )


def _rate(value: float | None) -> str:
    return f"{value / 1e9:,.4g} GB/s" if value else "?"
