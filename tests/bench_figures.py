"""Figures that nobody measured, for the tests of what ``moe-fusion bench`` makes of them."""

from __future__ import annotations

from moe_fusion.cli.bench_cases import Case
from moe_fusion.cli.bench_results import Result, Timing
from moe_fusion.cli.main import main

NAN = float("nan")
ENVIRONMENT = {"mode": "virtual", "device": "some GPU", "torch": "2.11", "triton": "3.6"}


def timing(us, cold_us=None, error=1e-3):
    return Timing(us, cold_us, error, 3.5e-3)


def result(world_size=2, tokens=1, *, hidden_dim=7168, top_k=8, launch=1.0, moved=1.0, **figures):
    timings = {n: t if isinstance(t, Timing) else timing(t) for n, t in figures.items()}
    case = Case(world_size, tokens, hidden_dim, top_k, "bf16")
    return Result(case, two_shot=False, launch_us=launch, byte_us=moved, timings=timings)


def refused(capsys, *options):
    assert main(["bench", *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def tuned(world_size, tokens, one_shot, two_shot, **options):
    return result(world_size, tokens, one_shot=one_shot, two_shot=two_shot, **options)
