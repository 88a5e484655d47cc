"""What ``moe-fusion bench`` found: results, the table, the JSON, and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_fusion.cli.bench_cases import Case
from moe_fusion.errors import BenchError

FUSED, ONE_SHOT, TWO_SHOT = "fused", "one_shot", "two_shot"
ALONE = "inductor_alone"  # one rank on the whole device: no alternative where ranks share it
NEVER_TOKENS = 1 << 30  # of the launch table: a number of tokens that no batch has


@dataclass(frozen=True)
class Timing:
    """One variant of one case.

    Attributes:
        us: microseconds a call, the median, the same inputs in each call.
        cold_us: likewise, inputs rotated past the L2; None where that was not measured.
        error: the largest relative error of an output of a timed call against the fp64 oracle.
        bound: what the error may be.
    """

    us: float
    cold_us: float | None
    error: float
    bound: float

    @property
    def wrong(self) -> str | None:
        """Why the figures do not count, or None."""
        if self.error <= self.bound:  # not so for NaN
            return None
        return f"wrong: error {self.error:.2e}, expected at most {self.bound:.2e}"


@dataclass(frozen=True)
class Result:
    """All variants of one case, by name.

    Attributes:
        case: what was measured.
        two_shot: the fused kernel's variant in ``timings["fused"]``.
        launch_us: microseconds of an empty kernel's launch in the same graphs.
        byte_us: microseconds to move the least number of bytes.
        timings: the variants.
    """

    case: Case
    two_shot: bool
    launch_us: float
    byte_us: float
    timings: Mapping[str, Timing]

    @property
    def floor_us(self) -> float:
        """Launch and bytes, one after the other."""
        return self.launch_us + self.byte_us

    def figure_us(self, variant: str) -> float | None:
        """A variant's microseconds a call; None where its result was wrong or it was not run."""
        timing = self.timings.get(variant)
        return None if timing is None or timing.wrong else timing.us

    def over_floor(self, variant: str) -> float | None:
        """A variant's time over the floor."""
        figure = self.figure_us(variant)
        return None if figure is None else figure / self.floor_us

    @property
    def wrong(self) -> list[str]:
        """What is wrong, by variant."""
        return [f"{name}: {t.wrong}" for name, t in self.timings.items() if t.wrong]

    def as_dict(self) -> dict[str, Any]:
        """Plain values; a wrong variant has its error and no figure."""
        timings = {
            name: {
                "error": None if math.isnan(timing.error) else timing.error,
                "bound": timing.bound,
                **({"wrong": timing.wrong} if timing.wrong else self._figures(name, timing)),
            }
            for name, timing in self.timings.items()
        }
        return {
            **asdict(self.case),
            "two_shot": self.two_shot,
            "launch_us": self.launch_us,
            "byte_us": self.byte_us,
            "floor_us": self.floor_us,
            "timings": timings,
        }

    def _figures(self, name: str, timing: Timing) -> dict[str, Any]:
        return {"us": timing.us, "cold_us": timing.cold_us, "over_floor": self.over_floor(name)}


@dataclass(frozen=True)
class Run:
    """One run of the command: where and how it was made, and its results."""

    environment: Mapping[str, Any]
    results: Sequence[Result] = field(default_factory=list)

    @property
    def variants(self) -> list[str]:
        """Names of variants in the order in which they were first measured."""
        return list(dict.fromkeys(name for result in self.results for name in result.timings))

    def as_json(self) -> str:
        """One JSON object, which :func:`read_run` takes."""
        cases = [result.as_dict() for result in self.results]
        found = {"environment": dict(self.environment), "cases": cases}
        found["ceilings"] = [asdict(ceiling) for ceiling in ceilings(self.results)]
        return json.dumps(found, indent=2)


def read_run(text: str, name: str) -> Run:
    """The run that :meth:`Run.as_json` wrote.

    Raises:
        BenchError: ``text`` is nothing of that kind; ``name`` says where it is from.
    """
    try:
        found = json.loads(text)
        return Run(found["environment"], [_read_result(entry) for entry in found["cases"]])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BenchError(
            f"{name}: expected what moe-fusion bench --json wrote, "
            f"got {type(error).__name__}: {error}"
        ) from None


def _read_result(entry: dict[str, Any]) -> Result:
    case = Case(**{name: entry[name] for name in Case.__dataclass_fields__})

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    timings = {
        name: Timing(number(t.get("us")), t.get("cold_us"), number(t["error"]), t["bound"])
        for name, t in entry["timings"].items()
    }
    return Result(case, entry["two_shot"], entry["launch_us"], entry["byte_us"], timings)


