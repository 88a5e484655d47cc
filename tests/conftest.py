"""Fixtures that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rank_pool import collect_seldom

torch.set_num_threads(1)
collect_seldom()
# Inductor's pool of compile workers costs more than the few kernels that the tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# To find out which vector instructions the compiler knows takes longer than the kernels do.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Each test starts without a process group, a configuration or compiled code."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """New memory holds NaN, so that reading it before writing shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)


# Names and orders of nodes are those of the torch that CI pins; others number them otherwise.
RECORDED_GRAPHS = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="graphs are recorded with torch 2.13"
)


@pytest.fixture
def fake_group() -> int:
    """A fake group of two, of which this process is rank 0: its all_reduce changes nothing."""
    return make_fake_group(2)


@pytest.fixture
def registered_ops() -> Iterator[None]:
    """The ops of ``custom_dialect`` are registered, and forgotten after the test."""
    from custom_checks import register_everything

    from moe_fusion.passes import custom_ops

    register_everything()
    yield
    custom_ops._registered.clear()


def make_fake_group(world_size: int) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return world_size


@pytest.fixture
def empty_slot() -> Iterator[None]:
    """Nothing is installed before the test and after it."""
    import torch._inductor.config as inductor_config

    import moe_fusion
    from moe_fusion.config import active_config

    with inductor_config.patch(post_grad_custom_pre_pass=None):
        yield
        moe_fusion.uninstall()
        inductor_config.post_grad_custom_pre_pass = None
    assert active_config() == moe_fusion.FusionConfig()
