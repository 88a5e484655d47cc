"""Real ranks, a process and a GPU each: the op through its public path, beside what else there is.

Each path is a function of one rank's arguments. Inductor's kernels are the same in all unfused
paths; what differs is the all_reduce between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_fusion
import moe_fusion.op  # registers the op
from moe_fusion import reference
from moe_fusion.cli import bench_flashinfer
from moe_fusion.cli.bench_cases import Case, byte_floor_us
from moe_fusion.cli.bench_flashinfer import FLASHINFER
from moe_fusion.cli.bench_graphs import Outputs, Settings, launch_us, time_path, warm_up
from moe_fusion.cli.bench_results import FUSED, Result, Timing
from moe_fusion.cli.bench_unfused import Unfused
from moe_fusion.config import FusionConfig, set_active_config
from moe_fusion.contract import TailArguments
from moe_fusion.errors import BenchError
from moe_fusion.kernels.launch import TWO_SHOT_FROM_TOKENS

SYMMETRIC = "symm_mem"
RankPath = Callable[[TailArguments], Outputs]

BACKEND_BOUND_FACTOR = 2.0
# An all_reduce of a backend may round the running sum after each of its W - 1 additions.


def _as_they_are(args: TailArguments) -> TailArguments:
    return args


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Attributes:
        path: of this rank.
        bound: the largest error that its outputs may have.
        prepared: the arguments as the path reads them, made before it is timed.
    """

    path: RankPath
    bound: float
    prepared: Callable[[TailArguments], TailArguments] = _as_they_are


WARM_UP_SECONDS = 1.0
WARM_UP_OF_A_CASE_SECONDS = 0.03


@contextmanager
def world() -> Iterator[dist.ProcessGroup]:
    """The group that torchrun describes, a GPU for each of its ranks.

    Raises:
        BenchError: this host has fewer GPUs than it has ranks.
    """
    local_rank, local_size = (
        int(os.environ.get(f"LOCAL_{name}", os.environ[name])) for name in ("RANK", "WORLD_SIZE")
    )
    if torch.cuda.device_count() < local_size:
        got = torch.cuda.device_count()
        raise BenchError(f"real ranks: expected a GPU for each of {local_size} ranks, got {got}")
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def fused_path(group: dist.ProcessGroup) -> RankPath:
    """The op."""

    def path(args: TailArguments) -> Outputs:
        *values, scale = (getattr(args, field.name) for field in fields(args))
        op: Any = torch.ops.moe_fusion.finalize_allreduce_rms_norm
        outputs: Outputs = op(*values, group.group_name, scale)
        return outputs

    return path


def backend_path(group: dist.ProcessGroup, unfused: Unfused) -> RankPath:
    """Inductor's kernels around the all_reduce of the group's backend, in place."""

    def all_reduce(partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=group)
        return partial

    return lambda args: unfused(args, all_reduce)


def symmetric_path(group: dist.ProcessGroup, unfused: Unfused, case: Case) -> RankPath:
    """Inductor's kernels around symmetric memory's one-shot all-reduce."""
    from torch.distributed import _symmetric_memory as symm_mem

    shape = (case.num_tokens, case.hidden_dim)
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = symm_mem.empty(shape, dtype=case.torch_dtype, device=device)
    symm_mem.rendezvous(buffer, group)

    def all_reduce(partial: Tensor) -> Tensor:
        buffer.copy_(partial)
        reduced: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)
        return reduced

    return lambda args: unfused(args, all_reduce)


@contextmanager
def contenders(
    group: dist.ProcessGroup, unfused: Unfused | None, case: Case
) -> Iterator[dict[str, Contender]]:
    """What is timed, by name; good inside the block, which all ranks enter and leave together."""
    found = {FUSED: Contender(fused_path(group), case.bound)}
    bound = BACKEND_BOUND_FACTOR * case.bound
    with ExitStack() as workspaces:
        if unfused is not None:
            found[dist.get_backend(group)] = Contender(backend_path(group, unfused), bound)
            if torch.cuda.is_available():
                found[SYMMETRIC] = Contender(symmetric_path(group, unfused, case), bound)
            if bench_flashinfer.version() is not None and bench_flashinfer.takes(case):
                other = workspaces.enter_context(bench_flashinfer.flashinfer_path(group, case))
                found[FLASHINFER] = Contender(other, bound, bench_flashinfer.prepared)
        yield found


class RealBench:
    """Measures cases with this group's ranks; every rank makes the same calls.

    Args:
        group: of W ranks.
        settings: how often.
        unfused: Inductor's kernels for the other paths; None for none.
        terabytes_per_s: of one device's memory, read and write together.
        most_tokens: the largest T; the ceiling is lifted to it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        settings: Settings,
        unfused: Unfused | None,
        terabytes_per_s: float,
        most_tokens: int,
    ) -> None:
        self._group, self._settings, self._unfused = group, settings, unfused
        self._terabytes_per_s = terabytes_per_s
        set_active_config(FusionConfig(token_ceiling=most_tokens))
        warm_up(WARM_UP_SECONDS)
        self._launch_us = launch_us(1, settings)

    def measure(self, case: Case) -> Result:
        """All paths of one case.

        Raises:
            BenchError: this group would not fuse it.
        """
        refusal = moe_fusion.prepare(
            self._group, case.hidden_dim, case.torch_dtype, top_k=case.top_k
        )
        if refusal is not None:
            raise BenchError(f"expected a group whose tails are fused, got: {refusal.reason}")
        warm_up(WARM_UP_OF_A_CASE_SECONDS)
        ranks = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
        exact = reference.tail(ranks, torch.float64)[self._group.rank()]
        own = ranks[self._group.rank()]
        with contenders(self._group, self._unfused, case) as found:
            timings = {name: self._time(one, case, own, exact) for name, one in found.items()}
            torch.cuda.synchronize()
        moe_fusion.check()
        two_shot = case.num_tokens >= TWO_SHOT_FROM_TOKENS[case.world_size]
        floor = byte_floor_us(
            case, two_shot=two_shot, ranks=1, terabytes_per_s=self._terabytes_per_s
        )
        return Result(case, two_shot, self._launch_us, floor, timings)

    def _time(self, contender: Contender, case: Case, own: TailArguments, exact: Outputs) -> Timing:
        timing = time_path(
            lambda _, args: contender.path(args),
            case,
            [contender.prepared(own)],
            [exact],
            self._settings,
            bound=contender.bound,
        )
        worst = slowest([timing.error])[0]
        return Timing(timing.us, timing.cold_us, worst, timing.bound)


def slowest(values: list[float]) -> list[float]:
    """The largest of all ranks, one by one; NaN where any is."""
    found = torch.tensor(values, dtype=torch.float64, device="cuda" if _on_cuda() else "cpu")
    gathered = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, found)
    largest: list[float] = torch.stack(gathered).amax(0).tolist()
    return largest


def _on_cuda() -> bool:
    return dist.get_backend() == "nccl"


def line_up() -> None:
    """All ranks arrive before any goes on."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