def header(variants: Iterable[str]) -> str:
    """The table's head: a column of hot and one of cold microseconds for each variant."""
    columns = "".join(f"  {name:>16} {'cold':>7}" for name in variants)
    return f"  W    T      H   K dtype{columns}   floor  x floor    error"


def row(result: Result, variants: Sequence[str]) -> str:
    """One line of the table; a variant whose result was wrong has no figure."""
    case = result.case
    place = f"{case.world_size:3} {case.num_tokens:4} {case.hidden_dim:6} {case.top_k:3}"
    columns = "".join(_columns(result.timings.get(name)) for name in variants)
    first = variants[0]
    over = result.over_floor(first)
    ratio = f"{'-':>8}" if over is None else f"{over:8.2f}"
    line = f"{place} {case.dtype:>5}{columns} {result.floor_us:7.2f} {ratio}"
    line += f" {result.timings[first].error:8.1e}"
    return "\n".join([line, *(f"    {text}" for text in result.wrong)])


def _columns(timing: Timing | None) -> str:
    if timing is None or timing.wrong:
        return f"  {'-' if timing is None else 'wrong':>16} {'-':>7}"
    cold = f"{'-':>7}" if timing.cold_us is None else f"{timing.cold_us:7.2f}"
    return f"  {timing.us:16.2f} {cold}"


@dataclass(frozen=True)
class Ceiling:
    """Up to how many tokens the fused path is the fastest.

    Attributes:
        world_size: W.
        hidden_dim: H.
        dtype: of activations.
        tokens: the largest measured T up to which it won at every measured T and K; 0 for none.
        open_end: it won at the largest measured T too.
    """

    world_size: int
    hidden_dim: int
    dtype: str
    tokens: int
    open_end: bool


def ceilings(results: Iterable[Result]) -> list[Ceiling]:
    """A ceiling for each (W, H, dtype) in which the fused path and an alternative were measured."""
    wins: dict[tuple[int, int, str], dict[int, bool]] = {}
    for result in results:
        won = _fused_wins(result)
        if won is not None:
            case = result.case
            by_tokens = wins.setdefault((case.world_size, case.hidden_dim, case.dtype), {})
            by_tokens[case.num_tokens] = won and by_tokens.get(case.num_tokens, True)
    found = []
    for key, by_tokens in wins.items():
        lost = [tokens for tokens, won in by_tokens.items() if not won]
        below = [tokens for tokens in by_tokens if not lost or tokens < min(lost)]
        found.append(Ceiling(*key, max(below, default=0), open_end=not lost))
    return found


def _fused_wins(result: Result) -> bool | None:
    """Whether it beats every alternative of the run; None where none was measured."""
    others = [name for name in result.timings if name not in (FUSED, ALONE, ONE_SHOT, TWO_SHOT)]
    figures = [figure for name in others if (figure := result.figure_us(name)) is not None]
    if FUSED not in result.timings or not figures:
        return None
    own = result.figure_us(FUSED)
    return own is not None and own < min(figures)


def ceilings_text(found: Iterable[Ceiling]) -> str:
    """The suggestion, one line for each (W, H, dtype)."""
    lines = ["Fused is the fastest of this run up to (tokens):"]
    for one in found:
        end = " or more: the largest measured" if one.open_end else ""
        lines.append(
            f"  W {one.world_size}, H {one.hidden_dim}, {one.dtype}: {one.tokens}{end}",
        )
    return "\n".join(lines)


def two_shot_table(results: Iterable[Result]) -> str:
    """``TWO_SHOT_FROM_TOKENS`` of moe_fusion/kernels/launch.py as Python text.

    Two-shot is taken from the smallest measured T from which it won at every larger one, in every
    H, K and dtype that was measured.
    """
    wins: dict[int, dict[int, bool]] = {}
    for result in results:
        one, two = result.figure_us(ONE_SHOT), result.figure_us(TWO_SHOT)
        if one is None or two is None:
            continue
        by_tokens = wins.setdefault(result.case.world_size, {})
        tokens = result.case.num_tokens
        by_tokens[tokens] = two < one and by_tokens.get(tokens, True)
    entries = [f"{world_size}: {_from_tokens(wins[world_size])}" for world_size in sorted(wins)]
    return f"TWO_SHOT_FROM_TOKENS = {{{', '.join(entries)}}}"


def _from_tokens(wins: Mapping[int, bool]) -> str:
    lost = max((tokens for tokens, won in wins.items() if not won), default=0)
    above = [tokens for tokens in wins if tokens > lost]
    never = f"1 << {NEVER_TOKENS.bit_length() - 1}"
    return str(min(above)) if above else never
