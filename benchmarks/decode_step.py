"""A decode step of a random mixture-of-experts model with and without the pass, on one GPU.

    python benchmarks/decode_step.py --json decode_step.json

W virtual ranks, each a stream with weights, cache and workspace of its own, replay a CUDA graph of
one step at once; a figure is the median over the repeats. ``fused`` is compiled with the pass and
exchanges its rows through the workspaces; its outputs are compared with those of all ranks together
in fp32, and there is no figure where they are wrong. ``unfused`` is compiled without the pass and
**has no all_reduce**: its groups exchange nothing, so it takes less than any unfused path would.

What a shared GPU distorts: every rank's matrix products have the other ranks' multiprocessors to
share and their rows wait for each other, which real ranks' do not; there are no links. Blocks that
wait for a peer keep their place while the peer's matrix products look for one: cases in which the
waiting ranks could fill more than one block a multiprocessor are left out.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
from decode_model import Decoder, Shape, inputs, make_rank, together
from torch.testing._internal.distributed.fake_pg import FakeStore
from virtual_ranks import COMPILING, workspaces_are, workspaces_by_name

import moe_fusion
from moe_fusion.cli.bench_cases import Case
from moe_fusion.cli.bench_graphs import Outputs, Settings, largest_error, time_calls, warm_up
from moe_fusion.cli.explain import without_caches
from moe_fusion.kernels.launch import launch_parameters

WARM_UP_SECONDS = 1.0
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")

Step = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """Of one shape.

    Attributes:
        shape: what was run.
        fused_us: a step with the pass.
        unfused_us: a step without the pass and without an all_reduce.
        error: of the worst rank and output, relative to all ranks together in fp32.
        eager_error: the same of all ranks together in the model's dtype.
    """

    shape: Shape
    fused_us: float
    unfused_us: float
    error: float
    eager_error: float

    @property
    def bound(self) -> float:
        """The largest error that is rounding; a part that is lost makes far more."""
        return 2 * self.eager_error

    @property
    def right(self) -> bool:
        """Whether the fused step rounds about as an eager one does."""
        return self.error <= self.bound


def case_of(shape: Shape) -> Case:
    """The shape's tail after the experts."""
    return Case(shape.world_size, shape.num_tokens, shape.hidden_dim, shape.top_k, "bf16")


def leaves_room(shape: Shape, multiprocessors: int) -> bool:
    """Whether all ranks but one can wait with at most one block a multiprocessor."""
    blocks = launch_parameters(
        shape.num_tokens,
        shape.hidden_dim,
        DTYPE,
        shape.world_size,
        top_k=shape.top_k,
        multiprocessors=multiprocessors // shape.world_size,
    ).blocks
    return (shape.world_size - 1) * blocks <= multiprocessors


def compiled(ranks: Sequence[Decoder], names: Sequence[str], data: Outputs) -> list[Step]:
    """A compiled step of each rank, called once."""
    torch._dynamo.reset()
    steps: list[Step] = [
        functools.partial(torch.compile(rank, fullgraph=True), *data, name)
        for rank, name in zip(ranks, names, strict=True)
    ]
    with without_caches(), workspaces_are(lambda _: COMPILING):
        for step in steps:
            step()
    torch.cuda.synchronize()
    return steps


def time_steps(steps: Sequence[Step], repeats: int) -> tuple[float, list[Outputs]]:
    """Microseconds a step, and each rank's outputs."""
    settings = Settings(calls=1, repeats=repeats)
    figure, last = time_calls([[step] for step in steps], settings)
    return figure, last  # type: ignore[return-value]


def measure(shape: Shape, repeats: int) -> Figure:
    """Both steps of one shape."""
    ranks = [make_rank(shape, rank, CUDA, DTYPE) for rank in range(shape.world_size)]
    # A group of each rank: the op finds by its name what it has planned.
    names = [dist.new_group(range(shape.world_size)).group_name for _ in ranks]
    data = inputs(shape, CUDA, DTYPE)
    exact, eager_error = oracle(ranks, data)
    by_name = workspaces_by_name(case_of(shape), names)
    unfused_us, _ = time_steps(compiled(ranks, names, data), repeats)
    with moe_fusion.fusing() as report:
        steps = compiled(ranks, names, data)
    expected = 2 * shape.layers * shape.world_size
    if report.fused != expected:
        raise RuntimeError(f"expected {expected} fused tails, got {report.fused}\n{report}")
    with workspaces_are(by_name.__getitem__):
        fused_us, outputs = time_steps(steps, repeats)
    for space in by_name.values():
        space.check()
    error = largest_error(outputs, [exact] * shape.world_size)
    return Figure(shape, fused_us, unfused_us, error, eager_error)


def oracle(ranks: Sequence[Decoder], data: Outputs) -> tuple[Outputs, float]:
    """All ranks together in fp32, and how far from it they are in their own dtype."""
    wide = [copy.deepcopy(rank).float() for rank in ranks]
    exact = together(wide, *(tensor.float() for tensor in data))
    return exact, largest_error([together(ranks, *data)], [exact])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8], metavar="W")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16], metavar="T")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    # Each rank's module is compiled on its own.
    torch._dynamo.config.recompile_limit = 2 * max(options.world_sizes)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print("  W    T  fused us  unfused, no all_reduce  us a layer less    error")
    figures = []
    for world_size in options.world_sizes:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        warm_up(WARM_UP_SECONDS)
        for num_tokens in options.tokens:
            shape = Shape(world_size, num_tokens, layers=options.layers)
            if not leaves_room(shape, multiprocessors):
                print(
                    f"{world_size:3} {num_tokens:4}  left out: waiting blocks would leave no room"
                )
                continue
            with torch.no_grad():
                figure = measure(shape, options.repeats)
            figures.append(figure)
            print(line(figure), flush=True)
        dist.destroy_process_group()
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    if not all(figure.right for figure in figures):
        raise SystemExit("a step's outputs are wrong: it has no figure")


def line(figure: Figure) -> str:
    """The figure's row."""
    shape = figure.shape
    start = f"{shape.world_size:3} {shape.num_tokens:4}"
    if not figure.right:
        return f"{start}  error {figure.error:.1e}: expected at most {figure.bound:.1e}"
    saved = (figure.unfused_us - figure.fused_us) / shape.layers
    return (
        f"{start} {figure.fused_us:9.1f} {figure.unfused_us:23.1f} {saved:16.2f} "
        f"{figure.error:8.1e}"
    )


if __name__ == "__main__":
    main()
