"""Every limit, once: the unit is in its name, the source on the line below it.

A new limit goes here, is tested by :mod:`moe_fusion.admission`, and has one row in
``tests/test_admission.py``.
"""

from __future__ import annotations

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

PARTIAL_CEILING_BYTES = {2: 2 << 20, 4: 1 << 20, 8: 256 << 10}
# Source: bytes of one rank's partial [T, H] up to which a fused kernel was seen to win, by world
# size: 2 and 4 from prototype timings on one H200 (T <= 128 and T <= 64 at H = 7168, bf16); 8 from
# vLLM issue 44079, where the fused all-reduce-norm loses from 256 KiB on at TP 8 on H200.

SLOTS_OF_A_WORKSPACE = 3
# Source: with two, a peer's next rows can land in a slot that is yet to be cleared
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

COMPUTE_CAPABILITY_MIN = (8, 0)
# Source: the oldest target that the kernels are compiled for in tests (bf16 arithmetic).


def default_token_ceiling(world_size: int, hidden_dim: int, dtype: torch.dtype) -> int:
    """Tokens up to which the fused path is used by default.

    Args:
        world_size: ranks in the tensor-parallel group.
        hidden_dim: H, elements in a row.
        dtype: the activation dtype.

    Returns:
        The ceiling in tokens; 0 for a world size that has no fused path.
    """
    budget = PARTIAL_CEILING_BYTES.get(world_size, 0)
    return min(budget // (hidden_dim * dtype.itemsize), TOKEN_CEILING_MAX_TOKENS)
