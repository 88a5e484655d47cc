"""Every limit, once: the unit is in its name, the source on the line below it.

A new limit goes here, is tested by :mod:`moe_fusion.admission`, and has one row in
``tests/test_admission.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FUSED_WORLD_SIZES = (2, 4, 8)
# Source: docs/guards.md; the exchange is unrolled over the peers of one NVLink host.

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Source: the activation dtypes for which the kernels are compiled and tested.

HIDDEN_DIM_MULTIPLE_ELEMENTS = 8
# Source: a 16-byte load of a 16-bit dtype.

HIDDEN_DIM_MIN_ELEMENTS = 16
# Source: two 16-byte loads a row, the narrowest row that is tested.

HIDDEN_DIM_MAX_ELEMENTS = 16384
# Source: one row stays in the registers of one block; the widest row that is tested.

TOP_K_MAX_EXPERTS = 32
# Source: the widest top-k that is tested (published models stop at 22).

TOKEN_CEILING_MAX_TOKENS = 512
# Source: the workspace for it at H = 16384, W = 8, fp32 is 3 x 256 MiB a rank.


@dataclass(frozen=True)
class TokenCeiling:
    """One row of the table of token ceilings.

    Attributes:
        world_size: W, ranks in the group.
        hidden_dim: H, elements in a row.
        dtypes: the activation dtypes that the row is for.
        tokens: the largest T for which the fused kernel is to be used.
        source: where the number comes from.
    """

    world_size: int
    hidden_dim: int
    dtypes: tuple[torch.dtype, ...]
    tokens: int
    source: str


_16_BIT = (torch.bfloat16, torch.float16)
_32_BIT = (torch.float32,)
_W2 = "2 MiB a partial: on an H200 15.7 us at T = 128, H = 7168; unfused 50, without an all_reduce"
_W4 = "1.75 MiB a partial: on a quarter of an H200 37 us; unfused on a whole one 50, likewise"
_W8 = "448 KiB a partial: on an eighth of an H200 18.5 us; unfused on a whole one 18.3, likewise"
# Source: docs/benchmarks.md; the others in proportion to the bytes.

TOKEN_CEILINGS = (
    TokenCeiling(2, 2048, _16_BIT, 512, _W2),
    TokenCeiling(2, 2880, _16_BIT, 364, _W2),
    TokenCeiling(2, 4096, _16_BIT, 256, _W2),
    TokenCeiling(2, 7168, _16_BIT, 146, _W2),
    TokenCeiling(2, 16384, _16_BIT, 64, _W2),
    TokenCeiling(4, 2048, _16_BIT, 448, _W4),
    TokenCeiling(4, 2880, _16_BIT, 318, _W4),
    TokenCeiling(4, 4096, _16_BIT, 224, _W4),
    TokenCeiling(4, 7168, _16_BIT, 128, _W4),
    TokenCeiling(4, 16384, _16_BIT, 56, _W4),
    TokenCeiling(8, 2048, _16_BIT, 112, _W8),
    TokenCeiling(8, 2880, _16_BIT, 79, _W8),
    TokenCeiling(8, 4096, _16_BIT, 56, _W8),
    TokenCeiling(8, 7168, _16_BIT, 32, _W8),
    TokenCeiling(8, 16384, _16_BIT, 14, _W8),
    TokenCeiling(2, 2048, _32_BIT, 256, _W2),
    TokenCeiling(2, 2880, _32_BIT, 182, _W2),
    TokenCeiling(2, 4096, _32_BIT, 128, _W2),
    TokenCeiling(2, 7168, _32_BIT, 73, _W2),
    TokenCeiling(2, 16384, _32_BIT, 32, _W2),
    TokenCeiling(4, 2048, _32_BIT, 224, _W4),
    TokenCeiling(4, 2880, _32_BIT, 159, _W4),
    TokenCeiling(4, 4096, _32_BIT, 112, _W4),
    TokenCeiling(4, 7168, _32_BIT, 64, _W4),
    TokenCeiling(4, 16384, _32_BIT, 28, _W4),
    TokenCeiling(8, 2048, _32_BIT, 56, _W8),
    TokenCeiling(8, 2880, _32_BIT, 39, _W8),
    TokenCeiling(8, 4096, _32_BIT, 28, _W8),
    TokenCeiling(8, 7168, _32_BIT, 16, _W8),
    TokenCeiling(8, 16384, _32_BIT, 7, _W8),
)
# Source: each row's own. Within one W and dtype, tokens must not rise with H (docs/guards.md).

SLOTS_OF_A_WORKSPACE = 2
# Source: with one, a peer's next rows can land on rows that are yet to be read
# (tests/test_exchange_model.py shows the interleaving).

PEER_TIMEOUT_DEFAULT_S = 30.0
# Source: far above a compile or a checkpoint stall of one rank, far below a scheduler's patience.

PEER_TIMEOUT_MAX_S = 86_400.0
# Source: a day; in nanoseconds, added to the device's clock, it is far from 2 ** 63.

BUILD_TIMEOUT_S = 5.0
# Source: a rendezvous of 8 ranks takes about a second, and one rank's failure has to put every
# rank on the composite path within 10 s.

BALLOT_POLL_INTERVAL_S = 0.005
# Source: a store answers in about 0.1 ms, and a vote happens once for each group.

ANSWER_GRACE_S = 1.0
# Source: far above the time between ranks that start a compile together, far below a compile; a
# rank waits for it once, where it would otherwise not use the compile caches.

SEGMENT_BYTES = 2048
# Source: of a row, the share of one block; one 16-byte unit for each of its 128 threads.

RESIDENT_BLOCKS_MIN = 5
# Source: blocks that one multiprocessor holds at least (moe_fusion.kernels.launch.RESIDENCY). The
# blocks that share a row wait for each other, so all of them must be resident.

COMPUTE_CAPABILITY_MIN = (8, 0)
# Source: the oldest target that the kernels are compiled for in tests (bf16 arithmetic).


def ceilings_for(world_size: int, dtype: torch.dtype) -> tuple[TokenCeiling, ...]:
    """The rows of the table for one world size and dtype, from the narrowest H to the widest."""
    rows = (r for r in TOKEN_CEILINGS if r.world_size == world_size and dtype in r.dtypes)
    return tuple(sorted(rows, key=lambda row: row.hidden_dim))


def default_token_ceiling(world_size: int, hidden_dim: int, dtype: torch.dtype) -> int:
    """Tokens up to which the fused path is used by default.

    An H that has no row takes the bytes of the next wider row, and no more tokens than the next
    narrower one, so that the ceiling never rises with H. Beyond the widest row its bytes hold.

    Args:
        world_size: ranks in the tensor-parallel group.
        hidden_dim: H, elements in a row.
        dtype: the activation dtype.

    Returns:
        The ceiling in tokens; 0 for a world size or dtype that has no row.
    """
    rows = ceilings_for(world_size, dtype)
    if not rows:
        return 0
    narrower = [row.tokens for row in rows if row.hidden_dim <= hidden_dim]
    wider = next((row for row in rows if row.hidden_dim >= hidden_dim), rows[-1])
    most = min([TOKEN_CEILING_MAX_TOKENS, *narrower])
    return min(most, wider.tokens * wider.hidden_dim // hidden_dim)


def default_partial_bytes(world_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's partial [T, H] at the default ceiling, at most, whatever H is."""
    rows = ceilings_for(world_size, dtype)
    return max((row.tokens * row.hidden_dim * dtype.itemsize for row in rows), default=0)
