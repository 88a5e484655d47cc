"""vLLM's ops, groups and compile ranges, without vLLM: see ``test_vllm_installed.py`` for the rest.

The ops have vLLM's schemas (``vllm_dialect``); its registry of groups and its platform are stood in
for by modules with the few attributes that the plugin reads.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import inputs
import pytest
import torch
from custom_checks import assert_fused, assert_left
from tracing import Tracer

from moe_fusion import FusionConfig, MoEFusionPass
from moe_fusion.integrations import vllm as plugin
from moe_fusion.integrations.vllm_ops import register_ops
from moe_fusion.passes import custom_ops
from moe_fusion.passes.guards import under_ceiling

if importlib.util.find_spec("vllm"):
    pytest.skip("vLLM defines its ops itself", allow_module_level=True)

import vllm_dialect  # noqa: F401 - defines the ops

EPS = 1e-6
CEILING = 16
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
VLLM, IR, C = torch.ops.vllm, torch.ops.vllm_ir, torch.ops._C


def module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def vllm_modules(monkeypatch):
    """The modules of vLLM that the plugin imports, with the group ``tp:0`` and no platform yet."""
    tp = SimpleNamespace(device_group=SimpleNamespace(group_name="0"))
    groups = {"tp:0": lambda: tp, "gone:0": lambda: None}
    state = module("vllm.distributed.parallel_state", _groups=groups)
    platforms = module("vllm.platforms", current_platform=SimpleNamespace(device_type="cpu"))
    modules = {
        "vllm": module("vllm"),
        "vllm.platforms": platforms,
        "vllm.distributed": module("vllm.distributed", parallel_state=state),
        "vllm.distributed.parallel_state": state,
    }
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    return modules


@pytest.fixture
def dialect(fake_group, vllm_modules):
    """vLLM's ops are registered; functionalization is vLLM's choice, the first version."""
    register_ops()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        yield
    custom_ops._registered.clear()


def reduce(x):
    return VLLM.all_reduce(x, group_name="tp:0")


def ir_add_norm(x, residual, weight):
    return IR.fused_add_rms_norm(x, residual, weight, EPS)


def ir_add_gemma_norm(x, residual, weight):
    return IR.fused_add_rms_norm(x, residual, weight.float() + 1.0, EPS, None)


def ir_norm(x, residual, weight):
    total = x + residual
    return IR.rms_norm(total, weight, EPS, None), total


def c_add_norm(x, residual, weight):
    C.fused_add_rms_norm(x, residual, weight, EPS)
    return x, residual


def c_norm(x, residual, weight):
    total = x + residual
    out = torch.empty_like(total)
    C.rms_norm(out, total, weight, EPS)
    return out, total


def native_norm(x, residual, weight):
    """A norm written out, after an add in the activation dtype."""
    total = x + residual
    wide = total.to(torch.float32) if total.dtype != torch.float64 else total
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return wide.to(total.dtype) * weight, total


def native_add_norm(x, residual, weight):
    """Both written out, as vLLM does without custom ops: the norm reads the sum unrounded."""
    wide = x.to(torch.float64) if x.dtype == torch.float64 else x.to(torch.float32)
    wide = wide + residual
    total = wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return wide.to(x.dtype) * weight, total


NORMS = {
    "vllm_ir.fused_add_rms_norm": ir_add_norm,
    "vllm_ir.fused_add_rms_norm, Gemma": ir_add_gemma_norm,
    "vllm_ir.rms_norm": ir_norm,
    "_C.fused_add_rms_norm": c_add_norm,
    "_C.rms_norm": c_norm,
    "written out": native_norm,
    "written out with its add": native_add_norm,
}


@DTYPES
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.usefixtures("dialect")
def test_a_tail_of_vllm(name, dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        return NORMS[name](reduce(shared @ shared.t() @ shared), residual, norm_weight)

    traced = assert_fused(function, inputs.make(dtype), top_k=None, group="0")
    assert "all_reduce" in traced.before[0]
    assert not [line for line in traced.after[0].split() if line.startswith(("vllm", "_C"))]


def experts(op, x, router):
    return op(x, router, None, None, "layers.0.mlp", 0)


def alone(x, router, shared):
    return experts(VLLM.moe_forward, x, router)


def beside_a_shared_expert(x, router, shared):
    shared_output, routed = experts(VLLM.moe_forward_shared, x, router)
    return shared_output + routed


def scaled_beside_a_shared_expert(x, router, shared):
    shared_output, routed = experts(VLLM.moe_forward_shared, x, router)
    return routed * 2.5 + shared_output


MOES = [alone, beside_a_shared_expert, scaled_beside_a_shared_expert]


@pytest.mark.parametrize("moe", MOES, ids=[each.__name__ for each in MOES])
@pytest.mark.usefixtures("dialect")
def test_the_tail_of_an_opaque_moe(moe):
    """The experts' op returns [T, H] rows: a finalized tail."""

    def function(rows, weights, index, shared, residual, norm_weight):
        partial = moe(shared * 2.0, shared @ shared.t(), shared)
        return ir_add_norm(reduce(partial), residual, norm_weight)

    traced = assert_fused(function, inputs.make(), top_k=None)
    assert "moe_forward" in traced.after[0]


@pytest.mark.usefixtures("dialect")
def test_a_norm_of_a_part_of_the_row_is_left():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = reduce(shared) + residual
        return IR.rms_norm(total, norm_weight, EPS, 32), total

    reason = "vllm_ir.rms_norm's variance_size is 32: expected None"
    assert_left(function, inputs.make(), reason)


