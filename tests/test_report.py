"""The report that a user gets, and the log."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import inputs
import pytest
import spellings
import torch
from installed import (
    CONFIG,
    OTHER,
    compile_and_check,
    settings,
    tail,
    tensors,
)
from tracing import Tracer

import moe_fusion
from moe_fusion import MoEFusionPass

pytestmark = pytest.mark.usefixtures("fake_group", "empty_slot")


def test_the_report_of_one_fused_tail_and_one_refused():
    def function(rows, residual, norm_weight):
        normed, total = tail(rows, residual, norm_weight)
        other = spellings.functional(normed)
        return normed, total, other

    rows, residual, norm_weight = tensors()
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        settings(),
        moe_fusion.fusing(CONFIG, render=True) as report,
    ):
        normed, total, other = torch.compile(function, fullgraph=True)(rows, residual, norm_weight)
    assert torch.equal(total, residual + rows)
    assert torch.equal(other, normed)
    assert (report.graphs, report.fused) == (1, 1)
    assert (report.all_reduces_before, report.all_reduces_after) == (2, 1)
    (site,) = report.sites
    assert (site.num_tokens, site.hidden_dim, site.top_k) == ("16", inputs.H, None)
    assert (site.dtype, site.residual, site.finalize) == ("bfloat16", "bfloat16", "finalized")
    assert (site.shared, site.group, site.world_size) == ("none", "0", 2)
    assert "c10d.all_reduce(" in site.before
    assert "moe_fusion.finalize_allreduce_rms_norm(" in site.after
    reason = "no RMSNorm reads the sum"
    assert dict(report.refusals) == {reason: 1}
    (left,) = report.left
    assert (left.anchor, left.graph, left.reason) == ("all_reduce_1", 0, reason)
    assert left.node == "wait_tensor_1 = _c10d_functional.wait_tensor"
    path, _, line = left.source.rpartition(":")
    assert "all_reduce" in Path(path).read_text().splitlines()[int(line) - 1]
    assert str(report) == "\n".join(
        [
            "moe-fusion: fused 1 tail in 1 graph, all_reduces 2 -> 1",
            (
                f"  fused {site.anchor}: finalized [16, 64] bfloat16; shared: none; "
                f"norm: {site.norm}; residual: bfloat16; group 0 of 2"
            ),
            f"  left all_reduce_1: {reason}; stopped at {left.node} ({left.source})",
        ]
    )
    found = json.loads(json.dumps(report.as_dict()))
    assert {name: found[name] for name in ("graphs", "fused", "refusals")} == {
        "graphs": 1,
        "fused": 1,
        "refusals": {reason: 1},
    }
    assert (found["all_reduces_before"], found["all_reduces_after"]) == (2, 1)
    assert found["sites"] == json.loads(json.dumps([dataclasses.asdict(site)]))
    assert found["left"] == json.loads(json.dumps([dataclasses.asdict(left)]))


def test_the_report_of_a_tail_that_a_guard_refused():
    """Nothing stopped the match, so that only the all_reduce's own line is named."""
    tracer = Tracer(tail, OTHER)
    tracer(*tensors(16))
    (left,) = tracer.fusion.report.left
    assert left.node == ""
    assert str(left) == (
        f"all_reduce: token ceiling: expected at most 8 tokens, got 16 ({left.source})"
    )
    assert Path(left.source.rpartition(":")[0]).name == "spellings.py"


def test_an_empty_report():
    report = MoEFusionPass(CONFIG).report
    assert str(report) == (
        "moe-fusion: no graph reached the pass; one that comes from the compile cache does "
        "not (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles anew)"
    )
    assert report.as_dict() == {
        "graphs": 0,
        "all_reduces_before": 0,
        "all_reduces_after": 0,
        "called": 0,
        "fused": 0,
        "sites": [],
        "refusals": {},
        "left": [],
    }


def test_graphs_are_numbered_and_unasked_text_is_not_kept():
    with moe_fusion.fusing(CONFIG) as report:
        compile_and_check(tokens=8)
        compile_and_check(tokens=16)
    assert [(site.graph, site.num_tokens) for site in report.sites] == [(0, "8"), (1, "16")]
    assert {site.before + site.after for site in report.sites} == {""}


def test_one_log_line_for_each_graph(caplog):
    reason = "token ceiling: expected at most 8 tokens, got 16"
    tracer = Tracer(tail, OTHER, dynamic=False)
    with caplog.at_level(logging.INFO, "moe_fusion"):
        for tokens in (8, 16, 8):
            tracer(*tensors(tokens))
    lines = [record.getMessage() for record in caplog.records if record.name == "moe_fusion"]
    assert lines == [
        "graph 0: fused 1 tail, all_reduces 1 -> 0",
        f"graph 1: fused 0 tails, all_reduces 1 -> 1; left: {reason}",
    ]


def test_nothing_is_logged_below_warning_by_default(caplog):
    with caplog.at_level(logging.WARNING, "moe_fusion"), moe_fusion.fusing(CONFIG):
        compile_and_check()
    assert not [record for record in caplog.records if record.name == "moe_fusion"]
