"""What the ranks of ``test_models.py`` run."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.compile_fx import compile_fx

import moe_fusion
from moe_fusion import op
from moe_fusion.cli import models
from moe_fusion.cli.explain import post_grad, without_caches
from moe_fusion.cli.models import BuiltModel, ModelSpec
from moe_fusion.contract import MoEOutput, UnfinalizedMoEOutput

SECOND_NUM_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One model, one way of computing its experts, one way of compiling."""

    family: str
    experts: str
    shapes: str = "static"
    dtype: str = "fp32"
    layers: int = 2
    expert_parallel: bool = False
    codegen: bool = True  # False runs the rewritten graph as it is, which saves the C++ compiler

    def __str__(self):
        return f"{self.family}-{self.experts}-{self.shapes}"

    @property
    def overrides(self):
        """One layer is a MoE layer, also where the first of two is dense."""
        dense_first = self.family == "deepseek_v3" and self.layers > 1
        first = {"first_k_dense_replace": int(dense_first)} if self.family == "deepseek_v3" else {}
        return {"num_hidden_layers": self.layers, **first}

    def compile(self, model):
        return torch.compile(
            model,
            backend="inductor" if self.codegen else run_post_grad_graph,
            fullgraph=True,
            dynamic=True if self.shapes == "dynamic" else None,
        )

    @property
    def spec(self):
        return ModelSpec(
            family=self.family,
            experts=self.experts,
            dtype=self.dtype,
            dynamic=self.shapes == "mark_dynamic",
            overrides=self.overrides,
            expert_parallel=self.expert_parallel,
        )


def run_post_grad_graph(gm, example_inputs):
    """Inductor without its code generator: the graph after the post-grad passes is what runs."""

    def inner(gm, example_inputs, **_):
        staged = post_grad(gm, example_inputs)
        call = lambda arguments: staged(*arguments)  # noqa: E731 - needs an attribute
        call._boxed_call = True
        return call

    return compile_fx(gm, example_inputs, inner_compile=inner)


def guarded(function, rank, case):
    """The case's result, or the traceback: one failing case must not hide the others."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    try:
        with torch.no_grad(), without_caches():
            torch._dynamo.reset()
            return function(rank, case)
    except Exception:  # noqa: BLE001
        return traceback.format_exc()


def fp32_cases(rank, cases):
    return [guarded(_fp32_case, rank, case) for case in cases]


def bf16_cases(rank, cases):
    return [guarded(_bf16_case, rank, case) for case in cases]


def expert_parallel_cases(rank, cases):
    return [guarded(_expert_parallel_case, rank, case) for case in cases]


def with_tokens(built, num_tokens):
    ids = torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    return BuiltModel(built.module, (), {**built.kwargs, "input_ids": ids})


def _fp32_case(rank, case):
    built = models.build(case.spec, rank.device)
    whole = models.build(case.spec, rank.device, shard=False)
    runs = [built]
    if case.shapes != "static":
        runs.append(with_tokens(built, SECOND_NUM_TOKENS))
    with moe_fusion.fusing() as report:
        compiled = case.compile(built.module)
        fused = [run.run(compiled) for run in runs]
    eager = [run.run() for run in runs]
    return {
        "fused": report.fused,
        "refusals": report.refusals,
        "all_reduces": (report.all_reduces_before, report.all_reduces_after),
        "graphs": report.graphs,
        "diff": max((a - b).abs().max().item() for a, b in zip(fused, eager, strict=True)),
        "whole_diff": (eager[0] - whole.run()).abs().max().item(),
        "scale": eager[0].abs().max().item(),
    }


def _bf16_case(rank, case):
    built = models.build(case.spec, rank.device)
    with recorded_calls() as calls, moe_fusion.fusing() as report:
        built.run(case.compile(built.module))
    return {"fused": report.fused, "calls": calls}


def _expert_parallel_case(rank, case):
    """Also which entries of the map are on this rank, and the graph around the MoE tail."""
    built = models.build(case.spec, rank.device)
    with recorded_calls(poisoned) as calls, moe_fusion.fusing(render=True) as report:
        fused = built.run(case.compile(built.module))
    eager = built.run()
    return {
        "fused": report.fused,
        "refusals": report.refusals,
        "diff": (fused - eager).abs().max().item(),
        "scale": eager.abs().max().item(),
        "maps": [arguments[2] for arguments, _ in calls if arguments[2] is not None],
        "poisoned": [int(arguments[0].isnan().any(-1).sum()) for arguments, _ in calls],
        "after": [site.after for site in report.sites if site.top_k],
    }


def poisoned(routed, weights, permutation, *others):
    """The arguments with NaN in each row that the map does not name, so that a read shows."""
    if permutation is not None:
        named = torch.zeros(len(routed), dtype=torch.bool)
        named[permutation[permutation >= 0].long()] = True
        routed = routed.masked_fill(~named.unsqueeze(-1), torch.nan)
        weights = weights.masked_fill(permutation < 0, torch.nan)
    return (routed, weights, permutation, *others)


class recorded_calls:  # noqa: N801 - reads as a function
    """Within the block, the op's CPU kernel also keeps its arguments and outputs."""

    def __init__(self, change=lambda *arguments: arguments):
        self.change = change

    def __enter__(self):
        calls = []

        def kernel(*arguments):
            arguments = self.change(*arguments)
            outputs = op._reference_kernel(*arguments)
            kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            calls.append((kept, [output.clone() for output in outputs]))
            return outputs

        self._library = torch.library.Library("moe_fusion", "IMPL")
        self._library.impl("finalize_allreduce_rms_norm", kernel, "CPU", allow_override=True)
        return calls

    def __exit__(self, *exception):
        self._library._destroy()


