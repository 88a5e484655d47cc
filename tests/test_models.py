"""transformers' own models under its own tensor parallelism, on real ranks.

fp32: the fused model's logits against eager tensor parallelism. bf16: a top-k choice can flip
between two right runs, so each fused tail's outputs are compared with the fp64 oracle of the same
inputs.
"""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from model_runs import Case, bf16_cases, expert_parallel_cases, fp32_cases, strided_groups

from moe_fusion import reference
from moe_fusion.contract import TailArguments

LOGITS_TOLERANCE = 1e-5  # fp32 logits of order 5: a few units in the last place
FP32_CASES = [
    Case("mixtral", "grouped_mm", "dynamic", layers=1),
    Case("mixtral", "batched_mm", "static", codegen=False),
    Case("qwen3_moe", "grouped_mm", "static", codegen=False),
    Case("qwen3_moe", "batched_mm", "mark_dynamic", codegen=False),
    Case("qwen2_moe", "grouped_mm", "mark_dynamic", layers=1),
    Case("qwen2_moe", "batched_mm", "dynamic", codegen=False),
    Case("deepseek_v3", "grouped_mm", "static", codegen=False),
    Case("deepseek_v3", "batched_mm", "dynamic", layers=1),
]
BF16_CASES = [
    Case("mixtral", "grouped_mm", dtype="bf16", codegen=False),
    Case("qwen3_moe", "batched_mm", dtype="bf16", codegen=False),
    Case("qwen2_moe", "grouped_mm", dtype="bf16", codegen=False),
    Case("deepseek_v3", "grouped_mm", dtype="bf16", layers=1),
]
EXPERT_PARALLEL_CASES = [
    Case("mixtral", "grouped_mm", layers=1, expert_parallel=True, codegen=False),
    Case("mixtral", "batched_mm", layers=1, expert_parallel=True, codegen=False),
    Case("deepseek_v3", "grouped_mm", layers=1, expert_parallel=True, codegen=False),
]
# (fused tails, all_reduces): the embedding, then attention and MoE of each layer. deepseek_v3's
# attention is replicated, its first of two layers is dense, and its shared expert's all_reduce
# joins the routed one.
COUNTS = {1: (3, 3), 2: (5, 5)}
COUNTS_DEEPSEEK = {1: (2, 3), 2: (3, 4)}


def expected_counts(case):
    return (COUNTS_DEEPSEEK if case.family == "deepseek_v3" else COUNTS)[case.layers]


@pytest.fixture(scope="module")
def fp32_results():
    return dict(
        zip(FP32_CASES, zip(*run_ranks(2, fp32_cases, FP32_CASES), strict=True), strict=True)
    )


@pytest.fixture(scope="module")
def bf16_results():
    return dict(
        zip(BF16_CASES, zip(*run_ranks(2, bf16_cases, BF16_CASES), strict=True), strict=True)
    )


def results_of(results, case):
    for result in results[case]:
        assert not isinstance(result, str), result
    return results[case]


