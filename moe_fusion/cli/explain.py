"""``moe-fusion explain``: what the pass would fuse, without ranks, weights or GPUs.

The model is built of fake tensors over a fake process group, traced as ``torch.compile`` traces it,
and taken through Inductor up to the end of its post-grad passes, where the pass runs. Nothing is
generated, compiled or computed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_fusion
from moe_fusion.cli import models
from moe_fusion.cli.html import check_path, write_page
from moe_fusion.cli.outcome import Outcome
from moe_fusion.cli.progress import Progress
from moe_fusion.errors import ModelError

CPU = torch.device("cpu")


def add_parser(subparsers: Any) -> None:
    """Register ``explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="which tails of a model would be fused, and why not the others",
        description="Trace a model with fake tensors and a fake group; needs no ranks or weights.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", choices=models.FAMILIES, help="a small model of that family")
    which.add_argument("--config", type=Path, help="a transformers config.json")
    which.add_argument(
        "--factory", metavar="MODULE:FUNCTION", help="returns a model and its example inputs"
    )
    parser.add_argument(
        "--tp", "--world-size", dest="world_size", type=int, default=2, help="ranks (2)"
    )
    models.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with each tail's graph drawn"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``explain`` and print what it found."""
    spec = models.spec_from_arguments(arguments)
    path: Path | None = arguments.html
    if path is not None:
        check_path(path)
    render = path is not None or not arguments.json
    with Progress() as progress:
        outcome = explain(spec, arguments.world_size, render=render, progress=progress.step)
    if path is not None:
        write_page(outcome, path)
    print(outcome.as_json() if arguments.json else outcome.as_text())
    return 0


def explain(
    spec: models.ModelSpec,
    world_size: int,
    *,
    render: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Trace a model and report what the pass finds in it.

    Args:
        spec: the model.
        world_size: W of the tensor-parallel group.
        render: keep the graph around each fused tail as text.
        progress: told what happens now.

    Raises:
        ModelError: the model cannot be built, sharded or traced.
        MissingModelsExtraError: transformers is missing.
        ValueError: this process has a default process group already.
    """
    models.check_world_size(spec, world_size)
    started = time.perf_counter()
    with fake_group(world_size), fake_tensors():
        progress(f"Building {spec.name} of fake tensors")
        built = models.build(spec, CPU)
        built_at = time.perf_counter()
        progress(f"Tracing {spec.name}")
        with moe_fusion.fusing(render=render) as report:
            trace(built)
    finished = time.perf_counter()
    return Outcome(
        model=spec.name,
        world_size=world_size,
        report=report.as_dict(),
        report_text=str(report),
        seconds={"build": built_at - started, "trace": finished - built_at},
    )


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """A default group of ``world_size`` ranks in this process alone, which exchanges nothing.

    Raises:
        ValueError: this process has a default process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("expected a process without a default process group, got one that has it")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within the block, new tensors have shapes and dtypes but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # a factory may bring tensors that it made when its module was imported
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        yield


def trace(built: models.BuiltModel, *, dynamic: bool | None = None) -> None:
    """Take the model through Dynamo, AOTAutograd and Inductor's post-grad passes, for inference.

    Args:
        built: the model.
        dynamic: as for ``torch.compile``.

    Raises:
        ModelError: torch.compile cannot trace it.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    # a deep model's graphs are walked recursively
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    # what it returns is called as an OutputCode is, but holds no code
    backend = partial(compile_fx, inner_compile=_post_grad_only)  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_caches())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        try:
            built.run(torch.compile(built.module, backend=backend, dynamic=dynamic))
        except TorchDynamoException as error:
            ranks = dist.get_world_size()
            raise ModelError(
                f"model: expected one that can be traced over {ranks} ranks, got: {error}"
            ) from error
    torch._dynamo.reset()


@contextmanager
def without_caches() -> Iterator[None]:
    """Within the block, every compile goes through the passes: a cached graph would skip them.

    Compiled kernels are still taken from the cache, as they depend on their source alone.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def _post_grad_only(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """An inner compile for ``compile_fx`` that stops after the post-grad passes.

    What they made is thrown away and the graph as it came is what runs, so that fake outputs reach
    the next graph, if there is one.
    """
    post_grad(gm, example_inputs)

    def call(arguments: list[Any]) -> Any:
        return gm(*arguments)

    call._boxed_call = True
    return call


def post_grad(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """A copy of an inference graph, as Inductor has it after its post-grad passes."""
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    staged = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    compile_fx.view_to_reshape(staged)
    fake_mode = compile_fx.fake_tensor_prop(staged, example_inputs)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(staged, is_inference=True)
    return staged