class TwoTails(torch.nn.Module):
    """An attention-like tail, then a MoE tail with a shared expert: [T, H] in, two [T, H] out."""

    def __init__(self, group, shard):
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(shard)
        self.attention, self.experts, self.shared = (
            0.1 * torch.randn(HIDDEN_DIM, width, generator=generator)
            for width in (HIDDEN_DIM, TOP_K * HIDDEN_DIM, HIDDEN_DIM)
        )
        self.norms = torch.rand(2, HIDDEN_DIM, generator=torch.Generator().manual_seed(0))

    def forward(self, x, weights, permutation):
        reduced = funcol.all_reduce(x @ self.attention, "sum", self.group)
        residual = x + reduced
        hidden = torch.nn.functional.rms_norm(residual, (HIDDEN_DIM,), self.norms[0], 1e-5)
        rows = (hidden @ self.experts).reshape(-1, HIDDEN_DIM)
        output = MoEOutput(
            UnfinalizedMoEOutput(rows, weights, permutation), hidden @ self.shared, 2.5
        )
        residual = residual + funcol.all_reduce(output.finalize(), "sum", self.group)
        return torch.nn.functional.rms_norm(residual, (HIDDEN_DIM,), self.norms[1], 1e-5), residual


NUM_TOKENS, TOP_K, HIDDEN_DIM = 6, 2, 32


def strided_groups(rank):
    """``TwoTails`` over the groups [0, 2] and [1, 3], each with a batch of its own."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank.index % 2]
    model = TwoTails(group, shard=rank.index // 2)
    generator = torch.Generator().manual_seed(10 + rank.index % 2)
    x = torch.randn(NUM_TOKENS, HIDDEN_DIM, generator=generator)
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=generator)
    permutation = torch.randperm(NUM_TOKENS * TOP_K, generator=generator).to(torch.int32)
    inputs = (x, weights, permutation.reshape(NUM_TOKENS, TOP_K))
    with torch.no_grad(), without_caches():
        with moe_fusion.fusing() as report:
            fused = torch.compile(model, fullgraph=True)(*inputs)
        eager = model(*inputs)
    return {
        "report": report.as_dict(),
        "group": group.group_name,
        "diff": max((a - b).abs().max().item() for a, b in zip(fused, eager, strict=True)),
        "outputs": fused,
    }
