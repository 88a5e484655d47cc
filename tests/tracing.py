"""Compile a function as far as Inductor's post-grad stage, run the pass there, and run the result.

No code is generated: the rewritten graph runs eagerly, so that a case takes a fraction of a second.
The process group is a fake one of any size, whose all_reduce leaves its input as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch._inductor.compile_fx import (
    compile_fx,
    record_original_output_strides,
    view_to_reshape,
)

from moe_fusion import FusionConfig, FusionReport, MoEFusionPass
from moe_fusion.op import OP, OP_EPS_TENSOR
from moe_fusion.passes.render import render

CEILING = 512


@dataclass
class Traced:
    """What one call of a compiled function did."""

    output: object
    report: FusionReport
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        return sorted(self.report.refusals)


class Tracer:
    """``function``, compiled with the pass; each new graph adds to the report."""

    def __init__(
        self,
        function: Callable[..., object],
        config: FusionConfig | None = None,
        *,
        dynamic: bool | None = None,
        passes: tuple[Callable[..., None], ...] = (),
    ) -> None:
        torch._dynamo.reset()
        self.fusion = MoEFusionPass(config or FusionConfig(token_ceiling=CEILING))
        self.passes = passes or (self.fusion,)
        self.op_calls = 0
        self.before: list[str] = []
        self.after: list[str] = []
        backend = partial(compile_fx, inner_compile=self._inner_compile)
        self.compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)

    def _inner_compile(self, gm: torch.fx.GraphModule, *_: object, **__: object) -> object:
        view_to_reshape(gm)
        record_original_output_strides(gm)
        self.before.append(render(gm.graph))
        for fx_pass in self.passes:
            fx_pass(gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.after.append(render(gm.graph))

        ops = sum(node.target in (OP, OP_EPS_TENSOR) for node in gm.graph.nodes)

        def run(arguments: list[object]) -> object:
            self.op_calls += ops
            return gm(*arguments)

        run._boxed_call = True
        return run

    def __call__(self, *args: object) -> Traced:
        with torch.no_grad():
            output = self.compiled(*args)
        return Traced(output, self.fusion.report, self.before, self.after)


def trace(function: Callable[..., object], *args: object, **options: object) -> Traced:
    """Compile ``function`` for ``args`` and call it once."""
    return Tracer(function, **options)(*args)
