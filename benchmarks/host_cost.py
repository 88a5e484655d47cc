"""The host's microseconds for a call of the op, beside an op that launches an empty Triton kernel.

    python benchmarks/host_cost.py --json host_cost.json

One process and one GPU, no CUDA graph. Two virtual ranks, each with a stream, a group and a
workspace: all calls of one are queued, then all of the other, so that no call waits for a kernel.
Both ops are called eagerly and from compiled code; a figure is the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from virtual_ranks import COMPILING, workspaces_are, workspaces_by_name

from moe_fusion.cli.bench_cases import Case
from moe_fusion.contract import TailArguments
from moe_fusion.kernels.empty import empty_kernel
from moe_fusion.op import OP

CASE = Case(world_size=2, num_tokens=1, hidden_dim=7168, top_k=8, dtype="bf16")
CALLS = 32  # queued at once; a stream takes about a thousand
WARM_UP_REPEATS = 5

Run = Callable[[], object]

_library = torch.library.Library("moe_fusion_host_cost", "DEF")
_library.define("empty(Tensor x) -> Tensor")


def _empty(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    empty_kernel[1,](x, out)
    return out


_library.impl("empty", _empty, "CUDA")
torch.library.register_fake("moe_fusion_host_cost::empty", torch.empty_like, lib=_library)
EMPTY = torch.ops.moe_fusion_host_cost.empty.default


def tail_calls(args: TailArguments, group_name: str) -> Run:
    """``CALLS`` calls of the op, each of which adds to the residual of the one before."""

    def run() -> object:
        residual = args.residual
        for _ in range(CALLS):
            norm_out, residual = OP(
                args.routed, args.expert_weights, args.expanded_idx_to_permuted_idx,
                args.shared_output, None, residual, args.norm_weight, args.eps, args.weight_bias,
                args.routed_scaling_factor, args.output_scale, group_name,
            )  # fmt: skip
        return norm_out, residual

    return run


def empty_calls(x: Tensor) -> Run:
    """``CALLS`` calls of an op that does nothing, each of which reads the one before."""

    def run() -> object:
        out = x
        for _ in range(CALLS):
            out = EMPTY(out)
        return out

    return run


def bare_launches(x: Tensor) -> Run:
    """``CALLS`` launches of a kernel that does nothing."""

    def run() -> object:
        for _ in range(CALLS):
            empty_kernel[1,](x, x)
        return x

    return run


def host_us(ranks: Sequence[Run], streams: Sequence[torch.cuda.Stream], repeats: int) -> float:
    """The host's microseconds for each call: the median over repeats and ranks."""
    times = []
    for repeat in range(WARM_UP_REPEATS + repeats):
        torch.cuda.synchronize()
        for run, stream in zip(ranks, streams, strict=True):
            with torch.cuda.stream(stream):
                begin = time.perf_counter()
                run()
                elapsed = time.perf_counter() - begin
            if repeat >= WARM_UP_REPEATS:
                times.append(1e6 * elapsed / CALLS)
    torch.cuda.synchronize()
    return statistics.median(times)


def figures(repeats: int) -> dict[str, float]:
    """Microseconds a call by what is called and how."""
    streams = [torch.cuda.Stream() for _ in range(CASE.world_size)]
    # A group of each rank: the op finds by it what it has planned.
    names = [dist.new_group(range(CASE.world_size)).group_name for _ in streams]
    by_name = workspaces_by_name(CASE, names)
    inputs = [CASE.inputs(rank, "cuda") for rank in range(CASE.world_size)]
    tails = [tail_calls(args, name) for args, name in zip(inputs, names, strict=True)]
    empties = [empty_calls(args.shared_output) for args in inputs]
    bare = [bare_launches(args.shared_output) for args in inputs]
    compiled_tails = [torch.compile(run, fullgraph=True) for run in tails]
    compiled_empties = [torch.compile(run, fullgraph=True) for run in empties]
    with workspaces_are(lambda _: COMPILING):
        for run in (*compiled_tails, *compiled_empties):
            run()
        torch.cuda.synchronize()
    with workspaces_are(by_name.__getitem__):
        found = {
            "launch": host_us(bare, streams, repeats),
            "empty op": host_us(empties, streams, repeats),
            "op": host_us(tails, streams, repeats),
            "empty op, compiled": host_us(compiled_empties, streams, repeats),
            "op, compiled": host_us(compiled_tails, streams, repeats),
        }
    for space in by_name.values():
        space.check()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=CASE.world_size)
    with torch.no_grad():
        found = figures(options.repeats)
    versions = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    )
    print(f"{versions}; us of the host a call")
    for name, value in found.items():
        print(f"{name:20} {value:6.1f}")
    for suffix in ("", ", compiled"):
        print(f"op over empty op{suffix}: {found['op' + suffix] / found['empty op' + suffix]:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "us": found}, indent=1))


if __name__ == "__main__":
    main()
