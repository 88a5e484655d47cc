"""The pass as vLLM wants it: an ``InductorPass`` whose ``uuid`` is text. Needs vLLM to import."""

from __future__ import annotations

import secrets
import sys
from typing import Any

from torch.fx import Graph
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

from moe_fusion.config import FusionConfig
from moe_fusion.integrations.vllm_ops import device_group_names
from moe_fusion.passes.fusion_pass import MoEFusionPass
from moe_fusion.passes.identity import cache_key
from moe_fusion.passes.report import FusionReport

# What a graph serves in those of vLLM's modes that compile one graph and tell no range.
ANY_TOKENS = range(1, sys.maxsize)


class VllmFusionPass(InductorPass):  # type: ignore[misc]  # mypy does not follow vLLM
    """Fuses tails in a graph that vLLM compiles for a range of numbers of tokens.

    vLLM drops the guards of what it compiles, so the pass records none: which tails are fused
    follows from the range, and where that crosses the token ceiling the op chooses its path in each
    call.

    Args:
        config: what to fuse; the environment's, which the op reads too when a graph runs.
        then: a user's own pass, which runs after ours.
    """

    def __init__(self, config: FusionConfig, then: InductorPass | None = None) -> None:
        self.fusion = MoEFusionPass(config)
        self.then = then

    @property
    def report(self) -> FusionReport:
        """What the pass has done so far."""
        return self.fusion.report

    def __call__(self, graph: Graph) -> None:
        """Rewrite ``graph`` in place, for the range of the pass context."""
        served = _compile_range()
        self.fusion.served = ANY_TOKENS if served is None else range(served.start, served.end + 1)
        self.fusion(graph)
        if self.then is not None and (served is None or self.then.is_applicable_for_range(served)):
            self.then(graph)

    def uuid(self) -> str:
        """Identifies the pass in the keys of vLLM's cache and of Inductor's.

        Covers what :meth:`MoEFusionPass.uuid` does but for the range, which is in vLLM's own keys,
        torch.distributed's names of vLLM's groups, which are in the rewritten graphs, and the
        user's own pass. While a rank has not answered, it is another text at every call, since vLLM
        has no word for what is not to be cached.
        """
        fusion = cache_key(self.fusion.config) or secrets.token_bytes()
        facts: dict[Any, Any] = {
            "fusion": fusion.hex(),
            "groups": device_group_names(),
            "then": None if self.then is None else str(self.then.uuid()),
        }
        return str(self.hash_dict(facts))


def _compile_range() -> Any:
    """The numbers of tokens that vLLM compiles for, or None where it does not say."""
    try:
        return get_pass_context().compile_range
    except AssertionError:  # how vLLM says that there is no context
        return None
