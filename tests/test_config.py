"""FusionConfig: defaults, environment variables, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import os

import pytest

from moe_fusion import ConfigError, FusionConfig, MoEFusionError
from moe_fusion.config import active_config, set_active_config


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MOE_FUSION_")]:
        monkeypatch.delenv(name)


def test_defaults():
    config = FusionConfig()
    assert config == FusionConfig(None, ("unfinalized", "finalized"), False, 30.0)
    assert dataclasses.asdict(config) == {
        "token_ceiling": None,
        "fuse": ("unfinalized", "finalized"),
        "strict": False,
        "peer_timeout_s": 30.0,
    }


VARIABLES = [
    ("TOKEN_CEILING", "48", "token_ceiling", 48),
    ("TOKEN_CEILING", " 0 ", "token_ceiling", 0),
    ("FUSE", "finalized", "fuse", ("finalized",)),
    ("FUSE", " finalized , unfinalized,", "fuse", ("finalized", "unfinalized")),
    ("FUSE", "", "fuse", ()),
    ("STRICT", "1", "strict", True),
    ("STRICT", "True", "strict", True),
    ("STRICT", "0", "strict", False),
    ("STRICT", "false", "strict", False),
    ("PEER_TIMEOUT_S", "2.5", "peer_timeout_s", 2.5),
]


@pytest.mark.parametrize(("variable", "text", "field", "value"), VARIABLES)
def test_a_variable_overrides_the_default(monkeypatch, variable, text, field, value):
    monkeypatch.setenv(f"MOE_FUSION_{variable}", text)
    others = {f.name for f in dataclasses.fields(FusionConfig)} - {field}
    config = FusionConfig()
    assert getattr(config, field) == value
    monkeypatch.delenv(f"MOE_FUSION_{variable}")
    assert all(getattr(config, name) == getattr(FusionConfig(), name) for name in others)


def test_an_argument_wins_over_its_variable(monkeypatch):
    for name, text in (("TOKEN_CEILING", "48"), ("FUSE", "finalized"), ("STRICT", "1")):
        monkeypatch.setenv(f"MOE_FUSION_{name}", text)
    config = FusionConfig(token_ceiling=7, fuse=("unfinalized",), strict=False)
    assert dataclasses.astuple(config) == (7, ("unfinalized",), False, 30.0)
    assert FusionConfig(token_ceiling=None).token_ceiling is None
    assert FusionConfig(token_ceiling=7).fuse == ("finalized",)


def test_an_argument_hides_a_wrong_variable(monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "many")
    assert FusionConfig(token_ceiling=7).token_ceiling == 7


def test_an_unknown_variable_is_an_error_that_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CIELING", "48")
    for arguments in ({}, {"token_ceiling": 7, "fuse": (), "strict": True}):
        with pytest.raises(ConfigError) as caught:
            FusionConfig(**arguments)
        assert str(caught.value) == (
            "environment variable: expected one of MOE_FUSION_FUSE, MOE_FUSION_PEER_TIMEOUT_S, "
            "MOE_FUSION_STRICT, MOE_FUSION_TOKEN_CEILING, MOE_FUSION_VLLM_UNTESTED, "
            "got 'MOE_FUSION_TOKEN_CIELING'"
        )


SECONDS = "a number of seconds > 0 and <= 86400"
WRONG = [
    ({"peer_timeout_s": 0}, f"peer_timeout_s: expected {SECONDS}, got 0"),
    ({"peer_timeout_s": 1e6}, f"peer_timeout_s: expected {SECONDS}, got 1000000.0"),
    ({"peer_timeout_s": float("nan")}, f"peer_timeout_s: expected {SECONDS}, got nan"),
    ({"peer_timeout_s": "30"}, f"peer_timeout_s: expected {SECONDS}, got '30'"),
    ({"token_ceiling": -1}, "token_ceiling: expected None or an int >= 0, in tokens, got -1"),
    ({"token_ceiling": 32.0}, "token_ceiling: expected None or an int >= 0, in tokens, got 32.0"),
    ({"token_ceiling": True}, "token_ceiling: expected None or an int >= 0, in tokens, got True"),
    ({"token_ceiling": "32"}, "token_ceiling: expected None or an int >= 0, in tokens, got '32'"),
    (
        {"fuse": ("attention",)},
        "fuse: expected a selection of ('unfinalized', 'finalized'), got ('attention',)",
    ),
    (
        {"fuse": "unfinalized"},
        "fuse: expected a selection of ('unfinalized', 'finalized'), got 'unfinalized'",
    ),
    ({"fuse": None}, "fuse: expected a selection of ('unfinalized', 'finalized'), got None"),
    ({"fuse": ([],)}, "fuse: expected a selection of ('unfinalized', 'finalized'), got ([],)"),
    ({"peer_timeout_s": True}, f"peer_timeout_s: expected {SECONDS}, got True"),
    ({"strict": 1}, "strict: expected a bool, got 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_values(arguments, message):
    with pytest.raises(ConfigError) as caught:
        FusionConfig(**arguments)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MoEFusionError)


WRONG_VARIABLES = [
    (
        "TOKEN_CEILING",
        "32.5",
        "MOE_FUSION_TOKEN_CEILING: expected a whole number of tokens, got '32.5'",
    ),
    ("TOKEN_CEILING", "", "MOE_FUSION_TOKEN_CEILING: expected a whole number of tokens, got ''"),
    ("TOKEN_CEILING", "-1", "token_ceiling: expected None or an int >= 0, in tokens, got -1"),
    ("STRICT", "yes", "MOE_FUSION_STRICT: expected 0, 1, true or false, got 'yes'"),
    (
        "FUSE",
        "finalised",
        "MOE_FUSION_FUSE: expected a selection of unfinalized,finalized, got 'finalised'",
    ),
]


@pytest.mark.parametrize(("variable", "text", "message"), WRONG_VARIABLES)
def test_wrong_variables(monkeypatch, variable, text, message):
    monkeypatch.setenv(f"MOE_FUSION_{variable}", text)
    with pytest.raises(ConfigError) as caught:
        FusionConfig()
    assert str(caught.value) == message


def test_it_is_frozen_and_hashable():
    config = FusionConfig(fuse=["finalized"])
    assert config.fuse == ("finalized",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True
    assert {config: 1}[FusionConfig(fuse=("finalized",))] == 1


def test_every_field_is_documented():
    for field in dataclasses.fields(FusionConfig):
        assert f"        {field.name}: " in FusionConfig.__doc__


def test_the_active_configuration_defaults_to_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "48")
    assert active_config().token_ceiling == 48
    first, second = FusionConfig(token_ceiling=1), FusionConfig(token_ceiling=2)
    try:
        assert set_active_config(first) is None
        assert set_active_config(second) is first
        assert active_config() is second
    finally:
        assert set_active_config(None) is second
    assert active_config().token_ceiling == 48
