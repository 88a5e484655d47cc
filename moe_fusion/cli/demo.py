"""``moe-fusion demo``: a small model of a real family, compiled without and with the pass."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import moe_fusion
from moe_fusion.cli import models
from moe_fusion.cli.explain import without_caches
from moe_fusion.cli.outcome import Outcome
from moe_fusion.cli.progress import Progress
from moe_fusion.cli.ranks import DEFAULT_TIME_LIMIT_SECONDS, Rank, device_type_for, run_ranks
from moe_fusion.errors import RanksDisagreeError, WrongResultError

TIMED_STEPS = 20
MAX_ABS_DIFF_FP32 = 1e-4
AGREED = ("fused", "all_reduces_before", "all_reduces_after", "refusals")


def add_parser(subparsers: Any) -> None:
    """Register ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="run a small tensor-parallel model without and with the pass",
        description="Start the ranks, compile a small random model twice and compare.",
    )
    parser.add_argument("--model", choices=models.FAMILIES, default="mixtral", help="its family")
    parser.add_argument(
        "--world-size", "--tp", dest="world_size", type=int, default=2, help="ranks (2)"
    )
    models.add_arguments(parser)
    parser.add_argument(
        "--time-limit",
        type=float,
        default=DEFAULT_TIME_LIMIT_SECONDS,
        metavar="SECONDS",
        help="end the run when a rank takes longer (%(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``demo`` and print what it found.

    Raises:
        ModelError: the options name no model that can be built.
        MissingModelsExtraError: transformers is missing.
        RankFailedError: a rank raised or died.
        RankTimeoutError: a rank did not finish in time.
        RanksDisagreeError: the ranks fused differently.
        WrongResultError: an fp32 model's outputs differ by more than rounding explains.
    """
    spec = models.spec_from_arguments(arguments)
    models.check_world_size(spec, arguments.world_size)
    models.require_transformers()
    with Progress() as progress:
        progress.step(f"Starting {arguments.world_size} ranks")
        outcomes = run_ranks(
            demo_on_rank,
            arguments.world_size,
            spec,
            time_limit_seconds=arguments.time_limit,
            device_type=device_type_for(arguments.world_size),
            on_progress=progress.step,
        )
    outcome = agreed(outcomes)
    difference = outcome.max_abs_diff
    assert difference is not None
    # in bf16 a top-k choice may flip between two right runs
    if spec.dtype in (None, "fp32") and not difference <= MAX_ABS_DIFF_FP32:
        raise WrongResultError(difference, MAX_ABS_DIFF_FP32)
    print(outcome.as_json() if arguments.json else outcome.as_text())
    return 0


def agreed(outcomes: list[Outcome]) -> Outcome:
    """Rank 0's outcome, once all ranks are seen to have fused the same.

    Raises:
        RanksDisagreeError: they have not.
    """
    for key in AGREED:
        values = [outcome.report[key] for outcome in outcomes]
        if any(value != values[0] for value in values):
            raise RanksDisagreeError(key, values)
    return outcomes[0]


def demo_on_rank(rank: Rank, spec: models.ModelSpec) -> Outcome:
    """Build, compile twice, compare and time, on one rank."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    rank.progress(f"Building {spec.name}")
    built = models.build(spec, rank.device)
    seconds: dict[str, Any] = {}
    with torch.no_grad(), without_caches():
        eager = built.run()
        # what the first compile of a process sets up must not count for the unfused one
        torch.compile(torch.sin)(torch.ones(8, device=rank.device))
        rank.progress(f"Compiling {spec.name} without the pass")
        unfused, seconds["unfused"] = compile_and_time(built, rank.device)
        rank.progress(f"Compiling {spec.name} with the pass")
        with moe_fusion.fusing(render=rank.index == 0) as report:
            fused, seconds["fused"] = compile_and_time(built, rank.device)
    difference = torch.stack([(fused - other).abs().max() for other in (eager, unfused)]).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return Outcome(
        model=spec.name,
        world_size=rank.world_size,
        report=report.as_dict(),
        report_text=str(report),
        seconds=seconds,
        max_abs_diff=difference.item(),
    )


def compile_and_time(
    built: models.BuiltModel, device: torch.device
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compile the model anew and run it.

    Returns:
        Its logits, and the seconds of the first call (``"compile"``) and the median of the later
        ones (``"step"``).
    """
    torch._dynamo.reset()
    compiled = torch.compile(built.module)
    started = time.perf_counter()
    logits = built.run(compiled)
    compile_seconds = _since(started, device)
    steps = []
    for _ in range(TIMED_STEPS):
        dist.barrier()
        started = time.perf_counter()
        built.run(compiled)
        steps.append(_since(started, device))
    return logits, {"compile": compile_seconds, "step": statistics.median(steps)}


def _since(started: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
