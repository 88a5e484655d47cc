"""Against vLLM's own classes, in an environment that has it; skipped elsewhere (docs/vllm.md).

vLLM's backend compiles a small model on the CPU platform, with its own configuration, pass manager,
ranges and cache keys. The group is a fake one of two, whose all_reduce leaves its input as it is;
vLLM's own all_reduce, which must not run in a fused graph, doubles it.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
import warnings
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.ir.ops as ir
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
    from vllm.compilation.decorators import support_torch_compile
    from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        CUDAGraphMode,
        ParallelConfig,
        PassConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.config.utils import Range
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context

from moe_fusion.integrations import vllm as plugin
from moe_fusion.integrations.vllm_pass import VllmFusionPass
from moe_fusion.passes import custom_ops

pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN = 32
EPS = 1e-6
CEILING = 16

# vLLM's last pass names this op; its library of compiled ops needs CUDA to load.
_ROTARY = (
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
LIBRARY = torch.library.Library("_C", "FRAGMENT")
if not hasattr(torch.ops._C, "rotary_embedding"):
    LIBRARY.define(_ROTARY)


class Group:
    """A group coordinator, as far as vLLM's all_reduce and the plugin read one."""

    unique_name = "tp:0"

    def __init__(self):
        self.device_group = dist.group.WORLD

    def _all_reduce_out_place(self, x):
        return x * 2.0


@pytest.fixture
def vllm_group(fake_group, monkeypatch):
    group = Group()
    monkeypatch.setattr(parallel_state, "_groups", {})
    parallel_state._register_group(group)
    return group


@pytest.fixture(autouse=True)
def plugged(monkeypatch, tmp_path):
    """The plugin is registered, twice as vLLM may do, on a platform of the test's own."""
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", str(CEILING))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
    plugin.register()
    plugin.register()
    yield
    custom_ops._registered.clear()


def configure(world_size=2, **options):
    options = {
        "mode": CompilationMode.VLLM_COMPILE,
        "backend": "inductor",
        "cudagraph_mode": CUDAGraphMode.NONE,
        "splitting_ops": [],
        "pass_config": PassConfig(fuse_rope_kvcache_cat_mla=False),
    } | options
    parallel = ParallelConfig(
        tensor_parallel_size=world_size,
        distributed_executor_backend="mp" if world_size > 1 else None,
    )
    config = VllmConfig(parallel_config=parallel, compilation_config=CompilationConfig(**options))
    compilation = config.compilation_config
    compilation.mode = options["mode"]  # the CPU platform prefers another
    compilation.backend = options["backend"]
    compilation.compile_sizes = options.get("compile_sizes", [])
    return config


def key():
    return vllm.platforms.current_platform.pass_key


def our_pass(config):
    found = config.compilation_config.inductor_compile_config[key()]
    assert isinstance(found, VllmFusionPass)
    return found


class Layer(torch.nn.Module):
    """A projection, vLLM's all_reduce, and vLLM's norm with its residual add."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator))
        self.norm_weight = torch.nn.Parameter(torch.rand(HIDDEN, generator=generator))

    def forward(self, x: torch.Tensor, residual: torch.Tensor):
        y = torch.ops.vllm.all_reduce(x @ self.weight, group_name="tp:0")
        return ir.fused_add_rms_norm.maybe_inplace(y, residual, self.norm_weight, EPS)

    def want(self, x, residual, fused):
        total = x @ self.weight * (1.0 if fused else 2.0) + residual
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
        return total * scale * self.norm_weight, total


def run(config, sizes, fused):
    """Compile a layer under ``config``, and check its numbers for each size."""

    @support_torch_compile(dynamic_arg_dims={"x": 0, "residual": 0})
    class Model(Layer):
        pass

    with set_current_vllm_config(config), torch.no_grad():
        model = Model(vllm_config=config)
        for tokens in sizes:
            x, residual = torch.randn(2, tokens, HIDDEN).unbind()
            with set_forward_context(None, config):
                got = model(x.clone(), residual.clone())
            for each, want in zip(got, model.want(x, residual, tokens in fused), strict=True):
                torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5)


def test_it_was_written_for_this_version():
    assert version("vllm") in plugin.TESTED_VERSIONS


@pytest.mark.usefixtures("vllm_group")
def test_each_compile_range_is_decided_by_itself():
    config = configure(compile_ranges_endpoints=[CEILING], compile_sizes=[8])
    run(config, (5, 8, 16, 17, 40), fused=(5, 8, 16))
    report = our_pass(config).report
    assert report.fused == 2  # for 8, and for 1 to 16
    (reason,) = report.refusals
    assert reason.startswith("token ceiling: expected at most 16 tokens, got s")
    assert {site.norm for site in report.sites} == {"vllm_ir.fused_add_rms_norm"}


@pytest.mark.usefixtures("vllm_group")
def test_a_range_across_the_ceiling_is_served_by_the_op():
    config = configure()
    run(config, (5, 16, 17, 40), fused=(5, 16, 17, 40))
    assert our_pass(config).report.fused == 1


@pytest.mark.usefixtures("vllm_group")
def test_a_mode_without_vllms_lowering_is_left():
    """There vLLM's norms are ops that overwrite and return their arguments."""
    config = configure(mode=CompilationMode.DYNAMO_TRACE_ONCE)
    run(config, (5, 40), fused=())
    (reason,) = our_pass(config).report.refusals
    norm = "vllm_ir.fused_add_rms_norm.maybe_inplace"
    assert reason == f"{norm} comes between the all_reduce and the norm"


