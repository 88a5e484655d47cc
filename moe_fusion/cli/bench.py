"""``moe-fusion bench``: the fused kernel beside what people would use instead, and the floor.

On one GPU the ranks are virtual: streams of this process, without links between them. Under
torchrun each rank is a process with a GPU of its own, and rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_fusion import limits
from moe_fusion.cli import bench_flashinfer
from moe_fusion.cli.bench_cases import Case, every_case
from moe_fusion.cli.bench_plot import require_matplotlib, save_plot
from moe_fusion.cli.bench_results import (
    ONE_SHOT,
    TWO_SHOT,
    Result,
    Run,
    ceilings,
    ceilings_text,
    header,
    read_run,
    row,
    two_shot_table,
)
from moe_fusion.cli.doctor import LAUNCHER_VARIABLES
from moe_fusion.cli.models import DTYPES
from moe_fusion.cli.progress import Progress
from moe_fusion.errors import BenchError

MEASURED_TERABYTES_PER_S = 4.3  # of one H200, read and write together
LEAST_REPEATS = 50
BASELINES = ("static", "dynamic", "none")
RECOMPILES_SPARE = 8

Measure = Callable[[Case], Result]


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """A parser of comma lists of whole numbers."""

    def parse(text: str) -> list[int]:
        try:
            found = [int(word) for word in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(least <= number <= most for number in found):
            expected = f"numbers from {least} to {most}, separated by commas"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return sorted(set(found))

    return parse


def names(known: Sequence[Any]) -> Callable[[str], list[Any]]:
    """A parser of comma lists of what is known."""
    by_name = {str(one): one for one in known}

    def parse(text: str) -> list[Any]:
        words = text.split(",")
        if not set(words) <= set(by_name):
            expected = f"some of {', '.join(by_name)}, separated by commas"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return [by_name[word] for word in dict.fromkeys(words)]

    return parse


def hidden_dims(text: str) -> list[int]:
    """A parser of comma lists of H."""
    found = numbers(limits.HIDDEN_DIM_MIN_ELEMENTS, limits.HIDDEN_DIM_MAX_ELEMENTS)(text)
    multiple = limits.HIDDEN_DIM_MULTIPLE_ELEMENTS
    if any(hidden_dim % multiple for hidden_dim in found):
        raise argparse.ArgumentTypeError(f"expected multiples of {multiple}, got {text!r}")
    return found


def add_parser(subparsers: Any) -> None:
    """Register ``bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="time the fused kernel beside Inductor's and the floor",
        description="Time tails on one GPU with virtual ranks, or under torchrun with real ones.",
    )
    _add_cases(parser)
    _add_methods(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results there; - is stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as out.png")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="show what --json wrote before"
    )
    parser.set_defaults(run=run)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    tokens = numbers(1, limits.TOKEN_CEILING_MAX_TOKENS)
    parser.add_argument(
        "--tokens", type=tokens, default=[1, 4, 16, 32, 64, 128], help="T (1,4,16,32,64,128)"
    )
    parser.add_argument("--hidden-dims", type=hidden_dims, default=[7168], help="H (7168)")
    top_ks = numbers(1, limits.TOP_K_MAX_EXPERTS)
    parser.add_argument("--top-ks", type=top_ks, default=[8], help="K (8)")
    parser.add_argument(
        "--world-sizes", type=names(limits.FUSED_WORLD_SIZES), help="W (2,4,8; torchrun's ranks)"
    )
    parser.add_argument("--dtypes", type=names(list(DTYPES)), default=["bf16"], help="(bf16)")


