"""``strict=True``: a refused tail of a MoE producer is an error with the reason."""

from __future__ import annotations

import logging

import inputs
import pytest
import spellings
import torch
import torch.distributed._functional_collectives as funcol
from torch._dynamo.exc import BackendCompilerFailed
from tracing import trace

import moe_fusion
from moe_fusion import FusionConfig, UnfusedTailError
from moe_fusion.passes import identity
from moe_fusion.roll_call import Verdict

pytestmark = pytest.mark.usefixtures("fake_group")

ROOMY = {"token_ceiling": 512}


def tail(rows, weights, index, shared, residual, norm_weight):
    total = residual + spellings.functional(spellings.where_masked(rows, weights, index))
    return spellings.norm_a(total, norm_weight), total


def average(rows, weights, index, shared, residual, norm_weight):
    y = funcol.all_reduce(spellings.where_masked(rows, weights, index), "avg", "0")
    return spellings.norm_a(residual + y, norm_weight), residual


def with_shared(rows, weights, index, shared, residual, norm_weight):
    partial = spellings.where_masked(rows, weights, index) + shared
    y = funcol.all_reduce(partial, "max", "0")
    return spellings.norm_a(residual + y, norm_weight), residual


def coalesced(rows, weights, index, shared, residual, norm_weight):
    both = [spellings.where_masked(rows, weights, index), shared]
    y, z = funcol.all_reduce_coalesced(both, "sum", "0")
    return spellings.norm_a(residual + y + z, norm_weight), residual


def no_norm(rows, weights, index, shared, residual, norm_weight):
    y = spellings.functional(spellings.where_masked(rows, weights, index))
    return residual + y, residual


def sliced(rows, weights, index, shared, residual, norm_weight):
    y = spellings.functional(spellings.where_masked(rows, weights, index))[:4]
    return spellings.norm_a(residual[:4] + y, norm_weight), residual


REFUSED = {
    "the token ceiling": (tail, {"token_ceiling": 5}, "expected at most 5 tokens, got 6"),
    "the configuration": (tail, ROOMY | {"fuse": ("finalized",)}, "does not fuse unfinalized"),
    "an average": (average, ROOMY, "the reduction is 'avg': expected 'sum'"),
    "a maximum": (with_shared, ROOMY, "the reduction is 'max': expected 'sum'"),
    "several at once": (coalesced, ROOMY, "the all_reduce is coalesced with others"),
    "no norm": (no_norm, ROOMY, "no RMSNorm reads the sum"),
    "a slice": (sliced, ROOMY, "slice"),
}


def compile_strictly(function, settings):
    """The error of a strict compile."""
    with pytest.raises(BackendCompilerFailed) as caught:
        trace(function, *inputs.make().args(), config=FusionConfig(**settings, strict=True))
    assert isinstance(caught.value.inner_exception, UnfusedTailError)
    return str(caught.value.inner_exception)


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_of_a_moe_tail_is_an_error_with_the_reason_and_the_place(name):
    function, settings, reason = REFUSED[name]
    message = compile_strictly(function, settings)
    assert message.startswith("strict: the MoE tail at all_reduce")
    assert reason in message
    assert ".py:" in message


@pytest.mark.parametrize("name", REFUSED)
def test_without_strict_it_is_logged_counted_and_right(name, caplog):
    function, settings, reason = REFUSED[name]
    with caplog.at_level(logging.DEBUG, "moe_fusion"):
        traced = trace(function, *inputs.make().args(), config=FusionConfig(**settings))
    assert traced.report.fused == 0
    assert any(reason in found for found in traced.report.refusals)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, line in lines if reason in line] == [logging.DEBUG, logging.INFO]
    for got, want in zip(traced.output, function(*inputs.make().args()), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_ranks_that_disagree_are_an_error_too(monkeypatch):
    reason = "torch: expected the same on every rank, got '2.13' on rank 0 and '2.14' on rank 1"
    monkeypatch.setattr(identity, "verdict", lambda *_: Verdict(reason))
    assert f"the ranks disagree: {reason}" in compile_strictly(tail, ROOMY)


def test_a_backward_is_an_error_too():
    data = inputs.make(torch.float32)
    data.residual.requires_grad_()
    config = FusionConfig(token_ceiling=512, strict=True)
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(
            tail, options={"post_grad_custom_pre_pass": moe_fusion.MoEFusionPass(config)}
        )(*data.args())
    assert isinstance(caught.value.inner_exception, UnfusedTailError)
    assert "the graph has a backward" in str(caught.value.inner_exception)


def test_a_tail_that_is_fused_and_one_that_no_producer_made_are_no_error():
    def function(rows, weights, index, shared, residual, norm_weight):
        normed, total = tail(rows, weights, index, shared, residual, norm_weight)
        return normed, total, spellings.functional(shared)

    config = FusionConfig(token_ceiling=512, strict=True)
    traced = trace(function, *inputs.make().args(), config=config)
    assert traced.report.fused == 1
    assert dict(traced.report.refusals) == {"no RMSNorm reads the sum": 1}
    assert torch.equal(traced.output[2], inputs.make().shared)