@pytest.mark.usefixtures("vllm_group")
def test_vllms_cache_serves_the_fused_graphs_under_the_same_settings_only(monkeypatch):
    for graphs in (1, 0):
        config = configure()
        run(config, (5, 40), fused=(5, 40))
        assert our_pass(config).report.graphs == graphs
        torch._dynamo.reset()
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "0")
    config = configure()
    run(config, (5, 40), fused=())
    assert our_pass(config).report.graphs == 1


def test_the_configuration_holds_the_pass_and_its_key():
    config = configure()
    passes = config.compilation_config.inductor_compile_config
    assert isinstance(our_pass(config), InductorPass)
    hashed = config.compute_hash()
    del passes[key()]
    assert config.compute_hash() != hashed
    assert key() not in configure(world_size=1).compilation_config.inductor_compile_config


def test_another_setting_is_another_key(monkeypatch):
    first = configure()
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "8")
    second = configure()
    assert our_pass(first).uuid() != our_pass(second).uuid()
    assert first.compute_hash() != second.compute_hash()


def test_no_key_is_used_twice_while_a_rank_has_not_answered(monkeypatch):
    """What ranks make of a graph is not known then, and vLLM caches under every key."""
    ours = our_pass(configure())
    monkeypatch.setattr(ours.fusion, "uuid", lambda: None)
    assert ours.uuid() != ours.uuid()


def test_the_key_covers_the_groups(vllm_group):
    fusion = our_pass(configure())
    before = fusion.uuid()
    vllm_group.unique_name = "other:0"
    parallel_state._register_group(vllm_group)
    assert fusion.uuid() != before


def test_the_pass_travels_to_workers():
    config = configure()
    for clone in (copy.deepcopy(our_pass(config)), pickle.loads(pickle.dumps(our_pass(config)))):
        assert clone.uuid() == our_pass(config).uuid()


def test_the_pass_manager_runs_ours_last_and_covers_its_key():
    """vLLM's own passes come first: what they rewrite is theirs."""
    config = configure()
    manager = PostGradPassManager()
    manager.configure(config)
    with pass_context(Range(1, 16)):
        without = manager.uuid()
        manager.add(our_pass(config))
        assert manager.uuid() != without
    assert manager.passes[-1] is our_pass(config)
    assert len(manager.passes) > 1


class Theirs(InductorPass):
    """A user's pass for small batches, which notes what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append("finalize_allreduce_rms_norm" in str(graph))

    def is_applicable_for_range(self, compile_range):
        return compile_range.end <= CEILING


@pytest.mark.usefixtures("vllm_group")
def test_a_pass_of_the_users_runs_after_ours():
    theirs = Theirs()
    config = configure(inductor_compile_config={key(): theirs}, compile_ranges_endpoints=[CEILING])
    assert our_pass(config).then is theirs
    run(config, (5, 40), fused=(5,))
    assert our_pass(config).report.fused == 1
    assert our_pass(config).then.seen == [True]


def test_a_wrong_variable_leaves_vllm_as_it_is(monkeypatch, caplog):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "few")
    with caplog.at_level(logging.WARNING, "moe_fusion.vllm"):
        config = configure()
    assert key() not in config.compilation_config.inductor_compile_config
    (record,) = (each for each in caplog.records if each.name == "moe_fusion.vllm")
    assert "expected a whole number of tokens" in record.getMessage()


class Model:
    """What the plugin asks of a model's configuration."""

    dtype = torch.bfloat16

    def get_hidden_size(self):
        return HIDDEN


def test_the_ceiling_becomes_a_boundary_of_the_ranges():
    config = configure(compile_ranges_endpoints=[100])
    config.compilation_config.inductor_compile_config.pop(key())
    object.__setattr__(config, "model_config", Model())
    plugin.add_pass(config)
    assert CEILING in config.compilation_config.compile_ranges_endpoints
    ranges = config.compilation_config.get_compile_ranges()
    assert (ranges[0].start, ranges[0].end) == (1, CEILING)
    assert ranges[1].start == CEILING + 1
