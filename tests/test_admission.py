"""Admission: one row for each reason, the table of ceilings, and what producers ask."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import make_fake_group

from moe_fusion import FusionConfig, admits, limits
from moe_fusion.admission import Refusal, admit, over_ceiling, token_ceiling
from moe_fusion.config import set_active_config
from moe_fusion.kernels.launch import RESIDENCY, launch_parameters
from moe_fusion.topology import Topology, known_groups, probe, resolve_group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPE_LIST = "(torch.bfloat16, torch.float16, torch.float32)"


@pytest.fixture(autouse=True)
def default_configuration():
    previous = set_active_config(None)
    yield
    set_active_config(previous)


H200 = {
    "device_type": "cuda",
    "device_name": "NVIDIA H200",
    "capability": (9, 0),
    "multiprocessors": 132,
    "symmetric_memory": "CUDA",
}


def ask(*, hidden=7168, dtype=BF16, world_size=2, device_type="cpu", top_k=8, **machine):
    topology = Topology(world_size, device_type, **machine)
    return admit(hidden, dtype, topology, top_k=top_k)


REASONS = {
    "one rank": ({"world_size": 1}, "world size: expected one of (2, 4, 8), got 1"),
    "three ranks": ({"world_size": 3}, "world size: expected one of (2, 4, 8), got 3"),
    "sixteen ranks": ({"world_size": 16}, "world size: expected one of (2, 4, 8), got 16"),
    "fp64": ({"dtype": torch.float64}, f"dtype: expected one of {DTYPE_LIST}, got torch.float64"),
    "fp8": (
        {"dtype": torch.float8_e4m3fn},
        f"dtype: expected one of {DTYPE_LIST}, got torch.float8_e4m3fn",
    ),
    "no vector load": (
        {"hidden": 7164},
        "hidden size: expected a multiple of 8 in [16, 16384], got 7164",
    ),
    "too narrow": ({"hidden": 8}, "hidden size: expected a multiple of 8 in [16, 16384], got 8"),
    "no elements": ({"hidden": 0}, "hidden size: expected a multiple of 8 in [16, 16384], got 0"),
    "too wide": (
        {"hidden": 16392},
        "hidden size: expected a multiple of 8 in [16, 16384], got 16392",
    ),
    "no experts": ({"top_k": 0}, "top-k: expected 1 to 32 experts, got 0"),
    "two hosts": ({"one_host": False}, "hosts: expected all ranks on one host, got several"),
    "no CUDA device": (
        {"device_type": "cuda"},
        "device: expected CUDA compute capability (8, 0) or later, got no CUDA device",
    ),
    "ROCm": (
        H200 | {"capability": None, "device_name": "AMD Instinct MI300X"},
        "device: expected CUDA compute capability (8, 0) or later, got AMD Instinct MI300X",
    ),
    "too old": (
        H200 | {"capability": (7, 5)},
        "device: expected CUDA compute capability (8, 0) or later, got (7, 5)",
    ),
    "no symmetric memory": (
        H200 | {"symmetric_memory": None},
        "symmetric memory: expected a backend in this build of torch, got none",
    ),
    "no peer access": (
        H200 | {"peers_reachable": False},
        "peer access: expected every rank's device to be reachable, got no access",
    ),
    "a slice of a device": (
        H200 | {"hidden": 16384, "dtype": FP32, "multiprocessors": 6},
        "multiprocessors: expected at least 7 a rank for rows of 65536 bytes, got 6",
    ),
    "a shared slice of a device": (
        H200 | {"world_size": 8, "multiprocessors": 8, "shared_device": True},
        "multiprocessors: expected at least 2 a rank for rows of 14336 bytes, got 1",
    ),
    "too many experts": ({"top_k": 33}, "top-k: expected 1 to 32 experts, got 33"),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_reason(name):
    changes, reason = REASONS[name]
    refusal = ask(**changes)
    assert refusal == Refusal(reason)
    assert str(refusal) == reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"world_size": 4},
        {"world_size": 8},
        {"dtype": FP16},
        {"dtype": FP32},
        {"hidden": 16},
        {"hidden": 16384},
        {"top_k": 1},
        {"top_k": 32},
        {"top_k": None},
        H200,
        H200 | {"capability": (8, 0)},
        H200 | {"hidden": 16384, "dtype": FP32, "multiprocessors": 7},
        H200 | {"world_size": 8, "multiprocessors": 16, "shared_device": True},
    ],
    ids=str,
)
def test_each_limit_is_inclusive(changes):
    assert ask(**changes) is None


def test_what_is_admitted_is_resident():
    """Blocks that share a row wait for each other: one that is not resident is waited for."""
    assert min(each.blocks for each in RESIDENCY.values()) == limits.RESIDENT_BLOCKS_MIN
    machines = itertools.product(limits.FUSED_WORLD_SIZES, (1, 2, 3, 6, 7, 14, 16, 132))
    for (world_size, found), dtype in itertools.product(machines, limits.DTYPES):
        for hidden in (16, 1024, 2056, 7168, 16384):
            machine = H200 | {"multiprocessors": found}
            if ask(hidden=hidden, dtype=dtype, world_size=world_size, **machine) is not None:
                continue
            for tokens in (1, 2, 64, 512):
                chosen = launch_parameters(
                    tokens, hidden, dtype, world_size, top_k=8, multiprocessors=found
                )
                residency = RESIDENCY[world_size, chosen.once]
                assert chosen.blocks <= found * residency.blocks


def test_the_refusal_of_a_large_batch():
    assert str(over_ceiling(33, 32)) == "token ceiling: expected at most 32 tokens, got 33"
    with pytest.raises(dataclasses.FrozenInstanceError):
        over_ceiling(33, 32).reason = ""


# Rows are W, columns H.
HIDDEN = (64, 2048, 2880, 4096, 7168, 16384)
DEFAULT_CEILINGS = {
    BF16: {
        2: (512, 512, 364, 256, 146, 64),
        4: (512, 448, 318, 224, 128, 56),
        8: (512, 112, 79, 56, 32, 14),
    },
    FP16: {
        2: (512, 512, 364, 256, 146, 64),
        4: (512, 448, 318, 224, 128, 56),
        8: (512, 112, 79, 56, 32, 14),
    },
    FP32: {
        2: (512, 256, 182, 128, 73, 32),
        4: (512, 224, 159, 112, 64, 28),
        8: (512, 56, 39, 28, 16, 7),
    },
}


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", DEFAULT_CEILINGS, ids=str)
def test_default_ceilings(dtype, world_size):
    got = [limits.default_token_ceiling(world_size, hidden, dtype) for hidden in HIDDEN]
    assert tuple(got) == DEFAULT_CEILINGS[dtype][world_size]


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_a_world_size_without_a_kernel_has_no_ceiling(world_size):
    assert limits.default_token_ceiling(world_size, 4096, BF16) == 0


def test_ceilings_fall_with_hidden_size_width_and_world_size():
    widths = range(16, limits.HIDDEN_DIM_MAX_ELEMENTS + 1, 8)
    for world_size, dtype in itertools.product((2, 4, 8), (BF16, FP32)):
        row = [limits.default_token_ceiling(world_size, hidden, dtype) for hidden in widths]
        assert row == sorted(row, reverse=True)
        assert 1 <= row[-1] <= row[0] == limits.TOKEN_CEILING_MAX_TOKENS
    for hidden in HIDDEN:
        for dtype in (BF16, FP32):
            row = [limits.default_token_ceiling(w, hidden, dtype) for w in (2, 4, 8)]
            assert row == sorted(row, reverse=True)
        for world_size in (2, 4, 8):
            narrow, wide = (
                limits.default_token_ceiling(world_size, hidden, dtype) for dtype in (BF16, FP32)
            )
            assert wide <= narrow


def test_the_table_has_one_row_for_each_kind_and_a_source_for_each_row():
    kinds = [
        (row.world_size, row.hidden_dim, dtype)
        for row in limits.TOKEN_CEILINGS
        for dtype in row.dtypes
    ]
    assert len(kinds) == len(set(kinds))
    assert {kind[0] for kind in kinds} == set(limits.FUSED_WORLD_SIZES)
    assert {kind[2] for kind in kinds} == set(limits.DTYPES)
    for row in limits.TOKEN_CEILINGS:
        assert row.source
        assert 1 <= row.tokens <= limits.TOKEN_CEILING_MAX_TOKENS
        for dtype in row.dtypes:
            assert admit(row.hidden_dim, dtype, Topology(row.world_size, "cpu")) is None
            found = limits.default_token_ceiling(row.world_size, row.hidden_dim, dtype)
            assert found == row.tokens


@pytest.fixture
def two_rows(monkeypatch):
    """A table whose bytes rise with H, as a measurement may give them."""
    rows = [(1024, 40), (4096, 30)]
    table = [limits.TokenCeiling(2, hidden, (BF16,), tokens, "test") for hidden, tokens in rows]
    monkeypatch.setattr(limits, "TOKEN_CEILINGS", tuple(reversed(table)))


@pytest.mark.usefixtures("two_rows")
@pytest.mark.parametrize(
    ("hidden", "ceiling"),
    [
        (16, 512),  # at most the largest of all
        (512, 80),  # the bytes of the narrowest row
        (1024, 40),
        (1032, 40),  # the bytes of the next wider row are 119 tokens: no more than a narrower H
        (3072, 40),
        (3584, 34),  # the bytes of the next wider row
        (4096, 30),
        (8192, 15),  # beyond the widest row its bytes hold
        (16384, 7),
    ],
)
def test_a_hidden_size_between_the_rows(hidden, ceiling):
    assert limits.default_token_ceiling(2, hidden, BF16) == ceiling
    assert ceiling * hidden * BF16.itemsize <= limits.default_partial_bytes(2, BF16)


@pytest.mark.usefixtures("two_rows")
def test_what_has_no_row_has_no_ceiling():
    for world_size, dtype in ((2, FP16), (4, BF16)):
        assert limits.default_token_ceiling(world_size, 1024, dtype) == 0
        assert limits.default_partial_bytes(world_size, dtype) == 0
    widths = range(16, limits.HIDDEN_DIM_MAX_ELEMENTS + 1, 8)
    row = [limits.default_token_ceiling(2, hidden, BF16) for hidden in widths]
    assert row == sorted(row, reverse=True)


def test_a_configured_ceiling_takes_the_place_of_the_table():
    topology = Topology(2, "cpu")
    for ceiling in (0, 7, 100_000):
        assert token_ceiling(7168, BF16, topology, FusionConfig(token_ceiling=ceiling)) == ceiling
    assert token_ceiling(7168, BF16, topology, FusionConfig(token_ceiling=None)) == 146


def by_name():
    return "0"


def by_group():
    return dist.group.WORLD


both_ways = pytest.mark.parametrize("group", [by_name, by_group])


@pytest.mark.usefixtures("fake_group")
@both_ways
def test_admits_up_to_the_ceiling_of_the_table(group):
    answers = {tokens: admits(tokens, 7168, BF16, group()) for tokens in (0, 1, 146, 147, 100_000)}
    assert answers == {0: True, 1: True, 146: True, 147: False, 100_000: False}


@pytest.mark.usefixtures("fake_group")
@both_ways
def test_admits_up_to_the_configured_ceiling(group):
    set_active_config(FusionConfig(token_ceiling=32))
    assert [admits(tokens, 7168, BF16, group()) for tokens in (32, 33)] == [True, False]


@pytest.mark.usefixtures("fake_group")
def test_admits_reads_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_FUSION_TOKEN_CEILING", "5")
    assert [admits(tokens, 7168, BF16, "0") for tokens in (5, 6)] == [True, False]


@pytest.mark.usefixtures("fake_group")
def test_admits_is_monotonic_in_tokens():
    answers = [admits(tokens, 2880, BF16, "0") for tokens in range(600)]
    assert answers == sorted(answers, reverse=True)
    assert sum(answers) == 365  # T = 0..364


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("hidden", "dtype"), [(7164, BF16), (7168, torch.float64), (0, BF16)])
def test_admits_nothing_that_admission_refuses(hidden, dtype):
    set_active_config(FusionConfig(token_ceiling=512))
    assert not admits(1, hidden, dtype, "0")


@pytest.mark.parametrize("world_size", [1, 3])
def test_admits_nothing_on_other_world_sizes(world_size):
    make_fake_group(world_size)
    set_active_config(FusionConfig(token_ceiling=512))
    assert not admits(1, 7168, BF16, "0")


@pytest.mark.usefixtures("fake_group")
def test_an_unknown_group():
    with pytest.raises(ValueError, match="group_name") as caught:
        admits(1, 7168, BF16, "tp")
    assert str(caught.value) == (
        "group_name: expected a process group of this process, one of ['0'], got 'tp'"
    )
    with pytest.raises(TypeError) as caught:
        admits(1, 7168, BF16, 0)
    assert str(caught.value) == "group: expected a ProcessGroup or its name (str), got int"


def test_without_any_group():
    assert known_groups() == {}
    with pytest.raises(ValueError, match=r"one of \[\], got '0'$"):
        admits(1, 7168, BF16, "0")


def test_subgroups_are_known_by_name_and_only_to_their_members():
    make_fake_group(4)
    mine, other = dist.new_group([0, 2]), dist.new_group([1, 3])
    assert other is dist.GroupMember.NON_GROUP_MEMBER
    assert resolve_group(mine.group_name) is mine
    assert sorted(known_groups()) == sorted(["0", mine.group_name])
    assert probe(mine, "cpu") == Topology(2, "cpu")
    assert probe(dist.group.WORLD, "cpu") == Topology(4, "cpu")
    # W = 2 has a higher ceiling than W = 4
    assert admits(100, 7168, BF16, mine)
    assert not admits(129, 7168, BF16, dist.group.WORLD)


@pytest.mark.usefixtures("fake_group")
@both_ways
def test_a_symbolic_number_of_tokens_is_compared_and_guarded(group):
    """In a compiled producer each side of the ceiling compiles once, without a graph break."""
    set_active_config(FusionConfig(token_ceiling=32))
    compiled_for = []

    def backend(gm, example_inputs):
        compiled_for.append(len(example_inputs))
        return gm.forward

    tensor_parallel = group()

    def produce(x):
        if admits(x.shape[0], x.shape[1], x.dtype, tensor_parallel):
            return x + 1
        return x - 1

    produce = torch.compile(produce, backend=backend, dynamic=True, fullgraph=True)
    answers = {}
    for tokens in (16, 24, 64, 32, 33, 20, 100):
        x = torch.zeros(tokens, 64)
        torch._dynamo.mark_static(x, 1)
        answers[tokens] = produce(x)[0, 0].item()
    assert answers == {16: 1, 24: 1, 64: -1, 32: 1, 33: -1, 20: 1, 100: -1}
    assert len(compiled_for) == 2


@pytest.mark.usefixtures("fake_group")
def test_a_compiled_producer_follows_the_active_configuration():
    def produce(x):
        return x + 1 if admits(x.shape[0], x.shape[1], x.dtype, "0") else x - 1

    produce = torch.compile(produce, backend="eager", fullgraph=True)
    x = torch.zeros(16, 64)
    answers = []
    for ceiling in (32, 8, 32):
        set_active_config(FusionConfig(token_ceiling=ceiling))
        answers.append(produce(x)[0, 0].item())
    assert answers == [1, -1, 1]
