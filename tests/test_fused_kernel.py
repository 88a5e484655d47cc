"""The fused kernel and its exchange under Triton's interpreter, in 2 and 4 processes."""

from __future__ import annotations

import random
from dataclasses import replace

import interpreted_ranks as ranks
import pytest
import torch
from rank_pool import interpreting, interpreting_pool
from tail_cases import (
    Case,
    assert_close,
    assert_ranks_agree,
    oracle,
    relative_error,
    same_bits,
    tolerance,
)

from moe_fusion import reference
from moe_fusion.buffers import slots_bytes

CAPACITY_BYTES = 1 << 18
PEER_TIMEOUT_S = 60.0


@pytest.fixture
def pools():
    pool = interpreting_pool()
    return {w: pool.first(w) for w in (2, 4)}


def make_workspace(pool, folder, dtype=torch.bfloat16, timeout_s=PEER_TIMEOUT_S) -> str:
    """Cleared slots for every rank, in files that all of them map."""
    for rank in range(pool.world_size):
        size = slots_bytes(pool.world_size, CAPACITY_BYTES)
        (folder / str(rank)).write_bytes(b"\xff" * size)
    options = {"dtype": dtype, "capacity": CAPACITY_BYTES, "timeout_s": timeout_s}
    pool.run(ranks.open_workspace, str(folder), options)
    return str(folder)


@pytest.fixture(params=[2, 4])
def pool(pools, request):
    return pools[request.param]


@pytest.fixture
def workspace(pool, tmp_path):
    return make_workspace(pool, tmp_path)


def run_and_compare(pool, workspace, cases):
    outputs = pool.run(ranks.run_cases, workspace, cases)
    assert_ranks_agree(outputs)
    for case, got in zip(cases, outputs[0], strict=True):
        assert_close(case, got, pool.world_size)
    return outputs[0]


SHAPES = [
    Case(1, 16, top_k=1, seed=1),
    Case(3, 2880, top_k=4, row_padding=192, seed=2),
    Case(2, 3584, top_k=8, seed=3),
    Case(2, 5120, top_k=2, seed=4),
    Case(1, 7168, top_k=8, seed=5),
    Case(5, 24, top_k=32, seed=6),
    Case(2, 264, top_k=9, seed=7),
    Case(1, 16384, top_k=3, seed=8),
]
ADDENDS = [
    Case(3, 64, routing="token_major", seed=11),
    Case(3, 64, routing="finalized", shared=False, seed=12),
    Case(3, 64, routing="finalized", residual=False, norm=False, shared=False, seed=13),
    Case(3, 64, residual=False, seed=14),
    Case(3, 64, shared=False, replicated=True, output_scale=0.25, seed=15),
    Case(3, 64, replicated=True, routed_scaling_factor=2.5, output_scale=0.5, seed=16),
    Case(3, 64, replicated=True, output_scale=0.5, output_scale_tensor=-0.3, seed=19),
    Case(3, 64, output_scale_tensor=0.75, scale_dtype=torch.bfloat16, seed=9),
    Case(3, 64, output_scale_tensor=0.1, scale_dtype=torch.float64, seed=10),
    Case(3, 64, weight_bias=1.0, norm_dtype=torch.float32, seed=17),
    Case(3, 64, residual_dtype=torch.float32, norm=False, seed=18),
]


def test_every_shape_matches_the_oracle_and_ranks_are_bit_equal(pool, workspace):
    run_and_compare(pool, workspace, SHAPES)


def test_every_combination_of_addends_matches_the_oracle(pool, workspace):
    run_and_compare(pool, workspace, ADDENDS)


def test_the_composite_paths_kernels_are_the_reference(pools):
    """The partial and residual_out bit for bit; norm_out's sum of squares has its own order."""
    for got, want in pools[2].run(ranks.run_composite, ADDENDS, ranks=[0])[0]:
        assert same_bits(got[-1:], want[-1:])
        assert relative_error(got[0], want[0].double()) <= tolerance(torch.bfloat16, 192)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_mix_of_dtypes_matches_the_oracle(pools, tmp_path, dtype):
    pool = pools[2]
    workspace = make_workspace(pool, tmp_path, dtype)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = [
        Case(2, 64, dtype=dtype, weights_dtype=weights, norm_dtype=norm, seed=20 + i)
        for i, (weights, norm) in enumerate((w, n) for w in dtypes for n in dtypes)
    ]
    run_and_compare(pool, workspace, cases)


