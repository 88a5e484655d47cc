"""What the op keeps from call to call, and what it makes room for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from moe_fusion.buffers import square_sum_words
from moe_fusion.config import FusionConfig, active_config, set_active_config
from moe_fusion.dispatch import _kind, _Planned
from moe_fusion.limits import DTYPES

SEGMENT_BYTES = 2048


def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def planned(group):
    return _Planned(weakref.ref(group), active_config(), None, None)


def test_a_plan_ends_with_its_group_and_is_not_the_next_ones():
    group = world()
    name, plan = group.group_name, planned(group)
    assert plan.holds(name)
    assert not plan.holds("another")
    dist.destroy_process_group()
    assert not plan.holds(name)
    del group
    gc.collect()
    assert not plan.holds(name)
    again = world()
    assert again.group_name == name
    assert not plan.holds(name)


def test_a_plan_ends_with_its_configuration():
    group = world()
    plan = planned(group)
    previous = set_active_config(FusionConfig(token_ceiling=3))
    try:
        assert not plan.holds(group.group_name)
    finally:
        set_active_config(previous)
    assert plan.holds(group.group_name)


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
    return _kind((routed, weights, given, None, None, None, None, None), 0.0, "0")


def test_a_padded_number_of_rows_is_no_kind_of_its_own():
    assert kind(6, permutation=True) == kind(128, permutation=True)
    assert kind(6, permutation=True) != kind(6, permutation=True, hidden=128)
    assert kind(6, permutation=True) != kind(6, permutation=True, dtype=torch.float16)
    assert kind(6, permutation=False) != kind(7, permutation=False)  # rows are T * K there
    assert kind(6, permutation=True) != kind(6, permutation=False)
