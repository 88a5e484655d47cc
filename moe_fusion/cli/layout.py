"""Where the nodes of a small graph go in a drawing: layers from top to bottom.

Each node is below all that it reads. An edge that passes a layer gets a place in it, so that it
goes around the boxes there. Places within a layer follow the mean place of the neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Point = tuple[float, float]

GAP_X = 18.0
LAYER_HEIGHT = 66.0
BOX_HEIGHT = 42.0
MARGIN = 10.0
SWEEPS = 8
# Source: pixels and sweeps at which the tails of the demo's models read well.


@dataclass
class _Slot:
    """A box, or an edge's place in a layer that it passes (width 0)."""

    width: float
    layer: int
    above: list[_Slot] = field(default_factory=list)
    below: list[_Slot] = field(default_factory=list)
    x: float = 0.0


@dataclass(frozen=True)
class Layout:
    """A drawing's geometry, in pixels.

    Attributes:
        width: of the drawing.
        height: of the drawing.
        boxes: the left upper corner of each node's box, by name.
        edges: for each pair (read, reader) the points that the line passes, from the box of the one
            to the box of the other; between two points of one height it is a curve.
    """

    width: float
    height: float
    boxes: Mapping[str, Point]
    edges: Mapping[tuple[str, str], tuple[Point, ...]]


def lay_out(widths: Mapping[str, float], inputs: Mapping[str, Sequence[str]]) -> Layout:
    """Place the nodes of a directed acyclic graph.

    Args:
        widths: the width of each node's box in pixels, by name.
        inputs: what each node reads, by name; names without a width are ignored.

    Returns:
        Boxes that do not overlap, each below all that it reads.
    """
    reads = {name: [i for i in inputs.get(name, ()) if i in widths] for name in widths}
    slots = {n: _Slot(widths[n], layer) for n, layer in _layers(reads).items()}
    chains = {
        (source, reader): _chain(slots[source], slots[reader])
        for reader, sources in reads.items()
        for source in sources
    }
    depth = 1 + max((slot.layer for slot in slots.values()), default=-1)
    rows: list[list[_Slot]] = [[] for _ in range(depth)]
    for slot in (*slots.values(), *(s for chain in chains.values() for s in chain[1:-1])):
        rows[slot.layer].append(slot)
    _order(rows)
    _place(rows)
    left = min((s.x - s.width / 2 for row in rows for s in row), default=0.0) - MARGIN
    right = max((s.x + s.width / 2 for row in rows for s in row), default=0.0) + MARGIN
    return Layout(
        width=right - left,
        height=len(rows) * LAYER_HEIGHT - (LAYER_HEIGHT - BOX_HEIGHT) + 2 * MARGIN,
        boxes={n: (s.x - s.width / 2 - left, _top(s)) for n, s in slots.items()},
        edges={pair: _points(chain, left) for pair, chain in chains.items()},
    )


def _layers(reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Each node's longest way from the top; what reads nothing stands just above its reader."""
    layers: dict[str, int] = {}
    pending = list(reads)
    while pending:
        ready = [n for n in pending if all(i in layers for i in reads[n])]
        assert ready, "the graph has a cycle"
        layers |= {n: 1 + max((layers[i] for i in reads[n]), default=-1) for n in ready}
        pending = [n for n in pending if n not in layers]
    for name, sources in reads.items():
        readers = [layers[n] for n, read in reads.items() if name in read]
        if not sources and readers:
            layers[name] = min(readers) - 1
    return layers


def _chain(source: _Slot, reader: _Slot) -> list[_Slot]:
    """The slots that an edge passes, linked."""
    between = [_Slot(0.0, layer) for layer in range(source.layer + 1, reader.layer)]
    chain = [source, *between, reader]
    for upper, lower in pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _order(rows: list[list[_Slot]]) -> None:
    """Sort each row by the mean place of its neighbours, down and up in turn."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            place = {id(slot): index for each in rows for index, slot in enumerate(each)}
            means = {}
            for slot in row:
                near = (slot.above if down else slot.below) or [slot]
                means[id(slot)] = sum(place[id(n)] / len(rows[n.layer]) for n in near) / len(near)
            row.sort(key=lambda slot: means[id(slot)])


def _place(rows: list[list[_Slot]]) -> None:
    """Give each slot its x: near its neighbours', without overlaps."""
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = []
            for slot in row:
                near = (slot.above if down else slot.below) or [slot]
                wanted.append(sum(n.x for n in near) / len(near))
            _spread(row, wanted)


def _spread(row: list[_Slot], wanted: list[float]) -> None:
    """The mean of pushing overlaps to the right and of pushing them to the left."""
    gaps = [GAP_X + (a.width + b.width) / 2 for a, b in pairwise(row)]
    right, left = list(wanted), list(wanted)
    for i, gap in enumerate(gaps):
        right[i + 1] = max(right[i + 1], right[i] + gap)
    for i, gap in reversed(list(enumerate(gaps))):
        left[i] = min(left[i], left[i + 1] - gap)
    for slot, high, low in zip(row, right, left, strict=True):
        slot.x = (high + low) / 2


def _top(slot: _Slot) -> float:
    return MARGIN + slot.layer * LAYER_HEIGHT


def _points(chain: list[_Slot], left: float) -> tuple[Point, ...]:
    points = [(chain[0].x - left, _top(chain[0]) + BOX_HEIGHT)]
    for slot in chain[1:-1]:
        points += [(slot.x - left, _top(slot)), (slot.x - left, _top(slot) + BOX_HEIGHT)]
    return (*points, (chain[-1].x - left, _top(chain[-1])))