def _add_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--virtual", action="store_true", help="all ranks on one GPU (the default but in torchrun)"
    )
    parser.add_argument(
        "--tune", action="store_true", help="one-shot against two-shot; print the launch table"
    )
    parser.add_argument(
        "--baseline",
        choices=BASELINES,
        default="static",
        help="how Inductor compiles the tail beside: for each T, once for all, not (%(default)s)",
    )
    count = numbers(1, 10_000)
    parser.add_argument("--calls", type=_one(count), default=50, help="in a graph (%(default)s)")
    repeats = numbers(LEAST_REPEATS, 10_000)
    parser.add_argument("--repeats", type=_one(repeats), default=50, help="replays (%(default)s)")
    parser.add_argument("--no-cold", action="store_true", help="inputs hot in the L2 only")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=MEASURED_TERABYTES_PER_S,
        metavar="TB/S",
        help="of the device's memory, for the floor (%(default)s: one H200)",
    )


def _one(parse: Callable[[str], list[int]]) -> Callable[[str], int]:
    def parse_one(text: str) -> int:
        found = parse(text)
        if len(found) != 1:
            raise argparse.ArgumentTypeError(f"expected one number, got {text!r}")
        return found[0]

    return parse_one


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read what was measured; print, write and draw it.

    Returns:
        1 where a result was wrong, else 0.

    Raises:
        BenchError: there is no GPU, or an option does not go with this machine or another option.
        MissingBenchExtraError: a plot is wanted without matplotlib.
    """
    if not arguments.bandwidth > 0:
        raise BenchError(f"--bandwidth: expected a number above 0, got {arguments.bandwidth}")
    _check_files(arguments)
    if arguments.source is not None:
        done = _read(arguments.source)
        if arguments.json != "-":
            print(
                "\n".join([header(done.variants), *(row(r, done.variants) for r in done.results)])
            )
        return show(done, arguments)
    if not torch.cuda.is_available():
        raise BenchError("bench: expected a CUDA GPU, got none")
    done = measure(arguments)
    return show(done, arguments) if os.environ.get("RANK", "0") == "0" else exit_code(done)


def _check_files(arguments: argparse.Namespace) -> None:
    """What can be known to fail is said before minutes of measuring."""
    if arguments.plot is not None:
        require_matplotlib()
    files = {"--plot": arguments.plot, "--json": arguments.json}
    for option, name in files.items():
        if name not in (None, "-") and not Path(name).absolute().parent.is_dir():
            raise BenchError(f"{option}: expected a file in a folder that exists, got {name}")


def _read(path: Path) -> Run:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--from: expected a readable file, got {path}: {error}") from None
    return read_run(text, str(path))


def exit_code(done: Run) -> int:
    """1 where a result was wrong, else 0."""
    return int(any(result.wrong for result in done.results))


def show(done: Run, arguments: argparse.Namespace) -> int:
    """What follows from the results, which are written and drawn if asked for; the exit code."""
    if arguments.json == "-":
        print(done.as_json())
    else:
        print_conclusions(done)
    if arguments.json is not None:
        for result in done.results:
            for text in result.wrong:
                print(f"moe-fusion: {result.case}: {text}", file=sys.stderr)
        _write(done, arguments.json)
    if arguments.plot is not None:
        save_plot(done, arguments.plot)
    return exit_code(done)


def _write(done: Run, name: str) -> None:
    if name == "-":
        return
    try:
        Path(name).write_text(done.as_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json: expected a file to write, got {error}") from None


def print_conclusions(done: Run) -> None:
    """The launch table where both variants were measured, the ceilings where others were."""
    if {ONE_SHOT, TWO_SHOT} <= set(done.variants):
        print(two_shot_table(done.results))
    found = ceilings(done.results)
    if found:
        print(ceilings_text(found))


def is_launched() -> bool:
    """Whether torchrun, or another launcher like it, started this process."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