@pytest.fixture(scope="module")
def expert_parallel_results():
    results = run_ranks(2, expert_parallel_cases, EXPERT_PARALLEL_CASES)
    return dict(zip(EXPERT_PARALLEL_CASES, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize("case", EXPERT_PARALLEL_CASES, ids=str)
def test_rows_of_other_ranks_experts_are_not_read(expert_parallel_results, case):
    """Each entry is in one rank's map; what no map names holds NaN and the logits are eager's."""
    results = results_of(expert_parallel_results, case)
    for result in results:
        assert result["fused"] == expected_counts(case)[0]
        assert result["refusals"] == {}
        assert result["scale"] > 1.0
        assert result["diff"] <= LOGITS_TOLERANCE
        (graph,) = result["after"]
        assert "full([], -1, dtype=torch.int32" in graph
        assert sum(result["poisoned"]) > 0
    for maps in zip(*(result["maps"] for result in results), strict=True):
        present = torch.stack([permutation >= 0 for permutation in maps])
        assert torch.equal(present.sum(0), torch.ones_like(maps[0]))
        assert present.flatten(1).any(1).all()


@pytest.mark.parametrize("case", FP32_CASES, ids=str)
def test_fp32_logits_equal_eager_and_every_tail_is_fused(fp32_results, case):
    fused, all_reduces = expected_counts(case)
    for result in results_of(fp32_results, case):
        assert result["refusals"] == {}
        assert result["fused"] == fused
        assert result["all_reduces"] == (all_reduces, 0)
        assert result["graphs"] == 1  # also where a second number of tokens was run
        assert result["scale"] > 1.0  # so that the tolerance means something
        assert result["diff"] <= LOGITS_TOLERANCE


@pytest.mark.parametrize("case", FP32_CASES, ids=str)
def test_sharded_weights_are_those_of_the_whole_model(fp32_results, case):
    for result in results_of(fp32_results, case):
        assert result["whole_diff"] <= LOGITS_TOLERANCE


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_bf16_tails_are_no_further_from_the_oracle_than_unfused(bf16_results, case):
    results = results_of(bf16_results, case)
    assert [result["fused"] for result in results] == [expected_counts(case)[0]] * 2
    for calls in zip(*(result["calls"] for result in results), strict=True):
        ranks = [TailArguments(*arguments[:-1]) for arguments, _ in calls]
        assert ranks[0].routed.dtype == torch.bfloat16
        oracle = reference.tail(ranks, torch.float64)
        unfused = unfused_tail(ranks)
        for index, (_, outputs) in enumerate(calls):
            for got, eager, exact in zip(outputs, unfused[index], oracle[index], strict=True):
                assert got.dtype == eager.dtype == torch.bfloat16
                assert error(got, exact) <= error(eager, exact) * (1 + 1e-9)
        for got, other in zip(calls[0][1], calls[1][1], strict=True):
            assert torch.equal(got, other)


def error(value, exact):
    """The distance from the oracle, relative to its norm."""
    return ((value.double() - exact).norm() / exact.norm()).item()


def unfused_tail(ranks):
    """What transformers' own modules compute in eager mode, every step rounded to its dtype."""
    assert {(r.routed_scaling_factor, r.output_scale, r.weight_bias) for r in ranks} == {(1, 1, 0)}
    reduced = sum_in_dtype([eager_partial(rank) for rank in ranks])
    if ranks[0].shared_output is not None:
        reduced = reduced + sum_in_dtype([rank.shared_output for rank in ranks])
    return [eager_finish(reduced, rank) for rank in ranks]


def sum_in_dtype(partials):
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


def eager_partial(rank):
    if rank.expert_weights is None:
        return rank.routed
    num_tokens, top_k = rank.expert_weights.shape
    rows = rank.routed
    if rank.expanded_idx_to_permuted_idx is not None:
        rows = rows[rank.expanded_idx_to_permuted_idx.flatten().long()]
    weighted = rows * rank.expert_weights.reshape(-1, 1)
    return weighted.reshape(num_tokens, top_k, -1).sum(1).to(rank.routed.dtype)


def eager_finish(reduced, rank):
    if rank.replicated_output is not None:
        reduced = reduced + rank.replicated_output
    residual_out = reduced if rank.residual is None else rank.residual + reduced
    value = residual_out.float()
    norm = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + rank.eps)
    return norm.to(residual_out.dtype) * rank.norm_weight, residual_out


def test_strided_groups_fuse_and_stay_apart():
    results = run_ranks(4, strided_groups)
    for result in results:
        report = result["report"]
        assert (report["fused"], report["all_reduces_before"], report["all_reduces_after"]) == (
            2,
            2,
            0,
        )
        assert [site["finalize"] for site in report["sites"]] == ["finalized", "permuted rows"]
        assert [site["shared"] for site in report["sites"]] == ["none", "before the all_reduce"]
        assert {site["group"] for site in report["sites"]} == {result["group"]}
        assert {site["world_size"] for site in report["sites"]} == {2}
        assert result["diff"] <= LOGITS_TOLERANCE
    for mine, peer in ((0, 2), (1, 3)):
        for a, b in zip(results[mine]["outputs"], results[peer]["outputs"], strict=True):
            assert torch.equal(a, b)
    assert not torch.allclose(results[0]["outputs"][0], results[1]["outputs"][0])
