"""Every exception that moe-fusion raises of its own, as one tree.

    MoEFusionError
    +-- ConfigError          (ValueError)    a FusionConfig field or MOE_FUSION_* variable is wrong
    +-- UnfusedTailError     (RuntimeError)  strict mode: a tail of a MoE producer was refused
    +-- InferenceOnlyError   (RuntimeError)  a gradient was asked of the fused op

Wrong arguments to a function are plain ``TypeError`` (kind or dtype) and ``ValueError`` (shape,
device or value), always with what was expected and what was got.
"""

from __future__ import annotations


class MoEFusionError(Exception):
    """Base class of moe-fusion's own errors."""


class ConfigError(MoEFusionError, ValueError):
    """A configuration value or ``MOE_FUSION_*`` environment variable cannot be used."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got!r}")


class UnfusedTailError(MoEFusionError, RuntimeError):
    """``FusionConfig(strict=True)`` and a tail that starts at a MoE producer was not fused."""

    def __init__(self, anchor: str, reason: str) -> None:
        super().__init__(f"strict: the MoE tail at {anchor} was not fused: {reason}")


class InferenceOnlyError(MoEFusionError, RuntimeError):
    """Backward was called through the fused op, which has no gradient formula."""

    def __init__(self) -> None:
        super().__init__(
            "moe_fusion::finalize_allreduce_rms_norm is for inference only: expected no backward "
            "through it, got a call of backward(); run the model under torch.no_grad()"
        )
