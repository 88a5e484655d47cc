"""What may be fused: a pure function of what all ranks share.

Every rank reaches the same answer, since :func:`admit` reads its arguments only. Producers, the
pass and the op ask this module and nothing else, so that the three can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_fusion import limits
from moe_fusion.config import FusionConfig, active_config
from moe_fusion.topology import Topology, probe, resolve_group


@dataclass(frozen=True)
class Refusal:
    """Why something stays as it was: one sentence, as a value, never an exception."""

    reason: str

    def __str__(self) -> str:
        """The sentence."""
        return self.reason


def token_ceiling(
    hidden_dim: int, dtype: torch.dtype, topology: Topology, config: FusionConfig
) -> int:
    """The largest T that is fused, in tokens: the configured one, else the table's."""
    if config.token_ceiling is not None:
        return config.token_ceiling
    return limits.default_token_ceiling(topology.world_size, hidden_dim, dtype)


def admit(
    hidden_dim: int,
    dtype: torch.dtype,
    topology: Topology,
    *,
    top_k: int | None = None,
) -> Refusal | None:
    """Whether tails of this kind can be fused at all, whatever their number of tokens.

    Args:
        hidden_dim: H, elements in a row.
        dtype: the activation dtype.
        topology: the group's facts.
        top_k: K, experts a token; None for a tail without a finalize.

    Returns:
        None, or the reason against.
    """
    if topology.world_size not in limits.FUSED_WORLD_SIZES:
        return Refusal(
            f"world size: expected one of {limits.FUSED_WORLD_SIZES}, got {topology.world_size}"
        )
    if dtype not in limits.DTYPES:
        return Refusal(f"dtype: expected one of {limits.DTYPES}, got {dtype}")
    multiple = limits.HIDDEN_DIM_MULTIPLE_ELEMENTS
    low, high = limits.HIDDEN_DIM_MIN_ELEMENTS, limits.HIDDEN_DIM_MAX_ELEMENTS
    if hidden_dim % multiple or not low <= hidden_dim <= high:
        return Refusal(
            f"hidden size: expected a multiple of {multiple} in [{low}, {high}], got {hidden_dim}"
        )
    if top_k is not None and not 1 <= top_k <= limits.TOP_K_MAX_EXPERTS:
        return Refusal(f"top-k: expected 1 to {limits.TOP_K_MAX_EXPERTS} experts, got {top_k}")
    return None


def over_ceiling(num_tokens: object, ceiling: int) -> Refusal:
    """The refusal of a batch that is larger than the ceiling."""
    return Refusal(f"token ceiling: expected at most {ceiling} tokens, got {num_tokens}")


def admits(
    num_tokens: int, hidden_dim: int, dtype: torch.dtype, group: str | dist.ProcessGroup
) -> bool:
    """Whether a producer may leave its output unfinalized: a fused consumer can take it.

    Args:
        num_tokens: T; a ``SymInt`` is compared, so that the compiled graph is guarded.
        hidden_dim: H, elements in a row.
        dtype: the activation dtype.
        group: the tensor-parallel group, or its name.

    Raises:
        ValueError: this process has no such group.
        TypeError: ``group`` is neither a name nor a group.
    """
    topology = probe(resolve_group(group))
    if admit(hidden_dim, dtype, topology) is not None:
        return False
    ceiling = token_ceiling(hidden_dim, dtype, topology, active_config())
    return ceiling > 0 and num_tokens <= ceiling
