"""W virtual ranks on one GPU: streams of this process, each with a share of the device.

What is timed is the kernel and the protocol, without the links between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from moe_fusion import reference
from moe_fusion.buffers import STATE_WORDS, Workspace, peer_addresses, slots_bytes, square_sum_words
from moe_fusion.cli.bench_cases import Case, byte_floor_us
from moe_fusion.cli.bench_graphs import Outputs, Path, Settings, launch_us, time_path, warm_up
from moe_fusion.cli.bench_results import ALONE, FUSED, ONE_SHOT, TWO_SHOT, Result, Timing
from moe_fusion.cli.bench_unfused import Unfused
from moe_fusion.contract import TailArguments
from moe_fusion.kernels.fused_launch import fused
from moe_fusion.kernels.launch import LaunchParameters, launch_parameters

PEER_TIMEOUT_S = 2.0
WARM_UP_SECONDS = 1.0
WARM_UP_OF_A_CASE_SECONDS = 0.03
SHARE = "inductor"  # W ranks at once, as the fused kernel runs, without an all_reduce


def make_workspaces(case: Case, multiprocessors: int) -> list[Workspace]:
    """Workspaces of ranks that all live in this process, on one device."""
    capacity_bytes = case.partial_bytes
    size = slots_bytes(case.world_size, capacity_bytes)
    ranks = range(case.world_size)
    slots = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in ranks]
    addresses = [s.data_ptr() for s in slots]
    return [
        Workspace(
            rank=rank,
            world_size=case.world_size,
            dtype=case.torch_dtype,
            capacity_bytes=capacity_bytes,
            peers=peer_addresses(rank, addresses),
            state=torch.zeros(STATE_WORDS, dtype=torch.int64, device="cuda"),
            square_sums=torch.full(
                (square_sum_words(capacity_bytes, case.num_tokens),), -1, device="cuda"
            ),
            multiprocessors=multiprocessors,
            error_word=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            peer_timeout_s=PEER_TIMEOUT_S,
            global_ranks=tuple(ranks),
            memory=slots,
        )
        for rank in ranks
    ]


class VirtualBench:
    """Measures cases with virtual ranks.

    Args:
        settings: how often.
        unfused: Inductor's kernels to measure beside; None for none.
        terabytes_per_s: of the device's memory, read and write together.
    """

    def __init__(self, settings: Settings, unfused: Unfused | None, terabytes_per_s: float) -> None:
        self._settings, self._unfused = settings, unfused
        self._terabytes_per_s = terabytes_per_s
        self._launch_us: dict[int, float] = {}
        warm_up(WARM_UP_SECONDS)

    def measure(self, case: Case, *, tune: bool) -> Result:
        """All variants of one case, or one-shot and two-shot only."""
        warm_up(WARM_UP_OF_A_CASE_SECONDS)
        if case.world_size not in self._launch_us:
            self._launch_us[case.world_size] = launch_us(case.world_size, self._settings)
        parameters = self._parameters(case)
        inputs = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
        exact = reference.tail(inputs, torch.float64)
        if tune:
            choices = {ONE_SHOT: False, TWO_SHOT: True}
            timings = {
                name: self._fused(case, inputs, exact, replace(parameters, two_shot=two_shot))
                for name, two_shot in choices.items()
            }
        else:
            timings = {FUSED: self._fused(case, inputs, exact, parameters)}
            timings |= self._inductor(case, inputs)
        return Result(
            case,
            parameters.two_shot,
            self._launch_us[case.world_size],
            byte_floor_us(
                case,
                two_shot=parameters.two_shot,
                ranks=case.world_size,
                terabytes_per_s=self._terabytes_per_s,
            ),
            timings,
        )

    def _parameters(self, case: Case) -> LaunchParameters:
        return launch_parameters(
            case.num_tokens,
            case.hidden_dim,
            case.torch_dtype,
            case.world_size,
            top_k=case.top_k,
            multiprocessors=share_of_multiprocessors(case.world_size),
        )

    def _fused(
        self,
        case: Case,
        inputs: Sequence[TailArguments],
        exact: Sequence[Outputs],
        parameters: LaunchParameters,
    ) -> Timing:
        workspaces = make_workspaces(case, share_of_multiprocessors(case.world_size))

        def path(rank: int, args: TailArguments) -> Outputs:
            return fused(args, workspaces[rank], parameters)

        timing = time_path(path, case, inputs, exact, self._settings)
        for workspace in workspaces:
            workspace.check()
        return timing

    def _inductor(self, case: Case, inputs: Sequence[TailArguments]) -> dict[str, Timing]:
        """Every rank's kernels without an all_reduce, at once and alone."""
        if self._unfused is None:
            return {}
        path = without_all_reduce(self._unfused)
        exact = [reference.tail([args], torch.float64)[0] for args in inputs]
        return {
            SHARE: time_path(path, case, inputs, exact, self._settings),
            ALONE: time_path(path, case, inputs[:1], exact[:1], self._settings),
        }


def without_all_reduce(unfused: Callable[[TailArguments], Outputs]) -> Path:
    """The same on every rank."""

    def path(rank: int, args: TailArguments) -> Outputs:  # noqa: ARG001
        return unfused(args)

    return path


def share_of_multiprocessors(world_size: int) -> int:
    """Of one device, for each of ``world_size`` ranks."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.multi_processor_count) // world_size
