"""moe-fusion: the tail of a tensor-parallel MoE layer, fused by a torch.compile pass.

    import moe_fusion
    report = moe_fusion.install()
    model = torch.compile(model)

Importing this package needs torch alone; the pass, the op and everything below them are imported
when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_fusion.admission import admits
from moe_fusion.config import FusionConfig
from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput
from moe_fusion.errors import (
    ConfigError,
    InferenceOnlyError,
    MoEFusionError,
    NotPreparedError,
    PeerTimeoutError,
    UnfusedTailError,
)

if TYPE_CHECKING:
    from moe_fusion.consumer import MoETailRMSNorm, finalize_allreduce_rms_norm
    from moe_fusion.passes.custom_ops import (
        register_add_rms_norm,
        register_all_reduce,
        register_rms_norm,
        unregister_op,
    )
    from moe_fusion.passes.fusion_pass import MoEFusionPass
    from moe_fusion.passes.install import fusing, install, uninstall
    from moe_fusion.passes.report import FusionReport
    from moe_fusion.workspace import check, prepare

_LAZY = {
    "FusionReport": "moe_fusion.passes.report",
    "MoEFusionPass": "moe_fusion.passes.fusion_pass",
    "MoETailRMSNorm": "moe_fusion.consumer",
    "check": "moe_fusion.workspace",
    "finalize_allreduce_rms_norm": "moe_fusion.consumer",
    "fusing": "moe_fusion.passes.install",
    "install": "moe_fusion.passes.install",
    "prepare": "moe_fusion.workspace",
    "register_add_rms_norm": "moe_fusion.passes.custom_ops",
    "register_all_reduce": "moe_fusion.passes.custom_ops",
    "register_rms_norm": "moe_fusion.passes.custom_ops",
    "uninstall": "moe_fusion.passes.install",
    "unregister_op": "moe_fusion.passes.custom_ops",
}

__all__ = [
    "ConfigError",
    "FusionConfig",
    "FusionReport",
    "InferenceOnlyError",
    "MoEFusionError",
    "MoEFusionPass",
    "MoEOutput",
    "MoETailRMSNorm",
    "NotPreparedError",
    "PeerTimeoutError",
    "UnfinalizedMoEOutput",
    "UnfusedTailError",
    "admits",
    "check",
    "finalize_allreduce_rms_norm",
    "fusing",
    "install",
    "prepare",
    "register_add_rms_norm",
    "register_all_reduce",
    "register_rms_norm",
    "uninstall",
    "unregister_op",
]


def __getattr__(name: str) -> Any:
    """Import the pass side of the package when one of its names is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
