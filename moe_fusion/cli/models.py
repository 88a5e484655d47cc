"""The models that the commands build: small random ones, a ``config.json``'s, or the user's own.

Tensor parallelism is transformers' own, unchanged: its plan for the family shards the weights and
puts the collectives. Every rank draws the same random weights and keeps its shard of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from moe_fusion.errors import MissingModelsExtraError, ModelError

SEED = 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS = ("grouped_mm", "batched_mm")

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    # large enough that the experts matter in the logits
    "initializer_range": 0.1,
}
# Every sharded size is a multiple of this, the largest world size that is fused.
FAMILY_SIZE_MULTIPLE = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "head_dim": 16},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "head_dim": 16},
    "qwen2_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
    },
    "deepseek_v3": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build; picklable, so that it reaches every rank.

    Attributes:
        family: a key of :data:`FAMILIES`, unless ``config`` or ``factory`` is given.
        config: path of a transformers ``config.json``.
        factory: ``"package.module:function"``, see :func:`build_from_factory`.
        num_tokens: T, tokens of the one sequence that is run.
        dtype: the dtype of the weights, a key of :data:`DTYPES`; None is that of the file, else
            fp32.
        experts: how transformers computes the experts, one of :data:`EXPERTS`; None is its default.
        dynamic: mark the number of tokens as dynamic.
        overrides: configuration fields that replace the family's or the file's.
        expert_parallel: give each rank whole experts, by the family's plan for that.
    """

    family: str = "mixtral"
    config: Path | None = None
    factory: str | None = None
    num_tokens: int = 16
    dtype: str | None = None
    experts: str | None = None
    dynamic: bool = False
    overrides: Mapping[str, Any] | None = None
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        """Validate what does not need transformers."""
        for name, value, allowed in (
            ("family", self.family, tuple(FAMILIES)),
            ("dtype", self.dtype, (None, *DTYPES)),
            ("experts", self.experts, (None, *EXPERTS)),
        ):
            if value not in allowed:
                raise ModelError(f"{name}: expected one of {allowed}, got {value!r}")
        if self.num_tokens < 1:
            raise ModelError(f"num_tokens: expected at least 1, got {self.num_tokens}")

    @property
    def name(self) -> str:
        """What the reports call the model."""
        return self.factory or (str(self.config) if self.config else self.family)


@dataclass(frozen=True)
class BuiltModel:
    """A model and what to call it with.

    Attributes:
        module: in eval mode, sharded.
        args: positional example inputs.
        kwargs: keyword example inputs.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, function: Callable[..., Any] | None = None) -> torch.Tensor:
        """Call the model, or a compiled form of it, and return its first floating tensor."""
        called = self.module if function is None else function
        output = called(*self.args, **self.kwargs)
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor):
            return logits
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                return leaf
        raise ModelError(f"model: expected a tensor in its output, got {type(output).__name__}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose a model, for every command that builds one."""
    parser.add_argument("--tokens", type=int, default=16, metavar="T", help="tokens a step (16)")
    parser.add_argument("--dtype", choices=DTYPES, help="weights' dtype (the file's, else fp32)")
    parser.add_argument(
        "--experts", choices=EXPERTS, help="how the experts are computed (transformers' default)"
    )
    parser.add_argument(
        "--dynamic", action="store_true", help="compile with a dynamic number of tokens"
    )


def spec_from_arguments(arguments: argparse.Namespace) -> ModelSpec:
    """The spec that the options name.

    Raises:
        ModelError: an option's value is out of range.
    """
    return ModelSpec(
        family=arguments.model or "mixtral",
        config=getattr(arguments, "config", None),
        factory=getattr(arguments, "factory", None),
        num_tokens=arguments.tokens,
        dtype=arguments.dtype,
        experts=arguments.experts,
        dynamic=arguments.dynamic,
    )


def check_world_size(spec: ModelSpec, world_size: int) -> None:
    """Check what can be known before the model is built.

    Raises:
        ModelError: ``world_size`` is not positive, or does not divide a small model's sizes.
    """
    small = spec.config is None and spec.factory is None
    if small and (world_size < 1 or FAMILY_SIZE_MULTIPLE % world_size):
        raise ModelError(
            f"world size: expected a divisor of {FAMILY_SIZE_MULTIPLE} for the small models, "
            f"got {world_size}"
        )
    if world_size < 1:
        raise ModelError(f"world size: expected at least 1, got {world_size}")


