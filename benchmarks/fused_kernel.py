"""Times the fused kernel with W virtual ranks on one GPU: ``python benchmarks/fused_kernel.py``.

A virtual rank is a stream of this process with its own workspace, whose peers are on the same
device: what is timed is the kernel and the protocol, without the links. Each rank replays a CUDA
graph of CALLS calls; the figure is the median over REPEATS of the time from the first launch to
the last rank's end, divided by the calls. All blocks that wait have to be resident at once, so W x
T is limited; a case that does not fit is left out.

Shape legend: T num_tokens, K top_k, H hidden_dim, W world size.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
import triton

from moe_fusion import limits, reference
from moe_fusion.buffers import STATE_WORDS, Workspace, peer_addresses, slots_bytes, square_sum_words
from moe_fusion.contract import TailArguments
from moe_fusion.kernels.fused_launch import fused
from moe_fusion.kernels.launch import LaunchParameters, launch_parameters

TOKENS = (1, 4, 16, 32, 64, 128)
CALLS = 100
REPEATS = 30
WARM_UPS = 5
PEER_TIMEOUT_S = 2.0


def make_rank(rank: int, tokens: int, hidden: int, top_k: int) -> TailArguments:
    """One rank's arguments: every expert present, shared output, residual and norm weight."""
    own = torch.Generator("cuda").manual_seed(rank + 1)
    common = torch.Generator("cuda").manual_seed(0)

    def normal(generator: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").bfloat16()

    rows = tokens * top_k
    order = torch.randperm(rows, generator=own, device="cuda").int().view(tokens, top_k)
    return TailArguments(
        normal(own, rows, hidden),
        torch.rand(tokens, top_k, generator=own, device="cuda"),
        order,
        shared_output=normal(own, tokens, hidden),
        residual=normal(common, tokens, hidden),
        norm_weight=normal(common, hidden),
    )


def resident_blocks(world_size: int) -> int:
    """Blocks of one rank's share of the device."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return count // world_size * limits.BLOCKS_PER_MULTIPROCESSOR


def make_workspaces(world_size: int, capacity_bytes: int) -> list[Workspace]:
    """Workspaces of ranks that all live in this process."""
    size = slots_bytes(world_size, capacity_bytes)
    slots = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    addresses = [s.data_ptr() for s in slots]
    return [
        Workspace(
            rank=rank,
            world_size=world_size,
            dtype=torch.bfloat16,
            capacity_bytes=capacity_bytes,
            peers=peer_addresses(rank, addresses),
            state=torch.zeros(STATE_WORDS, dtype=torch.int64, device="cuda"),
            square_sums=torch.full((square_sum_words(capacity_bytes),), -1, device="cuda"),
            multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count // world_size,
            error_word=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            peer_timeout_s=PEER_TIMEOUT_S,
            global_ranks=tuple(range(world_size)),
            memory=slots,
        )
        for rank in range(world_size)
    ]


def relative_error(
    ranks: list[TailArguments],
    workspaces: list[Workspace],
    streams: list[torch.cuda.Stream],
    parameters: LaunchParameters,
) -> float:
    """Rank 0's error of norm_out in the last of three calls, relative to the fp64 oracle."""
    for _ in range(3):
        outputs = []
        for args, workspace, stream in zip(ranks, workspaces, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(fused(args, workspace, parameters)[0])
        torch.cuda.synchronize()

    def on_cpu(args: TailArguments) -> TailArguments:
        values = {name: v.cpu() if torch.is_tensor(v) else v for name, v in vars(args).items()}
        return TailArguments(**values)

    exact = reference.tail([on_cpu(args) for args in ranks], torch.float64)[0][0]
    return float((outputs[0].cpu().double() - exact).norm() / exact.norm())


def capture(
    args: TailArguments,
    workspace: Workspace,
    stream: torch.cuda.Stream,
    parameters: LaunchParameters,
) -> torch.cuda.CUDAGraph:
    """A graph of CALLS calls of one rank."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            fused(args, workspace, parameters)
    return graph


def replay(graphs: list[torch.cuda.CUDAGraph], streams: list[torch.cuda.Stream]) -> float:
    """Microseconds a call, from the first launch to the end of the last rank."""
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)
    ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
    begin.record(streams[0])
    for graph, stream, end in zip(graphs, streams, ends, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
            end.record(stream)
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) for end in ends) * 1000 / CALLS


def measure(
    world_size: int, tokens: int, hidden: int, top_k: int, parameters: LaunchParameters
) -> tuple[float, float]:
    """Microseconds a call, and rank 0's relative error of norm_out against the fp64 oracle."""
    ranks = [make_rank(rank, tokens, hidden, top_k) for rank in range(world_size)]
    workspaces = make_workspaces(world_size, tokens * hidden * 2)
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    torch.cuda.synchronize()
    error = relative_error(ranks, workspaces, streams, parameters)
    graphs = [
        capture(args, workspace, stream, parameters)
        for args, workspace, stream in zip(ranks, workspaces, streams, strict=True)
    ]
    times = [replay(graphs, streams) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
    for workspace in workspaces:
        workspace.check()
    return statistics.median(times), error


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-dim", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    for name in ("num_warps", "unroll", "min_blocks"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, help="instead of the launch parameters' own"
        )
    options = parser.parse_args()
    parameters = launch_parameters(options.hidden_dim, torch.bfloat16)
    chosen = {
        name: value
        for name in ("num_warps", "unroll", "min_blocks")
        if (value := getattr(options, name)) is not None
    }
    parameters = replace(parameters, **chosen)
    print(parameters)
    resident = torch.cuda.get_device_properties(0).multi_processor_count  # one block each at least
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"H {options.hidden_dim}, K {options.top_k}, bf16, {CALLS} calls a graph")
    print("   W    T   us/call  relative error")
    for world_size in limits.FUSED_WORLD_SIZES:
        for tokens in TOKENS:
            if world_size * tokens <= resident:
                time, error = measure(
                    world_size, tokens, options.hidden_dim, options.top_k, parameters
                )
                print(f"{world_size:4d} {tokens:4d} {time:9.2f}  {error:.2e}", flush=True)


if __name__ == "__main__":
    main()