def measure(arguments: argparse.Namespace) -> Run:
    """Measure every case; print each as it is done."""
    real = is_launched() and not arguments.virtual
    if is_launched() and arguments.virtual and os.environ["WORLD_SIZE"] != "1":
        raise BenchError(f"--virtual: expected one process, got {os.environ['WORLD_SIZE']} ranks")
    cases = every_case(
        world_sizes(arguments, real=real),
        arguments.tokens,
        arguments.hidden_dims,
        arguments.top_ks,
        arguments.dtypes,
    )
    results: list[Result] = []
    printing = arguments.json != "-" and os.environ.get("RANK", "0") == "0"
    with ExitStack() as stack:
        progress = stack.enter_context(Progress())
        progress.step("Starting")
        recompiles = len(cases) + RECOMPILES_SPARE
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=recompiles))
        measure_one = stack.enter_context((_real if real else _virtual)(arguments))
        for number, case in enumerate(cases, 1):
            place = f"W {case.world_size}, T {case.num_tokens}, H {case.hidden_dim}"
            progress.step(f"Measuring {place} ({number} of {len(cases)})")
            result = measure_one(case)
            results.append(result)
            if printing:
                variants = list(result.timings)
                head = [header(variants)] if number == 1 else []
                progress.result("\n".join([*head, row(result, variants)]))
    return Run(environment(arguments, real=real), results)


def world_sizes(arguments: argparse.Namespace, *, real: bool) -> list[int]:
    """W to measure: under torchrun its number of ranks.

    Raises:
        BenchError: real ranks are fewer or more than what was asked for, or cannot be tuned.
    """
    if not real:
        return arguments.world_sizes or list(limits.FUSED_WORLD_SIZES)
    if arguments.tune:
        raise BenchError("--tune: expected virtual ranks, got torchrun; add --virtual")
    size = int(os.environ["WORLD_SIZE"])
    if size not in limits.FUSED_WORLD_SIZES:
        raise BenchError(f"ranks: expected one of {limits.FUSED_WORLD_SIZES}, got {size}")
    if arguments.world_sizes not in (None, [size]):
        asked = ",".join(map(str, arguments.world_sizes))
        raise BenchError(f"--world-sizes: expected torchrun's {size}, got {asked}")
    return [size]


@contextmanager
def _virtual(arguments: argparse.Namespace) -> Iterator[Measure]:
    from moe_fusion.cli.bench_graphs import Settings
    from moe_fusion.cli.bench_unfused import compiled
    from moe_fusion.cli.bench_virtual import VirtualBench

    settings = Settings(arguments.calls, arguments.repeats, cold=not arguments.no_cold)
    without = arguments.baseline == "none" or arguments.tune
    unfused = None if without else compiled(dynamic=arguments.baseline == "dynamic")
    bench = VirtualBench(settings, unfused, arguments.bandwidth)
    yield lambda case: bench.measure(case, tune=arguments.tune)


@contextmanager
def _real(arguments: argparse.Namespace) -> Iterator[Measure]:
    from moe_fusion.cli.bench_graphs import Settings
    from moe_fusion.cli.bench_real import RealBench, line_up, slowest, world
    from moe_fusion.cli.bench_unfused import compiled

    settings = Settings(
        arguments.calls,
        arguments.repeats,
        cold=not arguments.no_cold,
        before_replay=line_up,
        slowest=slowest,
    )
    without = arguments.baseline == "none"
    unfused = None if without else compiled(dynamic=arguments.baseline == "dynamic")
    with world() as group:
        bench = RealBench(group, settings, unfused, arguments.bandwidth, max(arguments.tokens))
        yield bench.measure


def environment(arguments: argparse.Namespace, *, real: bool) -> dict[str, Any]:
    """Where and how the run was made."""
    import triton

    flashinfer = bench_flashinfer.version()
    if flashinfer is not None and not real:
        print("flashinfer: compared between real ranks only", file=sys.stderr)
    return {
        "mode": "real" if real else "virtual",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": shlex.join(["moe-fusion", *sys.argv[1:]]),
        "calls": arguments.calls,
        "repeats": arguments.repeats,
        "baseline": arguments.baseline,
        "terabytes_per_s": arguments.bandwidth,
        "flashinfer": flashinfer,
    }