def require_transformers() -> ModuleType:
    """transformers, quiet.

    Raises:
        MissingModelsExtraError: transformers, or accelerate which it loads, is missing.
    """
    for name in ("transformers", "accelerate"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise MissingModelsExtraError(name) from None
    import transformers

    # its plans name modules of other variants of a family and it warns of each
    transformers.logging.set_verbosity_error()
    module: ModuleType = transformers
    return module


def build(spec: ModelSpec, device: torch.device, *, shard: bool = True) -> BuiltModel:
    """Build the model on this rank, sharded over the default group.

    Args:
        spec: which one.
        device: where its shard and the inputs are.
        shard: False leaves the model whole, with the same weights; a factory decides for itself.

    Raises:
        MissingModelsExtraError: transformers is missing, and the spec is not a factory.
        ModelError: the configuration cannot be read, has no causal LM, or cannot be sharded.
        ModelError: a factory returned something else than a model and its inputs.
    """
    if spec.factory is not None:
        return build_from_factory(spec.factory)
    transformers = require_transformers()
    config = _configuration(transformers, spec)
    torch.manual_seed(SEED)
    model = _random_model(transformers, spec, config)
    if device.type != "cpu":
        model = model.to(device)
    if shard:
        model = _distribute(model, device, expert_parallel=spec.expert_parallel)
    model.tie_weights()
    model.eval()
    ids = torch.randint(0, config.vocab_size, (1, spec.num_tokens)).to(device)
    if spec.dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    return BuiltModel(model, (), {"input_ids": ids, "use_cache": False})


def build_from_factory(path: str) -> BuiltModel:
    """Call the user's function, which builds and shards a model over the default group.

    Args:
        path: ``"package.module:function"``; the function takes nothing and returns the model and
            its example inputs: a tuple of positional or a dict of keyword arguments.

    Raises:
        ModelError: there is no such module or function.
        ModelError: the function returned something else.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ModelError(f"factory: expected package.module:function, got {path!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; a console script does not
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"factory: expected an importable {path!r}, got: {error}") from error
    result = function()
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ModelError(f"factory: expected (model, example_inputs), got {type(result).__name__}")
    module, inputs = result
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"factory: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(inputs, tuple | list | dict):
        raise ModelError(
            f"factory: expected example inputs as a tuple or dict, got {type(inputs).__name__}"
        )
    if isinstance(inputs, dict):
        return BuiltModel(module.eval(), (), inputs)
    return BuiltModel(module.eval(), tuple(inputs), {})


def _configuration(transformers: ModuleType, spec: ModelSpec) -> Any:
    fields = {"use_cache": False, **(spec.overrides or {})}
    if spec.config is None:
        fields = {**_COMMON, **FAMILIES[spec.family], **fields}
        config = transformers.AutoConfig.for_model(spec.family, **fields)
    else:
        config = _read_configuration(transformers, spec.config, fields)
    if spec.experts is not None:
        config._experts_implementation = spec.experts
    return config


def _read_configuration(transformers: ModuleType, path: Path, fields: Mapping[str, Any]) -> Any:
    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except OSError as error:
        raise ModelError(
            f"config: expected a readable config.json, got {path}: {error.strerror}"
        ) from error
    except (ValueError, AttributeError) as error:
        raise ModelError(f"config: expected a JSON object in {path}, got: {error}") from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **fields
        )
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"config: expected a model_type that transformers {transformers.__version__} knows, "
            f"got {model_type!r} in {path}"
        ) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"config: expected a causal language model, got {model_type!r} in {path}")
    return config


def _random_model(transformers: ModuleType, spec: ModelSpec, config: Any) -> Any:
    """The whole model; weights that its configuration ties are still apart, as sharding needs."""
    from transformers.initialization import no_tie_weights

    dtype = DTYPES[spec.dtype] if spec.dtype else (config.dtype or torch.float32)
    try:
        with no_tie_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model: expected one that can be built, got: {error}") from error
    if spec.config is None:
        _randomize_vectors(model)
    return model


def _distribute(model: Any, device: torch.device, *, expert_parallel: bool) -> Any:
    """Shard ``model`` over the default group by its own plans."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    world_size = dist.get_world_size()
    if world_size == 1:
        return model
    # transformers would take the mesh's device from the machine; here the caller chooses it
    shape = (1, 1, 1, world_size)
    names = ("pp", "dp_replicate", "fsdp", "tp")
    expert_shape = (1, 1, 1, world_size) if expert_parallel else (1, 1, world_size, 1)
    expert_names = ("pp", "dp_replicate", "efsdp", "ep")
    with unset_fake_temporarily():  # a mesh reads its ranks, also when the model is of fake tensors
        mesh = TransformersDeviceMesh(
            dist.init_device_mesh(device.type, shape, mesh_dim_names=names),
            dist.init_device_mesh(device.type, expert_shape, mesh_dim_names=expert_names),
        )
    experts = {"ep_size": world_size, "ep_implementation": "all_reduce"} if expert_parallel else {}
    try:
        plan = DistributedConfig(tp_size=world_size, **experts)
        return model.maybe_distribute_model(model, plan, mesh)
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"world size: expected one that shards {type(model).__name__}, got {world_size}: "
            f"{error}"
        ) from error


@torch.no_grad()
def _randomize_vectors(model: torch.nn.Module) -> None:
    """Draw the norms' weights, which start as ones and would hide one that is left out."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