@pytest.mark.parametrize("group", ["gone:0", "ep:0"])
@pytest.mark.usefixtures("dialect")
def test_a_group_that_vllm_has_not(group):
    def function(rows, weights, index, shared, residual, norm_weight):
        return ir_add_norm(VLLM.all_reduce(shared, group), residual, norm_weight)

    reason = f"the group {group!r} is not known: expected one of vLLM's groups ['tp:0']"
    assert_left(function, inputs.make(), reason)


class CountsGuards:
    """Our pass, and how many guards the graph's shapes have before and after it."""

    def __init__(self, served):
        self.fusion = MoEFusionPass(FusionConfig(token_ceiling=CEILING), served=served)
        self.guards = []

    def count(self, graph):
        values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
        envs = [v.node.shape_env for v in values if isinstance(v, torch.SymInt)]
        pending = sum(map(len, envs[0].deferred_runtime_asserts.values()))
        self.guards.append((len(envs[0].guards), pending))

    def __call__(self, graph):
        self.count(graph)
        self.fusion(graph)
        self.count(graph)


def symbolic_tail(x, residual, weight):
    partial = beside_a_shared_expert(x * 2.0, x[:, :4] * 1.0, None)
    return ir_add_norm(reduce(partial), residual, weight)


def run_symbolic(counts, sizes):
    tracer = Tracer(symbolic_tail, passes=(counts,))
    for tokens in sizes:
        data = inputs.make(torch.float32, tokens=tokens)
        args = [data.shared, data.residual, data.norm_weight]
        for tensor in args[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
        want = symbolic_tail(*(each.clone() for each in args))
        for got, expected in zip(tracer(*args).output, want, strict=True):
            torch.testing.assert_close(got, expected)
    return tracer


@pytest.mark.parametrize(
    ("served", "fused"),
    [(range(1, 17), 1), (range(1, 4097), 1), (range(16, 18), 1), (range(17, 4097), 0)],
    ids=["below", "across", "at the ceiling", "above"],
)
@pytest.mark.usefixtures("dialect")
def test_a_range_decides_without_a_guard(served, fused):
    """One graph serves every size of the range: a guard would be dropped, so none is recorded."""
    counts = CountsGuards(served)
    tracer = run_symbolic(counts, (served.start + 1, served.stop - 1))
    assert len(tracer.after) == 1
    assert counts.guards[0] == counts.guards[1]
    assert counts.fusion.report.fused == fused
    assert tracer.op_calls == (2 if fused else 0)
    refused = [r for r in counts.fusion.report.refusals if r.startswith("token ceiling: ")]
    assert len(refused) == 1 - fused


@pytest.mark.usefixtures("dialect")
def test_without_a_range_there_is_a_guard():
    """What the range avoids: the same graph, decided by a guard on the number of tokens."""
    counts = CountsGuards(None)
    run_symbolic(counts, (4, 8))
    assert counts.guards[1][0] == counts.guards[0][0] + 1
    assert counts.fusion.report.fused == 1


@pytest.mark.parametrize(("tokens", "fused"), [(16, True), (17, False)])
def test_a_static_size_is_compared_whatever_is_served(tokens, fused):
    assert under_ceiling(tokens, CEILING, range(1, 4096)) == fused
    assert not under_ceiling(tokens, 0, range(1, 4096))


@pytest.mark.parametrize(
    ("version", "platform", "reason"),
    [
        ("0.33.0", "cpu", None),
        ("0.33.0+cpu", "cpu", None),
        ("0.33.1", "cpu", "version: expected one of ('0.33.0',), got 0.33.1"),
        ("0.33.0", "rocm", "platform: expected one of ('cpu',), got 'rocm'"),
        ("0.33.0", "", "platform: expected one of ('cpu',), got ''"),
    ],
)
def test_what_was_not_tested_is_left_alone(version, platform, reason, monkeypatch):
    monkeypatch.delenv(plugin.UNTESTED_VARIABLE, raising=False)
    hint = " (MOE_FUSION_VLLM_UNTESTED=1 tries it all the same)"
    assert plugin.untested(version, platform) == (reason and reason + hint)
    monkeypatch.setenv(plugin.UNTESTED_VARIABLE, "1")
    assert plugin.untested(version, platform) is None
    assert FusionConfig().strict is False  # the variable is a known one


def test_the_entry_point_logs_and_does_nothing_in_another_vllm(vllm_modules, caplog, monkeypatch):
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    (value,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    name, _, function = value.partition(":")
    register = getattr(importlib.import_module(name), function)
    assert register is plugin.register
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.1.0")
    before = vars(vllm_modules["vllm.platforms"].current_platform).copy()
    with caplog.at_level(logging.WARNING, "moe_fusion.vllm"):
        register()
    (record,) = caplog.records
    assert "expected one of ('0.33.0',), got 0.1.0" in record.getMessage()
    assert vars(vllm_modules["vllm.platforms"].current_platform) == before
    assert not custom_ops.registrations()


def test_without_vllm_it_logs_too(caplog):
    with caplog.at_level(logging.WARNING, "moe_fusion.vllm"):
        plugin.register()
    (record,) = caplog.records
    assert "No module named 'vllm'" in record.getMessage()
    assert not custom_ops.registrations()
