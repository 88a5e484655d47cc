"""Every exception that moe-fusion raises of its own, as one tree.

    MoEFusionError
    +-- ConfigError          (ValueError)    a FusionConfig field or MOE_FUSION_* variable is wrong
    +-- UnfusedTailError     (RuntimeError)  strict mode: a tail of a MoE producer was refused
    +-- InferenceOnlyError   (RuntimeError)  a gradient was asked of an op of ours
    +-- ModelError           (ValueError)    a command was asked for a model that it cannot build
    +-- MissingModelsExtraError (ImportError)  a command needs transformers
    +-- MissingBenchExtraError (ImportError)  a plot needs matplotlib
    +-- BenchError           (RuntimeError)  this machine, or a file, does not give the measurement
    +-- RankFailedError      (RuntimeError)  a rank that the CLI started raised or died
    +-- RankTimeoutError     (RuntimeError)  ranks that the CLI started did not finish in time
    +-- RanksDisagreeError   (RuntimeError)  ranks fused differently
    +-- WrongResultError     (RuntimeError)  fused and unfused outputs differ
    +-- PeerTimeoutError     (RuntimeError)  a peer's rows did not arrive in time
    +-- NotPreparedError     (RuntimeError)  the first call of a group is inside CUDA graph capture

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
    """Backward was called through an op of this package; none has a gradient formula."""

    def __init__(self, op: str = "finalize_allreduce_rms_norm") -> None:
        super().__init__(
            f"moe_fusion::{op} is for inference only: expected no backward "
            "through it, got a call of backward(), or a compilation with gradients; "
            "compile and run the model under torch.no_grad()"
        )


class ModelError(MoEFusionError, ValueError):
    """A command was asked for a model that it cannot build; the message says why."""


class MissingModelsExtraError(MoEFusionError, ImportError):
    """A command that builds transformers models was called without the ``models`` extra."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"expected the package {module!r} to build the model, got an environment without it: "
            'pip install "moe-fusion[models]"'
        )


class MissingBenchExtraError(MoEFusionError, ImportError):
    """A plot was asked for without the ``bench`` extra."""

    def __init__(self) -> None:
        super().__init__(
            "expected the package 'matplotlib' to draw the plot, got an environment without it: "
            'pip install "moe-fusion[bench]"'
        )


class BenchError(MoEFusionError, RuntimeError):
    """A measurement cannot be made, read or drawn; the message says what was expected and got."""


class RankFailedError(MoEFusionError, RuntimeError):
    """A rank raised or died, so the whole run was ended."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} failed: {cause}")


class RankTimeoutError(MoEFusionError, RuntimeError):
    """Ranks were still running at the time limit, so the whole run was ended."""

    def __init__(self, ranks: list[int], time_limit_seconds: float) -> None:
        super().__init__(
            f"expected every rank to finish within {time_limit_seconds:g} s, got none from {ranks}"
        )


class RanksDisagreeError(MoEFusionError, RuntimeError):
    """The ranks fused differently, which would hang or be wrong on a real machine."""

    def __init__(self, what: str, values: list[object]) -> None:
        super().__init__(f"expected all ranks to agree on {what}, got {values} by rank")


class WrongResultError(MoEFusionError, RuntimeError):
    """The fused model's outputs differ from the unfused one's by more than rounding explains."""

    def __init__(self, difference: float, limit: float) -> None:
        super().__init__(
            f"fused outputs: expected a difference of at most {limit:g}, got {difference:g}"
        )


class PeerTimeoutError(MoEFusionError, RuntimeError):
    """A kernel gave up waiting for a peer; its outputs, and all later ones, are NaN.

    Attributes:
        rank: the global rank that waited.
        missing: the global ranks whose rows did not arrive.
    """

    def __init__(self, rank: int, missing: tuple[int, ...], timeout_s: float) -> None:
        self.rank = rank
        self.missing = missing
        names = ", ".join(str(r) for r in missing)
        super().__init__(
            f"rank {rank}: expected the rows of every rank within {timeout_s:g} s, "
            f"got none from rank {names}; outputs since then are NaN. The group cannot be used "
            "for fused tails again: destroy it and create it anew "
            "(MOE_FUSION_PEER_TIMEOUT_S sets the limit)"
        )


class NotPreparedError(MoEFusionError, RuntimeError):
    """A CUDA graph is being captured and the group has no workspace yet."""

    def __init__(self, group_name: str) -> None:
        super().__init__(
            f"group {group_name!r}: expected a prepared workspace, got a first call inside CUDA "
            "graph capture; call moe_fusion.prepare(group, hidden_dim, dtype) on every rank before"
        )
