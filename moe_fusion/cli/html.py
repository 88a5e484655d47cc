"""What ``explain`` found, as one page that needs nothing else: ``explain --html report.html``.

All text of the page that comes from the model is escaped by Jinja, and the page's own policy lets
nothing run or load but the style and the script that it holds.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_fusion.cli.layout import BOX_HEIGHT, Point, lay_out
from moe_fusion.cli.outcome import Outcome
from moe_fusion.errors import MoEFusionError

TEMPLATES = Path(__file__).parent / "templates"
CHARACTER_WIDTH = 6.7
# Source: pixels of one character of a 11 px monospace font, rounded up.
BOX_PADDING = 20.0
LABEL_MAX_CHARACTERS = 44
FACTS = {
    "tokens T": "num_tokens",
    "hidden size H": "hidden_dim",
    "top-k K": "top_k",
    "dtype": "dtype",
    "finalize": "finalize",
    "shared expert": "shared",
    "norm": "norm",
    "residual": "residual",
    "group": "group",
    "ranks": "world_size",
}


def check_path(path: Path) -> None:
    """Check where the page shall go, before the work is done.

    Raises:
        MoEFusionError: no file can be there.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise MoEFusionError(f"--html: expected a file name in an existing folder, got {path}")


def write_page(outcome: Outcome, path: Path) -> None:
    """Write the page.

    Raises:
        MoEFusionError: the file cannot be written.
    """
    text = page(outcome)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoEFusionError(f"--html: expected a writable file, got {error}") from error


def page(outcome: Outcome) -> str:
    """The page's text; the outcome's report must hold the nodes around each all_reduce."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    style = (TEMPLATES / "explain.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "explain.js").read_text(encoding="utf-8")
    report = outcome.report
    return environment.get_template("explain.html.jinja").render(
        outcome=outcome,
        report=report,
        entries=_entries(report),
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        style_hash=_policy_hash(style),
        script_hash=_policy_hash(script),
        version=importlib.metadata.version("moe-fusion"),
        torch_version=torch.__version__,
    )


def _policy_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _entries(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each tail and each all_reduce that was left, in the order of the graphs."""
    fused = [
        {
            **site,
            "fused": True,
            "facts": {name: site[key] for name, key in FACTS.items() if site[key] is not None},
            "drawings": [
                draw("before", site["nodes_before"]),
                draw("after", site["nodes_after"]),
            ],
        }
        for site in report["sites"]
    ]
    left = [
        {
            **left,
            "fused": False,
            "facts": {},
            "drawings": [draw("around it, unchanged", left["nodes"], left["node"])],
        }
        for left in report["left"]
    ]
    entries = sorted(fused + left, key=lambda entry: (entry["graph"], entry["order"]))
    # a tail with a finalize shows most
    first = next((e for e in entries if e.get("top_k")), entries[0] if entries else None)
    first_left = next((e for e in entries if not e["fused"]), None)
    return [{**e, "open": e is first or e is first_left} for e in entries]


@dataclass(frozen=True)
class Box:
    """One node of a drawing: where it is, in pixels, and what it says.

    Attributes:
        kind: ``"op"``, ``"collective"``, ``"other"``, ``"input"`` or ``"stop"``, for its style.
        leaves: nodes outside of the drawing read it.
        lines: two lines of text.
        text: the node in full.
    """

    x: float
    y: float
    width: float
    kind: str
    leaves: bool
    lines: tuple[str, str]
    text: str


@dataclass(frozen=True)
class Drawing:
    """One graph: its caption, its geometry in pixels, and the same graph as text."""

    caption: str
    width: float
    height: float
    boxes: tuple[Box, ...]
    paths: tuple[str, ...]
    text: str

    @property
    def box_height(self) -> float:
        """The height of each box in pixels."""
        return BOX_HEIGHT

    @property
    def summary(self) -> str:
        """What the drawing shows, in a sentence, for who does not see it."""
        ops = [box for box in self.boxes if box.kind != "input"]
        collectives = sum(box.kind == "collective" for box in ops)
        return (
            f"The graph {self.caption}: {len(ops)} operations, {collectives} of them collective; "
            "the same as text follows"
        )


def draw(caption: str, nodes: Sequence[Mapping[str, Any]], stopped_at: str = "") -> Drawing:
    """A drawing of the nodes of a report.

    Args:
        caption: what it shows.
        nodes: :class:`~moe_fusion.passes.render.NodeText` as dicts.
        stopped_at: the ``name = target`` of the node that stopped the match.
    """
    lines = {node["name"]: _label(node) for node in nodes}
    widths = {
        name: CHARACTER_WIDTH * max(len(line) for line in both) + BOX_PADDING
        for name, both in lines.items()
    }
    layout = lay_out(widths, {node["name"]: node["inputs"] for node in nodes})
    stopped = stopped_at.split(" = ", maxsplit=1)[0]
    boxes = []
    for node in nodes:
        x, y = layout.boxes[node["name"]]
        boxes.append(
            Box(
                x=round(x, 1),
                y=round(y, 1),
                width=round(widths[node["name"]], 1),
                kind="stop" if node["name"] == stopped else _kind(node),
                leaves=node["leaves"],
                lines=lines[node["name"]],
                text=node["text"],
            )
        )
    return Drawing(
        caption=caption,
        width=round(layout.width, 1),
        height=round(layout.height, 1),
        boxes=tuple(boxes),
        paths=tuple(_path(points) for points in layout.edges.values()),
        text="\n".join(node["text"] for node in nodes if not node["outside"]),
    )


def _label(node: Mapping[str, Any]) -> tuple[str, str]:
    first = node["name"] if node["outside"] else node["target"]
    return _shortened(first), _shortened(node["value"])


def _shortened(text: str) -> str:
    most = LABEL_MAX_CHARACTERS
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _kind(node: Mapping[str, Any]) -> str:
    if node["outside"]:
        return "input"
    if node["target"].startswith("moe_fusion."):
        return "op"
    return "collective" if node["target"].startswith("c10d.") else "other"


def _path(points: Sequence[Point]) -> str:
    """An SVG path: curves between layers, straight lines through the layers that it passes."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for index, (next_x, next_y) in enumerate(rest):
        middle = (y + next_y) / 2
        curve = f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        parts.append(f"V{next_y:.1f}" if index % 2 else curve)
        x, y = next_x, next_y
    return "".join(parts)
