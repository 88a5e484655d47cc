"""What may be fused: a pure function of what all ranks share.

Every rank reaches the same answer, since :func:`admit` reads its arguments only. Producers, the
pass and the op ask this module and nothing else, so that the three can't disagree.
"""

from __future__ import annotations

import sys
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


def capacity_bytes(
    hidden_dim: int, dtype: torch.dtype, topology: Topology, config: FusionConfig
) -> int:
    """Bytes of one rank's partial [T, H] at the ceiling: what a slot has to hold of each rank.

    With the table's ceilings it is the same for every H, so one workspace serves all layers.
    """
    if config.token_ceiling is None:
        return limits.default_partial_bytes(topology.world_size, dtype)
    return config.token_ceiling * hidden_dim * dtype.itemsize


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
    refusal = _refuse_machine(topology)
    if refusal is not None:
        return refusal
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
    return _refuse_width(hidden_dim * dtype.itemsize, topology)


def _refuse_width(row_bytes: int, topology: Topology) -> Refusal | None:
    """Whether a rank's multiprocessors hold all blocks of one row at once, which it needs."""
    blocks = -(-row_bytes // limits.SEGMENT_BYTES)
    needed, found = -(-blocks // limits.RESIDENT_BLOCKS_MIN), topology.own_multiprocessors
    if topology.device_type != "cuda" or found >= needed:
        return None
    return Refusal(
        f"multiprocessors: expected at least {needed} a rank for rows of {row_bytes} bytes, "
        f"got {found}"
    )


def _refuse_machine(topology: Topology) -> Refusal | None:
    """Whether the machine can run the fused kernel. On the CPU the op is the reference."""
    if not topology.one_host:
        return Refusal("hosts: expected all ranks on one host, got several")
    if topology.device_type != "cuda":
        return None
    needed = limits.COMPUTE_CAPABILITY_MIN
    if topology.capability is None or topology.capability < needed:
        return Refusal(
            f"device: expected CUDA compute capability {needed} or later, "
            f"got {topology.capability or topology.device_name or 'no CUDA device'}"
        )
    if topology.symmetric_memory is None:
        return Refusal("symmetric memory: expected a backend in this build of torch, got none")
    if not topology.peers_reachable:
        return Refusal("peer access: expected every rank's device to be reachable, got no access")
    return None


def over_ceiling(num_tokens: object, ceiling: int) -> Refusal:
    """The refusal of a batch that is larger than the ceiling."""
    return Refusal(f"token ceiling: expected at most {ceiling} tokens, got {num_tokens}")


def admits(
    num_tokens: int, hidden_dim: int, dtype: torch.dtype, group: str | dist.ProcessGroup
) -> bool:
    """Whether a producer may leave its output unfinalized: a fused consumer can take it.

    Args:
        num_tokens: T; a ``SymInt`` is compared, so that the compiled graph is guarded. Where the
            user declared a range that crosses the ceiling (``mark_dynamic(..., max=)``) a guard
            would contradict it: the answer is yes, and the op chooses its path in each call.
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
    return ceiling > 0 and _at_most(num_tokens, ceiling)


def _at_most(num_tokens: int, ceiling: int) -> bool:
    if not (torch.compiler.is_compiling() or isinstance(num_tokens, torch.SymInt)):
        return num_tokens <= ceiling
    # Not at the head of the file: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(num_tokens > ceiling):
        return False
    # Nobody has declared an upper bound for a size that may be larger than any tensor's.
    return statically_known_true(num_tokens < sys.maxsize) or num_tokens <= ceiling