def test_the_result_is_the_references_but_for_the_rounding_of_the_norm(pools, tmp_path):
    """Sums, scales and roundings are the reference's own, so residual_out is bit-equal."""
    pool = pools[4]
    case = Case(
        4, 2880, top_k=4, replicated=True, output_scale=0.3, output_scale_tensor=0.7, seed=30
    )
    workspace = make_workspace(pool, tmp_path)
    _, residual_out = pool.run(ranks.run_cases, workspace, [case])[0][0]
    expected = reference.tail([case.rank(r) for r in range(4)])[0][1]
    assert same_bits([residual_out], [expected])


def test_a_long_running_sum_is_kept_in_fp32(pool, workspace):
    """256 + seven times 0.5 * 1 + 0.5: a bf16 running sum would stay at 256."""
    [*outputs] = pool.run(ranks.run_one, workspace, "sum_of_256_and_halves")
    for norm_out, residual_out in outputs:
        assert torch.equal(residual_out, torch.full((1, 64), 260.0, dtype=torch.bfloat16))
        assert torch.equal(norm_out, torch.ones(1, 64, dtype=torch.bfloat16))


def test_a_token_without_experts_sums_to_zero_and_reads_no_row(pool, workspace):
    for _, residual_out in pool.run(ranks.run_one, workspace, "no_experts"):
        assert torch.equal(residual_out, torch.zeros(2, 64, dtype=torch.bfloat16))


def test_a_zero_weight_on_an_infinite_row_is_nan_as_it_would_be_unfused(pool, workspace):
    for norm_out, residual_out in pool.run(ranks.run_one, workspace, "zero_times_infinity"):
        assert residual_out[0].isnan().all()
        assert norm_out[0].isnan().all()
        assert residual_out[1].isfinite().all()


def test_the_gemma_bias_is_added_in_fp32(pool, workspace):
    """1.5 * (1 + 0.005859375) is 1.5078125 in bf16; with the sum in bf16 it would be 1.515625."""
    for norm_out, _ in pool.run(ranks.run_one, workspace, "gemma_bias"):
        assert norm_out[0, 0].item() == 1.5078125


