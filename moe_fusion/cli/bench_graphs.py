"""Times calls in CUDA graphs, one graph and one stream for each rank of this process."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fusion import reference
from moe_fusion.cli.bench_cases import Case, copies_past_cache, copy_of
from moe_fusion.cli.bench_results import Timing
from moe_fusion.contract import TailArguments

Outputs = tuple[Tensor, Tensor]
Call = Callable[[], object]
Path = Callable[[int, TailArguments], Outputs]  # of the rank's place in this process

WARM_UP_REPLAYS = 5
GATE_CYCLES = 400_000  # about 0.2 ms, in which the host launches a rank's graph


@dataclass(frozen=True)
class Settings:
    """How each figure is made.

    Attributes:
        calls: in a graph; more where rotating inputs takes more.
        repeats: replays, whose median is the figure.
        cold: also with inputs rotated past the L2.
        before_replay: called before each replay, to line up other processes.
        slowest: the slowest process's times, given this one's.
    """

    calls: int
    repeats: int
    cold: bool = True
    before_replay: Callable[[], None] = torch.cuda.synchronize
    slowest: Callable[[list[float]], list[float]] = list


def warm_up(seconds: float) -> None:
    """Keep the device busy, so that its clocks are where they are under load."""
    square = torch.zeros(2048, 2048, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(10):
            square @ square
        torch.cuda.synchronize()


@functools.cache
def _stream(rank: int) -> torch.cuda.Stream:  # noqa: ARG001 - the key of the cache
    """A stream for each rank of this process, for good: its memory is used again."""
    return torch.cuda.Stream()


def _capture(
    calls: Sequence[Call], stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of the calls, and what the last one returns."""
    graph = torch.cuda.CUDAGraph()
    last: object = None
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                last = call()
        finally:
            graph.capture_end()
    return graph, last


def _replay_ms(
    graphs: Sequence[torch.cuda.CUDAGraph], streams: Sequence[torch.cuda.Stream]
) -> float:
    """From the moment that all streams may go to the end of the last one."""
    opened = torch.cuda.Event(enable_timing=True)
    ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(GATE_CYCLES * (1 + len(streams)))
        opened.record()
    for graph, stream, end in zip(graphs, streams, ends, strict=True):
        with torch.cuda.stream(stream):
            stream.wait_event(opened)
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    times: list[float] = [opened.elapsed_time(end) for end in ends]
    return max(times)


def time_calls(ranks: Sequence[Sequence[Call]], settings: Settings) -> tuple[float, list[object]]:
    """Microseconds a call, and what each rank's last call left behind.

    Args:
        ranks: the calls of each rank of this process, the same number for each.
        settings: how often.
    """
    streams = [_stream(rank) for rank in range(len(ranks))]
    torch.cuda.synchronize()
    for calls, stream in zip(ranks, streams, strict=True):
        with torch.cuda.stream(stream):  # compiles and loads, which a capture forbids
            calls[0]()
    torch.cuda.synchronize()
    captured = [_capture(calls, stream) for calls, stream in zip(ranks, streams, strict=True)]
    graphs = [graph for graph, _ in captured]
    times = []
    for _ in range(WARM_UP_REPLAYS + settings.repeats):
        settings.before_replay()
        times.append(_replay_ms(graphs, streams))
    figure = statistics.median(settings.slowest(times[WARM_UP_REPLAYS:]))
    return figure * 1000 / len(ranks[0]), [last for _, last in captured]


def largest_error(outputs: Sequence[Outputs], exact: Sequence[Outputs]) -> float:
    """Of all ranks and both outputs, relative to the oracle; NaN if any is."""
    errors = [
        reference.relative_error(got, want)
        for pair, wanted in zip(outputs, exact, strict=True)
        for got, want in zip(pair, wanted, strict=True)
    ]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def calls_in_turn(path: Path, rank: int, copies: Sequence[TailArguments], least: int) -> list[Call]:
    """At least ``least`` calls of one rank, each copy of its inputs as often as the others."""
    once: list[Call] = [functools.partial(path, rank, args) for args in copies]
    return once * -(-least // len(copies))


def time_path(
    path: Path,
    case: Case,
    inputs: Sequence[TailArguments],
    exact: Sequence[Outputs],
    settings: Settings,
    *,
    bound: float | None = None,
) -> Timing:
    """Time a path and compare what the timed calls returned with the oracle.

    Args:
        path: takes a rank and its arguments.
        case: what is measured.
        inputs: of each rank of this process.
        exact: the fp64 outputs of each.
        settings: how often.
        bound: of the error; None for the case's.
    """
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    figures, errors = [], []
    for rotated in (False, True)[: 1 + settings.cold]:
        count = copies_past_cache(case, len(inputs), cache_bytes) if rotated else 1
        ranks = [
            calls_in_turn(
                path, rank, [args, *(copy_of(args) for _ in range(count - 1))], settings.calls
            )
            for rank, args in enumerate(inputs)
        ]
        figure, outputs = time_calls(ranks, settings)
        figures.append(figure)
        errors.append(largest_error(outputs, exact))  # type: ignore[arg-type]
    error = float(torch.tensor(errors, dtype=torch.float64).max())
    cold_us = figures[1] if settings.cold else None
    return Timing(figures[0], cold_us, error, case.bound if bound is None else bound)


def launch_us(ranks: int, settings: Settings) -> float:
    """Microseconds a call of a kernel that does nothing, in as many graphs at once as ranks."""
    from moe_fusion.kernels.empty import empty_kernel

    x = torch.zeros(8, device="cuda")

    def launch() -> None:
        empty_kernel[1,](x, x)

    return time_calls([[launch] * settings.calls] * ranks, settings)[0]
