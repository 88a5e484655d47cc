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
