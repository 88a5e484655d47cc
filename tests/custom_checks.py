"""What the tests of registered ops assert; the custom ops are in ``custom_dialect``."""

from __future__ import annotations

import inputs
import torch
from custom_dialect import OPS
from tracing import trace

import moe_fusion


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def clones(data: inputs.Inputs):
    """Arguments that a function may overwrite."""
    return [each.clone() for each in data.args()]


def assert_fused(function, data, *, dynamic=None, **expected):
    """One tail is fused, and no less exact than the function in eager mode."""
    eager = function(*clones(data))
    oracle = function(*clones(data.to(torch.float64)))
    traced = trace(function, *clones(data), dynamic=dynamic)
    assert traced.report.fused == 1, str(traced.report)
    assert traced.report.all_reduces_after == 0
    for got, plain, want in zip(traced.output, eager, oracle, strict=True):
        assert got.dtype == plain.dtype
        assert got.shape == plain.shape
        assert error(got, want) <= 1.02 * error(plain, want) + 3e-7
    for name, value in expected.items():
        assert getattr(traced.report.sites[0], name) == value
    return traced


def assert_left(function, data, *reasons):
    """Nothing is fused, for these reasons, and the graph stays as it was."""
    eager = function(*clones(data))
    traced = trace(function, *clones(data))
    assert traced.report.fused == 0
    assert traced.reasons == sorted(reasons)
    assert traced.before == traced.after
    for got, want in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def register_everything() -> None:
    """Every op of the dialect but ``tp_all_reduce`` and ``reduce``."""
    names = {"weight": "weight", "eps": "epsilon"}
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    moe_fusion.register_rms_norm(OPS.rms_norm, input="input", **names)
    moe_fusion.register_rms_norm(OPS.gemma_rms_norm, input=0, weight=1, eps=2, weight_bias=1)
    moe_fusion.register_rms_norm(
        OPS.rms_norm_out, input="input", mutates={"result": "norm"}, **names
    )
    moe_fusion.register_add_rms_norm(
        OPS.fused_add_rms_norm,
        input="input",
        residual="residual",
        mutates={"input": "norm", "residual": "residual"},
        **names,
    )
    moe_fusion.register_add_rms_norm(OPS.add_rms_norm, input="x", residual="residual", **names)
    moe_fusion.register_add_rms_norm(
        OPS.gemma_add_rms_norm,
        input="x",
        residual=1,
        weight_bias=1.0,
        returns=("residual", "norm"),
        **names,
    )
