"""What the user can choose: :class:`FusionConfig` and its environment variables."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, fields

from moe_fusion.errors import ConfigError
from moe_fusion.limits import PEER_TIMEOUT_DEFAULT_S, PEER_TIMEOUT_MAX_S

ENV_PREFIX = "MOE_FUSION_"
TAIL_KINDS = ("unfinalized", "finalized")
VLLM_UNTESTED = "vllm_untested"  # a variable of the vLLM plugin, and no field


def _env(name: str) -> str | None:
    return os.environ.get(ENV_PREFIX + name.upper())


def _env_token_ceiling() -> int | None:
    text = _env("token_ceiling")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{ENV_PREFIX}TOKEN_CEILING", "a whole number of tokens", text) from None


def _env_fuse() -> tuple[str, ...]:
    text = _env("fuse")
    if text is None:
        return TAIL_KINDS
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not set(words) <= set(TAIL_KINDS):
        raise ConfigError(f"{ENV_PREFIX}FUSE", f"a selection of {','.join(TAIL_KINDS)}", text)
    return words


def _env_strict() -> bool:
    text = _env("strict")
    if text is None:
        return False
    words = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in words:
        raise ConfigError(f"{ENV_PREFIX}STRICT", "0, 1, true or false", text)
    return words[text.lower()]


def _env_peer_timeout_s() -> float:
    text = _env("peer_timeout_s")
    if text is None:
        return PEER_TIMEOUT_DEFAULT_S
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{ENV_PREFIX}PEER_TIMEOUT_S", "a number of seconds", text) from None


@dataclass(frozen=True)
class FusionConfig:
    """What to fuse, and up to which size.

    A field that is not given takes its value from its environment variable, ``MOE_FUSION_`` and the
    field's name in capitals, and without one from the default. An unknown ``MOE_FUSION_*`` variable
    is an error, since a misspelt one would otherwise be ignored in silence.

    Attributes:
        token_ceiling: the largest number of tokens T for which a tail is fused, in tokens. ``None``
            takes the measured table of ``moe_fusion.limits``. 0 fuses nothing.
        fuse: which tails to fuse: ``"unfinalized"`` (a MoE tail whose top-k reduction is fused too)
            and ``"finalized"`` (an all_reduce of [T, H] rows: attention, a dense MLP, the
            embedding, or a MoE whose finalize was not recognised).
            ``MOE_FUSION_FUSE=unfinalized,finalized``.
        strict: a refused tail whose partial comes from a MoE producer raises ``UnfusedTailError``
            at compile time instead of being counted. ``MOE_FUSION_STRICT=1``.
        peer_timeout_s: how long a kernel waits for a peer's rows, in seconds; then its outputs are
            NaN and the next call raises ``PeerTimeoutError``. Also how long a compile waits for a
            peer's answer; then the group's tails stay unfused. ``MOE_FUSION_PEER_TIMEOUT_S=30``.

    Raises:
        ConfigError: a field or variable has a wrong value, or a variable is unknown.
    """

    token_ceiling: int | None = field(default_factory=_env_token_ceiling)
    fuse: tuple[str, ...] = field(default_factory=_env_fuse)
    strict: bool = field(default_factory=_env_strict)
    peer_timeout_s: float = field(default_factory=_env_peer_timeout_s)

    def __post_init__(self) -> None:
        """Validate every field and the names of the environment variables."""
        _reject_unknown_variables((*(f.name for f in fields(self)), VLLM_UNTESTED))
        ceiling = self.token_ceiling
        if ceiling is not None and (type(ceiling) is not int or ceiling < 0):
            raise ConfigError("token_ceiling", "None or an int >= 0, in tokens", ceiling)
        kinds = isinstance(self.fuse, (tuple, list, set, frozenset))
        if not kinds or not all(kind in TAIL_KINDS for kind in self.fuse):
            raise ConfigError("fuse", f"a selection of {TAIL_KINDS}", self.fuse)
        object.__setattr__(self, "fuse", tuple(self.fuse))
        if not isinstance(self.strict, bool):
            raise ConfigError("strict", "a bool", self.strict)
        timeout = self.peer_timeout_s
        if type(timeout) not in (int, float) or not 0.0 < timeout <= PEER_TIMEOUT_MAX_S:
            expected = f"a number of seconds > 0 and <= {PEER_TIMEOUT_MAX_S:g}"
            raise ConfigError("peer_timeout_s", expected, timeout)


_FIELD_NAMES = tuple(field.name for field in fields(FusionConfig))


def _reject_unknown_variables(known: tuple[str, ...]) -> None:
    names = {ENV_PREFIX + name.upper() for name in known}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable not in names:
            expected = f"one of {', '.join(sorted(names))}"
            raise ConfigError("environment variable", expected, variable)


_of_process: FusionConfig | None = None
_of_threads: dict[int, FusionConfig] = {}


def _thread() -> int:
    return threading.get_ident()


# Dynamo must not trace into the interpreter: in a compiled producer this is a constant.
vars(_thread)["_dynamo_marked_constant"] = True


_known_defaults: dict[tuple[str | None, ...], FusionConfig] = {}


def _defaults() -> FusionConfig:
    """The configuration of the environment: one object for as long as that stays as it is."""
    given = tuple(_env(name) for name in _FIELD_NAMES)
    if given not in _known_defaults:
        _known_defaults[given] = FusionConfig()
    return _known_defaults[given]


vars(_defaults)["_dynamo_marked_constant"] = True


def active_config() -> FusionConfig:
    """The configuration in force: this thread's, of ``fusing``; that of ``install``; the defaults.

    The kernels of a compiled model may be called from another thread than compiled it, so
    ``install`` counts for all threads; ``fusing`` blocks of two threads do not meet.
    """
    return given_config() or _defaults()


def given_config() -> FusionConfig | None:
    """The configuration of ``fusing`` or ``install``, or None: then the environment's counts."""
    return _of_threads.get(_thread()) or _of_process


def set_active_config(config: FusionConfig | None) -> FusionConfig | None:
    """Make ``config`` the process's (``None``: the defaults) and return the previous one."""
    global _of_process
    previous, _of_process = _of_process, config
    return previous


def set_thread_config(config: FusionConfig | None) -> FusionConfig | None:
    """Make ``config`` this thread's (``None``: the process's) and return the previous one."""
    previous = _of_threads.pop(_thread(), None)
    if config is not None:
        _of_threads[_thread()] = config
    return previous