def test_a_replicated_output_counts_once_and_a_partial_one_once_a_rank(pool, workspace):
    """2 * (routed 1 + shared 3) a rank, halved, plus 5 once: W * 2.5 + 5 with both scales."""
    for _, residual_out in pool.run(ranks.run_one, workspace, "replicated_and_partial"):
        expected = 0.5 * pool.world_size * (2.0 * 1.0 + 3.0) + 5.0
        assert torch.equal(residual_out, torch.full((2, 64), expected, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_values_cross_the_exchange_in_every_slot(pools, tmp_path, dtype):
    """-0.0, subnormals, infinities and every NaN, that of the sentinel's bits among them."""
    pool = pools[2]
    workspace = make_workspace(pool, tmp_path, dtype)
    outputs = pool.run(ranks.run_special, workspace, dtype, 5)
    for calls in outputs:
        for call, residual_out in enumerate(calls):
            expected = ranks.special_sum(dtype, call, world_size=2)
            nan = expected.isnan()
            assert torch.equal(residual_out.isnan(), nan)
            assert same_bits([residual_out[~nan]], [expected[~nan]])


def test_a_row_is_bit_equal_in_batches_of_1_7_and_33(pools, tmp_path):
    pool = pools[2]
    workspace = make_workspace(pool, tmp_path)
    rows = {}
    for batch in (1, 7, 33):
        outputs = pool.run(ranks.run_batch_around_one_token, workspace, batch)
        assert_ranks_agree([[output] for output in outputs])
        rows[batch] = outputs[0]
    assert same_bits(rows[1], rows[7])
    assert same_bits(rows[1], rows[33])


def test_fresh_processes_give_the_same_bits(tmp_path):
    """A row does not depend on the run."""
    outputs = []
    for run in range(3):
        folder = tmp_path / str(run)
        folder.mkdir()
        fresh = interpreting(2)
        try:
            workspace = make_workspace(fresh, folder)
            outputs += fresh.run(ranks.run_cases, workspace, [Case(3, 264, top_k=4, seed=90)])
        finally:
            fresh.close()
    assert_ranks_agree(outputs)
    assert_close(Case(3, 264, top_k=4, seed=90), outputs[0][0], 2)


def test_a_rank_that_overwrites_its_inputs_at_once_disturbs_no_peer(pool, workspace):
    """Write after read: a slow peer still gets what was sent, not what the input became."""
    rounds = 20
    outputs = pool.run(ranks.run_overwriting, workspace, rounds)
    assert_ranks_agree(outputs)
    for seed in range(rounds):
        case = ranks.overwritten_case(seed)
        assert_close(case, outputs[0][seed], pool.world_size)


def test_calls_of_any_size_share_one_workspace(pools, tmp_path):
    """80 calls of random T and H, a random rank late at times; the GPU's test makes 1,000."""
    pool = pools[2]
    workspace = make_workspace(pool, tmp_path)
    generator = random.Random(0)
    kinds = [Case(t, h, top_k=2, seed=t) for t in (1, 2, 3) for h in (16, 48, 160)]
    cases = [generator.choice(kinds) for _ in range(80)]
    delays = [(generator.randrange(2), 0.002) if generator.random() < 0.05 else None for _ in cases]
    outputs = pool.run(ranks.run_cases, workspace, cases, delays)
    assert_ranks_agree(outputs)
    exact = {case: oracle(case, 2)[0] for case in kinds}
    for case, (norm_out, _) in zip(cases, outputs[0], strict=True):
        assert relative_error(norm_out, exact[case]) <= tolerance(torch.bfloat16, norm_out.numel())


def test_every_slot_is_clear_after_a_call(pools, tmp_path):
    pool = pools[2]
    workspace = make_workspace(pool, tmp_path)
    case = Case(6, 64, seed=40)
    pool.run(ranks.run_cases, workspace, [case, replace(case, num_tokens=2), case, case])
    for rank in range(2):
        data = torch.frombuffer(bytearray((tmp_path / str(rank)).read_bytes()), dtype=torch.uint8)
        assert (data == 0xFF).all()


BOTH_WAYS = [
    Case(2, 1032, top_k=2, seed=70),  # a segment and one unit
    Case(11, 64, top_k=3, seed=71),  # more rows than blocks
    Case(5, 2880, top_k=2, replicated=True, row_padding=192, seed=72),
    Case(3, 24, routing="finalized", seed=73),  # units of the first owners only
]


def test_two_shot_and_one_shot_give_the_same_bits(pool, workspace):
    outputs = pool.run(ranks.run_both_ways, workspace, BOTH_WAYS)
    for one_shot, two_shot in outputs:
        assert_ranks_agree([one_shot, two_shot])
        assert_ranks_agree([outputs[0][0], one_shot])
    for case, got in zip(BOTH_WAYS, outputs[0][1], strict=True):
        assert_close(case, got, pool.world_size)


def test_a_rank_that_missed_a_peer_returns_nan_also_where_all_rows_are_there(pools, tmp_path):
    workspace = make_workspace(pools[2], tmp_path, timeout_s=2.0)
    outputs = pools[2].run(ranks.run_poisoned, workspace, Case(3, 64, seed=52))
    assert all(tensor.isnan().all() for tensor in outputs[0])


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_peer_that_does_not_come_is_named_and_the_outputs_are_nan(pools, tmp_path, two_shot):
    """Later calls do not wait again, and push nothing that a peer could take for a result."""
    pool = pools[4]
    workspace = make_workspace(pool, tmp_path, timeout_s=1.0)
    case = Case(3, 64, seed=50)
    here = [0, 1, 3]
    outcomes = pool.run(ranks.run_without_peer, workspace, case, two_shot, ranks=here)
    for rank, (outputs, missing, message, seconds) in zip(here, outcomes, strict=True):
        assert missing == (2,)
        assert f"rank {rank}: expected the rows of every rank within 1 s" in message
        assert "got none from rank 2" in message
        assert all(tensor.isnan().all() for pair in outputs for tensor in pair)
        assert seconds < 10.0
