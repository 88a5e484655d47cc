"""What a command found, as text for people and as one JSON object for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

GRAPHS = ("nodes_before", "nodes_after")
TEXTS = (*GRAPHS, "nodes")  # for reading


@dataclass(frozen=True)
class Outcome:
    """One run of ``demo`` or ``explain``.

    Attributes:
        model: the model's name.
        world_size: W, ranks in the tensor-parallel group.
        report: ``FusionReport.as_dict()`` of rank 0.
        report_text: the same report as ``str()`` prints it.
        seconds: what took how long, in seconds; nested by what was timed.
        max_abs_diff: the largest difference in logits; None where nothing was run.
    """

    model: str
    world_size: int
    report: dict[str, Any]
    report_text: str
    seconds: dict[str, Any]
    max_abs_diff: float | None = None

    def as_json(self) -> str:
        """One JSON object; the graphs around each all_reduce are left out."""
        return json.dumps(
            {
                "world_size": self.world_size,
                "model": self.model,
                "all_reduces_before": self.report["all_reduces_before"],
                "all_reduces_after": self.report["all_reduces_after"],
                "tails": _facts(self.report["sites"]),
                "fused": self.report["fused"],
                "left": _facts(self.report["left"]),
                "refusals": self.report["refusals"],
                "called": self.report["called"],
                "graphs": self.report["graphs"],
                "max_abs_diff": self.max_abs_diff,
                "seconds": self.seconds,
            }
        )

    def as_text(self) -> str:
        """The report, the graph around one tail before and after, the difference and the times."""
        parts = [f"{self.model}, tensor parallel over {self.world_size} ranks", self.report_text]
        rendered = [site for site in self.report["sites"] if site["nodes_before"]]
        # a tail with a finalize shows most
        shown = next((site for site in rendered if site["top_k"]), next(iter(rendered), None))
        if shown is not None:
            before, after = (
                "\n".join(node["text"] for node in shown[key] if not node["outside"])
                for key in GRAPHS
            )
            parts.append(f"The graph around {shown['anchor']}, before:\n{before}")
            parts.append(f"After:\n{after}")
        if self.max_abs_diff is not None:
            parts.append(f"Largest difference in logits: {self.max_abs_diff:.3g}")
        parts.append(_times(self.seconds))
        if self.max_abs_diff is not None:
            parts.append(
                "The second compile reuses the kernels that both have in common. On a CPU the op "
                "is its reference in plain torch: step times there say nothing about a GPU."
            )
        return "\n\n".join(part.strip("\n") for part in parts)


def _facts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key not in TEXTS} for one in entries]


def _times(seconds: dict[str, Any]) -> str:
    lines = []
    for name, value in seconds.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key} {_duration(part)}" for key, part in value.items())
            lines.append(f"{name}: {inner}")
        else:
            lines.append(f"{name}: {_duration(value)}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
