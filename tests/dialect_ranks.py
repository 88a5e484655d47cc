"""What the ranks of ``test_dialects.py`` run: a tail compiled by Inductor, on real groups."""

from __future__ import annotations

from contextlib import contextmanager

import inputs
import spellings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from custom_dialect import OPS

import moe_fusion


@contextmanager
def fusing():
    """Without caches: a rank that found the graph of its peer there would count nothing."""
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        moe_fusion.fusing() as report,
    ):
        yield report


def compiled_with_the_group_itself(rank):
    """(fused tails, fused and unfused outputs), under ``compile_on_one_rank``."""
    group = dist.group.WORLD

    def function(rows, weights, index, shared, residual, norm_weight):
        partial = spellings.where_masked(rows, weights, index)
        total = residual + funcol.all_reduce(partial, "sum", group)
        return spellings.norm_f(total, norm_weight), total

    data = inputs.make(torch.float32, missing=True, rank=rank.index)
    with dist.config.patch(compile_on_one_rank=True), fusing() as report:
        got = torch.compile(function, fullgraph=True)(*data.args())
    return report.fused, got, function(*data.args())


def compiled_with_registered_ops(rank):
    """(fused tails, fused and unfused outputs), of an opaque all_reduce."""
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")

    def function(rows, weights, index, shared, residual, norm_weight):
        partial = spellings.where_masked(rows, weights, index)
        total = residual + OPS.all_reduce(partial, "0")
        return spellings.norm_f(total, norm_weight), total

    data = inputs.make(torch.float32, missing=True, rank=rank.index)
    with fusing() as report:
        got = torch.compile(function, fullgraph=True)(*data.args())
    return report.fused, got, function(*data.args())


def compiled_with_a_mutating_norm(rank):
    """(fused tails, fused and unfused outputs), as vLLM writes it, and the residual it leaves."""
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    moe_fusion.register_add_rms_norm(
        OPS.fused_add_rms_norm,
        input="input",
        residual="residual",
        weight="weight",
        eps="epsilon",
        mutates={"input": "norm", "residual": "residual"},
    )

    def function(rows, weights, index, shared, residual, norm_weight):
        hidden = OPS.all_reduce(spellings.where_masked(rows, weights, index) + shared, "0")
        OPS.fused_add_rms_norm(hidden, residual, norm_weight, spellings.EPS)
        return hidden

    data = inputs.make(torch.float32, missing=True, rank=rank.index)
    fused, plain = ([each.clone() for each in data.args()] for _ in range(2))
    with fusing() as report:
        got = torch.compile(function, fullgraph=True)(*fused)
    want = function(*plain)
    return report.fused, (got, fused[4]), (want, plain[4])
