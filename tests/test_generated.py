"""Random tails: equivalent spellings are always fused, near misses never, and numbers are right.

A :class:`~generated.Spec` is drawn from what a tail means (finalize, scales, shared expert,
residual, norm) and from how it may be spelt (operand orders, views, casts, where each scale
stands). To tell a partial from a replicated addend, the fake group's reduction multiplies by two:
in the op and in the oracle. Some run on two real ranks, whose inputs differ.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from distributed import run_ranks
from generated import build, check, data_for, run_specs, specs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tracing import trace

import moe_fusion.op

RANKS = 2
IN_CI = os.environ.get("CI") == "true"  # a person who waits gets the first of the same examples
EXAMPLES = 500 if IN_CI else 150
NEAR_MISSES = 100 if IN_CI else 50
REAL_EXAMPLES = 50
MISSES = (
    "all_reduce read",
    "finalize read",
    "average",
    "slice",
    "cat",
    "norm first",
    "layer norm",
    "mean of the wrong dimension",
    "cube",
    "chained",
    "gate in between",
)


def times_ranks(x):
    return x * RANKS


def all_reduce_of_ranks(tensor, group):
    tensor.mul_(RANKS)


relaxed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fake_group")
@relaxed
@given(spec=specs())
def test_equivalent_spellings_are_fused_with_the_right_numbers(spec):
    data = data_for(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_fusion.op.dist, "all_reduce", all_reduce_of_ranks)
        traced = trace(build(spec), *data.args())
    assert traced.report.fused == 1, f"{spec}\n{traced.report}"
    assert traced.report.all_reduces_after == 0
    unfused = build(spec, reduce=times_ranks)(*data.args())
    oracle = build(spec, reduce=times_ranks)(*data.to(torch.float64).args())
    check(traced.output, unfused, oracle, spec)


@pytest.mark.usefixtures("fake_group")
@settings(relaxed, max_examples=NEAR_MISSES)
@given(spec=specs(miss=True), near_miss=st.sampled_from(MISSES))
def test_near_misses_are_never_fused(spec, near_miss):
    if near_miss == "norm first":  # else the shared expert's addend is a residual before the norm
        spec = replace(spec, shared="before")
    data = data_for(spec)
    function = build(spec, near_miss=near_miss)
    traced = trace(function, *data.args())
    finalized = [site for site in traced.report.sites if site.finalize != "finalized"]
    assert not finalized, f"{near_miss}: {spec}\n{traced.report}"
    assert traced.report.left
    check(traced.output, function(*data.args()), function(*data.to(torch.float64).args()), spec)


def drawn(count):
    """That many specs, the same in each run."""
    found = []

    @settings(relaxed, max_examples=count, phases=[Phase.generate], database=None)
    @given(spec=specs())
    def collect(spec):
        found.append(spec)

    collect()
    return found


def test_on_two_ranks_whose_inputs_differ():
    chosen = drawn(REAL_EXAMPLES)
    assert len(chosen) == REAL_EXAMPLES
    for results in zip(chosen, *run_ranks(2, run_specs, chosen), strict=True):
        spec, *ranks = results
        for fused, before, after, report in ranks:
            expected = 2 if spec.shared == "own all_reduce" else 1
            assert (fused, before, after) == (1, expected, 0), f"{spec}\n{report}"
