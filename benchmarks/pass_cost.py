"""What the pass costs at compile time.

Prints the seconds that the pass takes on synthetic graphs of 250, 500 and 1,000 MoE tails, and its
share of the compile time of the demo's model. Run with ``make bench``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_fusion import FusionConfig, MoEFusionPass
from moe_fusion.cli import models
from moe_fusion.cli.explain import without_caches

TOKENS, TOP_K, HIDDEN = 16, 2, 64


def layer(rows: Tensor, weights: Tensor, index: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """A MoE tail whose norm feeds the next layer's residual."""
    present = index >= 0
    gathered = rows[torch.where(present, index, 0).long()]
    gathered = torch.where(present.unsqueeze(-1), gathered, 0.0)
    partial = (gathered * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
    total = residual + funcol.all_reduce(partial, "sum", "0")
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return norm * wide.to(total.dtype)


def one_layer() -> GraphModule:
    """The graph of :func:`layer`."""
    args = (
        torch.randn(TOKENS * TOP_K, HIDDEN, dtype=torch.bfloat16),
        torch.rand(TOKENS, TOP_K),
        torch.zeros(TOKENS, TOP_K, dtype=torch.int32),
        torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16),
        torch.randn(HIDDEN, dtype=torch.bfloat16),
    )
    return make_fx(layer, tracing_mode="fake")(*args)


def synthetic(gm: GraphModule, tails: int) -> Graph:
    """A graph of ``tails`` copies of ``gm``, each reading the one before."""
    graph, residual = Graph(), None
    nodes = list(gm.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    shared = {node: graph.node_copy(node) for node in inputs}
    for _ in range(tails):
        copies: dict[Node, Node] = dict(shared)
        if residual is not None:
            copies[inputs[3]] = residual
        for node in nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        residual = copies[nodes[-1].args[0]]
    graph.output(residual)
    return graph


def seconds_of(graph: Graph, tails: int) -> float:
    """CPU seconds of one run of the pass, which is single-threaded."""
    fusion = MoEFusionPass(FusionConfig(token_ceiling=TOKENS))
    begin = time.process_time()
    fusion(graph)
    elapsed = time.process_time() - begin
    if fusion.report.fused != tails:
        raise RuntimeError(f"expected {tails} fused tails, got {fusion.report}")
    return elapsed


class Timed(MoEFusionPass):
    """The pass, with the CPU seconds that it takes."""

    seconds = 0.0

    def __call__(self, graph: Graph) -> None:
        """Run the pass and add up its time."""
        begin = time.process_time()
        super().__call__(graph)
        self.seconds += time.process_time() - begin


def compile_share(model: str) -> tuple[float, float, int]:
    """CPU seconds of the pass and of the whole compilation of the demo's model, and fused tails."""
    built = models.build(models.ModelSpec(family=model), torch.device("cpu"))
    fusion = Timed()
    options = {"post_grad_custom_pre_pass": fusion}
    begin = time.process_time()
    # In this process, so that the code generation counts; the C++ compiler does not.
    with torch.no_grad(), without_caches(), inductor_config.patch(compile_threads=1):
        built.run(torch.compile(built.module, options=options))
    return fusion.seconds, time.process_time() - begin, fusion.report.fused


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="mixtral")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    gm = one_layer()
    seconds_of(synthetic(gm, 1), 1)  # imports and caches
    for tails in (250, 500, 1000):
        median = statistics.median(
            seconds_of(synthetic(gm, tails), tails) for _ in range(args.repeats)
        )
        print(f"{tails} tails: {median:.3f} s, {1e3 * median / tails:.3f} ms a tail")
    seconds, total, fused = compile_share(args.model)
    share = 100 * seconds / total
    print(f"{args.model}: {fused} tails, pass {seconds:.3f} s of {total:.1f} s, {share:.2f} %")


if __name__ == "__main__":
    main()
