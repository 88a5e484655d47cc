"""The plot of a run: latency against T, and time over the floor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_fusion.cli.bench_results import Result, Run
from moe_fusion.errors import BenchError, MissingBenchExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "os^D"
WIDTH_INCHES, HEIGHT_INCHES = 15.0, 6.0
DOTS_PER_INCH = 130


def require_matplotlib() -> Any:
    """The module ``matplotlib.figure``.

    Raises:
        MissingBenchExtraError: matplotlib is missing.
    """
    try:
        from matplotlib import figure
    except ImportError:
        raise MissingBenchExtraError from None
    return figure


def save_plot(run: Run, path: Path) -> None:
    """Draw the run into a file, whose kind its name decides.

    Raises:
        BenchError: no case has a figure, or the file cannot be written.
        MissingBenchExtraError: matplotlib is missing.
    """
    try:
        draw(run).savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: expected a file that can be written, got {error}") from None


def draw(run: Run) -> Figure:
    """The figure: lines of microseconds a call, one a variant of one series; bars over the floor.

    Raises:
        BenchError: no case has a figure.
        MissingBenchExtraError: matplotlib is missing.
    """
    figure: Figure = require_matplotlib().Figure(
        figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained"
    )
    left, right = figure.subplots(1, 2)
    if not any(result.figure_us(name) for result in run.results for name in run.variants):
        raise BenchError("plot: expected at least one case with a figure, got none")
    _draw_lines(left, run)
    _draw_bars(right, run)
    environment = run.environment
    figure.suptitle(
        f"{environment.get('device')}, {environment.get('mode')} ranks, "
        f"torch {environment.get('torch')}, triton {environment.get('triton')}"
    )
    return figure


def series(run: Run) -> dict[str, list[Result]]:
    """Results that differ in T only, by a label that says what all of the run do not share."""
    found: dict[str, list[Result]] = {}
    names = {"W": "world_size", "H": "hidden_dim", "K": "top_k", "": "dtype"}
    differing = {
        letter: name
        for letter, name in names.items()
        if letter == "W" or len({getattr(r.case, name) for r in run.results}) > 1
    }
    for result in run.results:
        parts = (f"{k} {getattr(result.case, name)}".strip() for k, name in differing.items())
        found.setdefault(", ".join(parts), []).append(result)
    return {k: sorted(v, key=lambda r: r.case.num_tokens) for k, v in found.items()}


def _draw_lines(axes: Any, run: Run) -> None:
    for number, (label, results) in enumerate(series(run).items()):
        for kind, variant in enumerate(run.variants):
            points = [
                (result.case.num_tokens, figure)
                for result in results
                if (figure := result.figure_us(variant)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{number % 10}",
                    linestyle=LINE_STYLES[kind % len(LINE_STYLES)],
                    marker=MARKERS[kind % len(MARKERS)],
                    label=f"{variant}, {label}",
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({result.case.num_tokens for result in run.results})
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("T, tokens")
    axes.set_ylabel("us a call")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")


def _draw_bars(axes: Any, run: Run) -> None:
    """The first variant's time over the floor, a group of bars for each T."""
    first = run.variants[0]
    tokens = sorted({result.case.num_tokens for result in run.results})
    every = series(run)
    width = 0.8 / len(every)
    for number, (label, results) in enumerate(every.items()):
        bars = [
            (tokens.index(result.case.num_tokens) + number * width, over)
            for result in results
            if (over := result.over_floor(first)) is not None
        ]
        if bars:
            axes.bar(*zip(*bars, strict=True), width, color=f"C{number % 10}", label=label)
    axes.axhline(1.0, color="black", linewidth=1)
    middle = 0.4 - width / 2
    axes.set_xticks([place + middle for place in range(len(tokens))], [str(t) for t in tokens])
    axes.set_xlabel("T, tokens")
    axes.set_ylabel(f"{first}: time over floor")
    axes.legend(fontsize="small")
