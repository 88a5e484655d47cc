"""Places of a drawing's boxes: apart from each other and below what they read, in any graph."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fusion.cli.layout import BOX_HEIGHT, GAP_X, MARGIN, lay_out


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    widths = {f"n{i}": draw(st.floats(10, 200)) for i in range(count)}
    inputs = {
        f"n{i}": draw(
            st.lists(st.sampled_from([f"n{j}" for j in range(i)]), unique=True, max_size=4)
        )
        for i in range(1, count)
    }
    return widths, inputs


@given(graphs())
@settings(deadline=None)
def test_boxes_are_apart_inside_and_below_what_they_read(graph):
    widths, inputs = graph
    layout = lay_out(widths, inputs)
    assert set(layout.boxes) == set(widths)
    assert set(layout.edges) == {(i, name) for name, read in inputs.items() for i in read}
    rows = {}
    for name, (x, y) in layout.boxes.items():
        assert x >= MARGIN - 1e-6
        assert x + widths[name] <= layout.width - MARGIN + 1e-6
        assert MARGIN <= y <= layout.height - BOX_HEIGHT - MARGIN + 1e-6
        rows.setdefault(y, []).append((x, x + widths[name]))
    for row in rows.values():
        for (_, end), (start, _) in pairwise(sorted(row)):
            assert start - end >= GAP_X - 1e-6
    for (source, reader), points in layout.edges.items():
        assert layout.boxes[source][1] + BOX_HEIGHT == points[0][1]
        assert layout.boxes[reader][1] == points[-1][1]
        heights = [y for _, y in points]
        assert heights == sorted(heights)
        assert points[0][1] < points[-1][1]
        for edge_x, y in points[1:-1]:  # where it passes a row it passes no box
            boxes = [box for top in (y, y - BOX_HEIGHT) for box in rows.get(top, ())]
            assert all(not start < edge_x < end for start, end in boxes)


def test_a_chain_is_straight_and_a_late_input_stands_beside_its_reader():
    layout = lay_out(
        {"a": 40.0, "b": 60.0, "c": 40.0, "weight": 40.0},
        {"b": ["a"], "c": ["b", "weight"], "weight": ["not drawn"]},
    )
    assert layout.boxes["a"][1] < layout.boxes["b"][1] == layout.boxes["weight"][1]
    assert layout.boxes["a"][0] + 20 == layout.boxes["b"][0] + 30
    assert lay_out({}, {}).boxes == {}
