"""Tails of registered ops, one of each kind, before and after the rewrite; see ``test_snapshots.py``."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
from conftest import RECORDED_GRAPHS
from custom_checks import clones
from custom_dialect import OPS
from expecttest import assert_expected_inline
from tracing import CEILING, Tracer

from moe_fusion import FusionConfig

pytestmark = [pytest.mark.usefixtures("fake_group", "registered_ops"), RECORDED_GRAPHS]

EPS = spellings.EPS


def mutating(x, residual, weight):
    OPS.fused_add_rms_norm(x, residual, weight, EPS)
    return x, residual


def functional(x, residual, weight):
    return OPS.add_rms_norm(x, residual, weight)


def snapshot(function, *, v2=True):
    data = inputs.make()
    tracer = Tracer(function, FusionConfig(token_ceiling=CEILING))
    tracer.fusion.render = True
    with torch._inductor.config.patch(enable_auto_functionalized_v2=v2):
        traced = tracer(*clones(data))
    (site,) = traced.report.sites
    return f"{site.before}\n--\n{site.after}\n--\n{site}"


def snapshot_tail(norm):
    def function(rows, weights, index, shared, residual, norm_weight):
        return norm(OPS.all_reduce(shared.sin(), "0"), residual.cos(), norm_weight)

    return function


def test_a_norm_op():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + OPS.all_reduce(shared.sin(), "0")
        return OPS.rms_norm(total, norm_weight, EPS), total

    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = dialect.all_reduce(sin, 0)
add: bf16[6, 64] = add.Tensor(arg1_1, all_reduce)
rms_norm: bf16[6, 64] = dialect.rms_norm(add, arg2_1, 1e-06)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, arg2_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: dialect.rms_norm; residual: bfloat16; group 0 of 2""")


def test_a_functional_op():
    assert_expected_inline(snapshot(snapshot_tail(functional)), """\
all_reduce: bf16[6, 64] = dialect.all_reduce(sin, 0)
add_rms_norm: (bf16[6, 64], bf16[6, 64]) = dialect.add_rms_norm(all_reduce, cos, arg2_1)
getitem: bf16[6, 64] = getitem(add_rms_norm, 0)
getitem_1: bf16[6, 64] = getitem(add_rms_norm, 1)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, cos, arg2_1, 1e-06, 0, 1, 1, 0)
getitem_2: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_3: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: dialect.add_rms_norm; residual: bfloat16; group 0 of 2""")


def test_a_mutating_op():
    assert_expected_inline(snapshot(snapshot_tail(mutating)), """\
all_reduce: bf16[6, 64] = dialect.all_reduce(sin, 0)
auto_functionalized_v2: (, bf16[6, 64], bf16[6, 64]) = auto_functionalized_v2(dialect.fused_add_rms_norm.default, weight=arg2_1, epsilon=1e-06, _input_base_index=0, _residual_base_index=1, _all_bases=[all_reduce, cos])
getitem_1: bf16[6, 64] = getitem(auto_functionalized_v2, 1)
getitem_2: bf16[6, 64] = getitem(auto_functionalized_v2, 2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, cos, arg2_1, 1e-06, 0, 1, 1, 0)
getitem_3: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_4: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: dialect.fused_add_rms_norm; residual: bfloat16; group 0 of 2""")


def test_a_mutating_op_in_the_first_wrapper():
    assert_expected_inline(snapshot(snapshot_tail(mutating), v2=False), """\
all_reduce: bf16[6, 64] = dialect.all_reduce(sin, 0)
auto_functionalized: (, bf16[6, 64], bf16[6, 64]) = auto_functionalized(dialect.fused_add_rms_norm.default, input=all_reduce, residual=cos, weight=arg2_1, epsilon=1e-06)
getitem_1: bf16[6, 64] = getitem(auto_functionalized, 1)
getitem_2: bf16[6, 64] = getitem(auto_functionalized, 2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, cos, arg2_1, 1e-06, 0, 1, 1, 0)
getitem_3: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_4: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: dialect.fused_add_rms_norm; residual: bfloat16; group 0 of 2""")
