"""The vLLM plugin: adds the pass to vLLM's own passes, where vLLM is one that was tested.

vLLM loads :func:`register` through the entry point ``vllm.general_plugins`` in each of its
processes. Nothing here imports vLLM before that.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any

from moe_fusion.admission import token_ceiling
from moe_fusion.config import ENV_PREFIX, VLLM_UNTESTED, FusionConfig
from moe_fusion.errors import ConfigError
from moe_fusion.integrations.vllm_ops import register_ops
from moe_fusion.topology import Topology

logger = logging.getLogger("moe_fusion.vllm")

TESTED_VERSIONS = ("0.33.0",)
TESTED_PLATFORMS = ("cpu",)
UNTESTED_VARIABLE = ENV_PREFIX + VLLM_UNTESTED.upper()


def register() -> None:
    """Add the pass to every configuration that vLLM makes from now on, in this process.

    Calling it again changes nothing. Where vLLM's version or platform is not one that was tested,
    or something else is in the way, it logs one line and does nothing; it never raises, so that
    vLLM starts whatever happens here.
    """
    try:
        reason = _reason_against()
        if reason is None:
            register_ops()
            _hook_configurations()
    except Exception as error:  # noqa: BLE001 - an installed plugin must not keep vLLM from starting
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("moe_fusion does nothing in this vLLM: %s", reason)


def _reason_against() -> str | None:
    from vllm.platforms import current_platform

    version = importlib.metadata.version("vllm")
    return untested(version, current_platform.device_type)


def untested(version: str, platform: str) -> str | None:
    """Why the pass stays out of this vLLM, or None.

    Args:
        version: vLLM's version; what follows a ``+`` names a build and is not looked at.
        platform: the device type of vLLM's platform, such as ``"cuda"``.
    """
    if os.environ.get(UNTESTED_VARIABLE) == "1":
        return None
    hint = f"{UNTESTED_VARIABLE}=1 tries it all the same"
    if version.partition("+")[0] not in TESTED_VERSIONS:
        return f"version: expected one of {TESTED_VERSIONS}, got {version} ({hint})"
    if platform not in TESTED_PLATFORMS:
        return f"platform: expected one of {TESTED_PLATFORMS}, got {platform!r} ({hint})"
    return None


def _hook_configurations() -> None:
    """Let vLLM's platform, which completes each configuration, add the pass to it."""
    from vllm.platforms import current_platform

    complete = current_platform.check_and_update_config
    if getattr(complete, "adds_moe_fusion", False):
        return

    def complete_with_fusion(vllm_config: Any) -> None:
        complete(vllm_config)
        add_pass(vllm_config)

    complete_with_fusion.adds_moe_fusion = True
    current_platform.check_and_update_config = complete_with_fusion


def add_pass(vllm_config: Any) -> None:
    """Put the pass where ``vllm_config`` keeps a user's own pass, and run that one after ours.

    vLLM runs its own passes first, then what is there, and takes its ``uuid`` into its own cache's
    key and into Inductor's. Where the model is known, the token ceiling becomes a boundary of
    vLLM's compile ranges, so that the graph for more tokens stays as it was. A configuration with
    one rank of tensor parallelism is left alone.

    Args:
        vllm_config: a ``VllmConfig`` that vLLM is completing.
    """
    from vllm.platforms import current_platform

    from moe_fusion.integrations.vllm_pass import VllmFusionPass

    world_size = vllm_config.parallel_config.tensor_parallel_size
    if world_size == 1:
        return
    try:
        config = FusionConfig()
    except ConfigError as error:
        logger.warning("moe_fusion does nothing for this configuration: %s", error)
        return
    compilation = vllm_config.compilation_config
    passes, key = compilation.inductor_compile_config, current_platform.pass_key
    if isinstance(passes.get(key), VllmFusionPass):
        return
    passes[key] = VllmFusionPass(config, then=passes.get(key))
    if vllm_config.model_config is not None:
        model = vllm_config.model_config
        topology = Topology(world_size, current_platform.device_type)
        ceiling = token_ceiling(model.get_hidden_size(), model.dtype, topology, config)
        endpoints = compilation.compile_ranges_endpoints or []
        compilation.compile_ranges_endpoints = sorted({*endpoints, ceiling} - {0})
    logger.info("moe_fusion is vLLM's %s", key)
