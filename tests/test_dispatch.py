"""What the op keeps from call to call, and what it makes room for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from moe_fusion import config, dispatch
from moe_fusion.buffers import STATE_WORDS, Workspace, square_sum_words
from moe_fusion.config import FusionConfig, set_active_config
from moe_fusion.dispatch import _kind, _Planned
from moe_fusion.kernels import fused_launch
from moe_fusion.kernels.fused import fused_kernel
from moe_fusion.limits import DTYPES

SEGMENT_BYTES = 2048
PEERS = tuple(range(0x1000, 0x9000, 0x1000))
STREAM = 7


def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def workspace():
    return Workspace(
        rank=1,
        world_size=2,
        dtype=torch.bfloat16,
        capacity_bytes=1 << 20,
        peers=PEERS,
        state=torch.zeros(STATE_WORDS, dtype=torch.int64),
        square_sums=torch.zeros(64, dtype=torch.int64),
        error_word=torch.zeros(1, dtype=torch.int32),
        multiprocessors=132,
        peer_timeout_s=1.5,
        global_ranks=(0, 1),
        memory=None,
    )


def planned(group, space):
    return _Planned(weakref.ref(group), None, weakref.ref(space), None)


def test_a_plan_ends_with_its_group_and_is_not_the_next_ones():
    group, space = world(), workspace()
    name, plan = group.group_name, planned(group, space)
    assert plan.workspace_of(name) is space
    assert plan.workspace_of("another") is None
    dist.destroy_process_group()
    assert plan.workspace_of(name) is None
    del group
    gc.collect()
    assert plan.workspace_of(name) is None
    again = world()
    assert again.group_name == name
    assert plan.workspace_of(name) is None


def test_a_plan_ends_with_its_configuration():
    group, space = world(), workspace()
    plan = planned(group, space)
    previous = set_active_config(FusionConfig(token_ceiling=3))
    try:
        assert plan.workspace_of(group.group_name) is None
    finally:
        set_active_config(previous)
    assert plan.workspace_of(group.group_name) is space


def test_a_plan_does_not_keep_its_workspace():
    group, space = world(), workspace()
    plan = planned(group, space)
    del space
    gc.collect()
    assert plan.workspace_of(group.group_name) is None


class FakeKernel:
    """Stands for a kernel that was compiled for a GPU: it notes with what it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def warmup(self, *arguments, grid, **options):
        return self

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append(("hooked", *arguments))

    def run(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture
def gpu_kernel(monkeypatch):
    """Calls go the way that they go on a GPU, as far as the launch."""
    kernel = FakeKernel()
    monkeypatch.setattr(fused_launch, "fused_kernel", kernel)
    monkeypatch.setattr(fused_launch, "backend", lambda kernel: "ptx")
    monkeypatch.setattr(dispatch, "_planned", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where CPU tensors are
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    return kernel


def operands(group, *, tokens=2, gap=0):
    """Of a call with K = 3, H = 64; ``gap`` elements between the rows of the shared output."""
    half = torch.bfloat16
    routed, residual = torch.ones(8, 64, dtype=half), torch.ones(tokens, 64, dtype=half)
    shared = torch.ones(tokens, 64 + gap, dtype=half)[:, :64]
    index = torch.zeros(tokens, 3, dtype=torch.int32)
    weights, norm_weight = torch.ones(tokens, 3), torch.ones(64, dtype=half)
    tensors = (routed, weights, index, shared, None, residual, norm_weight)
    return (*tensors, 1e-6, 0.0, 2.5, 0.5, group.group_name)


def by_name(launched):
    grid, (stream, function, metadata), rest = launched[:3], launched[3:6], launched[9:]
    assert (grid[1:], stream, function, metadata) == ((1, 1), STREAM, "function", "metadata")
    return dict(zip(fused_kernel.arg_names, rest, strict=True))


def given(operands, space):
    """What the kernel must get for ``operands`` that it reads as they are."""
    routed, weights, index, shared, _, residual, norm_weight, *_ = operands
    addresses = {
        "routed": routed,
        "expert_weights": weights,
        "permutation": index,
        "shared": shared,
        "residual": residual,
        "norm_weight": norm_weight,
        "state": space.state,
        "error_word": space.error_word,
        "square_sums": space.square_sums,
    }
    return {
        **{name: tensor.data_ptr() for name, tensor in addresses.items()},
        "replicated": None,
        "output_scale_tensor": None,
        "rank": 1,
        "num_tokens": residual.shape[0],
        "shared_stride": shared.stride(0),
        "replicated_stride": 0,
        "region_bytes": 1 << 20,
        "timeout_ns": 1_500_000_000,
        "eps": 1e-6,
        "weight_bias": 0.0,
        "routed_scale": 2.5,
        "output_scale": 0.5,
        **{f"peer_{i}": address for i, address in enumerate(PEERS)},
        "TOP_K": 3,
        "H": 64,
        "W": 2,
        "BACKEND": "ptx",
    }


@pytest.fixture
def reduced(gpu_kernel, monkeypatch):
    """A call of the op over a group with a workspace, and what its kernel was launched with."""
    group, space = world(), workspace()
    asked = []
    monkeypatch.setattr(dispatch, "workspace_for", lambda *a, **k: asked.append(a) or space)

    def call(*given):
        norm_out, residual_out = dispatch.cuda_kernel(*given)
        found = by_name(gpu_kernel.launched[-1])
        assert found["norm_out"] == norm_out.data_ptr()
        assert found["residual_out"] == residual_out.data_ptr()
        assert norm_out.shape == residual_out.shape == given[5].shape
        return found

    call.group, call.space, call.asked = group, space, asked
    return call


def test_the_kernel_gets_each_argument_in_its_place(reduced):
    for tokens in (2, 5):
        first, again = (operands(reduced.group, tokens=tokens) for _ in range(2))
        for each in (first, again):
            found = reduced(*each)
            expected = given(each, reduced.space)
            assert {name: found[name] for name in expected} == expected
    assert len(reduced.asked) == 2  # the second call of a kind is a planned one


def test_a_planned_call_does_not_read_the_environment(reduced, monkeypatch):
    each = operands(reduced.group)
    reduced(*each)
    monkeypatch.setattr(config, "_env", None)
    assert reduced(*each)["routed"] == each[0].data_ptr()


def test_rows_that_begin_anywhere_are_copied(reduced):
    each = operands(reduced.group, gap=3)
    found = reduced(*each)
    expected = given(each, reduced.space) | {"shared_stride": 64}
    assert found["shared"] not in (None, expected.pop("shared"))
    assert {name: found[name] for name in expected} == expected


def test_plans_are_bounded(reduced, monkeypatch):
    monkeypatch.setattr(dispatch, "_PLANS_MAX", 3)
    for tokens in range(1, 9):
        reduced(*operands(reduced.group, tokens=tokens))
        assert len(dispatch._planned) <= 3
    assert len(reduced.asked) == 8


def test_a_profiler_that_hooks_into_launches_sees_them(gpu_kernel, reduced, monkeypatch):
    monkeypatch.setattr(fused_launch.triton.knobs.runtime, "launch_enter_hook", print)
    each = operands(reduced.group)
    dispatch.cuda_kernel(*each)
    way, *arguments = gpu_kernel.launched[-1]
    found = dict(zip(fused_kernel.arg_names, arguments, strict=True))
    expected = given(each, reduced.space)
    assert way == "hooked"
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("ceiling", [1, 512, 600, 1024, 4096])
def test_each_segment_of_each_row_has_a_word(ceiling):
    """Of any narrower row too, for as many tokens as the ceiling lets in and a slot holds."""
    for built_for in (64, 2056, 2880, 7168, 16384):
        for dtype in DTYPES:
            capacity = ceiling * built_for * dtype.itemsize
            words = square_sum_words(capacity, ceiling)
            for hidden in (16, 64, 1032, 2056, 2880, 7168, 16384):
                row = hidden * dtype.itemsize
                tokens = min(ceiling, capacity // row)
                assert tokens * -(-row // SEGMENT_BYTES) <= words


def kind(rows, *, permutation, hidden=64, dtype=torch.bfloat16):
    routed = torch.zeros(rows, hidden, dtype=dtype)
    weights = torch.zeros(2, 3)
    given = torch.zeros(2, 3, dtype=torch.int32) if permutation else None
    tensors = (routed, weights, given, None, None, None, None, None)
    kind, addresses = _kind(tensors, 0.0, "0")
    assert addresses == [None if x is None else x.data_ptr() for x in tensors]
    return kind


def test_a_padded_number_of_rows_is_no_kind_of_its_own():
    assert kind(6, permutation=True) == kind(128, permutation=True)
    assert kind(6, permutation=True) != kind(6, permutation=True, hidden=128)
    assert kind(6, permutation=True) != kind(6, permutation=True, dtype=torch.float16)
    assert kind(6, permutation=False) != kind(7, permutation=False)  # rows are T * K there
    assert kind(6, permutation=True) != kind(6, permutation=False)
