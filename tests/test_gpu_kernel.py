"""The fused kernel on a GPU, in as many processes as ranks; they may share one device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_ranks as ranks
import pytest
import torch
from interpreted_ranks import special_sum
from rank_pool import RankPool
from tail_cases import (
    TOLERANCE,
    Case,
    assert_close,
    assert_ranks_agree,
    oracle,
    relative_error,
    same_bits,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(120),
]
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
CONFIG = {"token_ceiling": 128, "peer_timeout_s": 20.0}
MODEL = Case(1, 7168, top_k=8, seed=80)


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request):
    pool = RankPool(request.param, **SHARED)
    yield pool
    pool.close()


@pytest.fixture
def pool(world, tmp_path):
    if world.broken:
        pytest.fail("an earlier test left the ranks' processes hanging")
    world.run(ranks.join, str(tmp_path), "store", CONFIG, timeout_s=60.0)
    yield world
    if not world.broken:
        world.run(ranks.leave, timeout_s=60.0)


def is_fused(pool, hidden_dim=7168, dtype=torch.bfloat16):
    return pool.run(ranks.prepare, hidden_dim, dtype) == [None] * pool.world_size


def test_batches_up_to_128_tokens_stay_within_the_error_of_their_roundings(pool):
    assert is_fused(pool)
    cases = [replace(MODEL, num_tokens=t, seed=80 + t) for t in (1, 2, 4, 7, 16, 33, 64, 128)]
    outputs = pool.run(ranks.run_cases, cases)
    assert_ranks_agree(outputs)
    for case, got in zip(cases, outputs[0], strict=True):
        for value, exact in zip(got, oracle(case, pool.world_size), strict=True):
            assert relative_error(value, exact) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_width_and_combination_matches_the_oracle(pool, dtype):
    assert is_fused(pool, 16384, dtype)
    cases = [
        Case(3, 16, top_k=1, dtype=dtype, seed=1),
        Case(5, 2880, top_k=4, dtype=dtype, row_padding=192, seed=2),
        Case(2, 3584, top_k=32, dtype=dtype, replicated=True, output_scale=0.5, seed=3),
        Case(2, 5120, top_k=9, dtype=dtype, residual=False, weight_bias=1.0, seed=4),
        Case(2, 16384, top_k=2, dtype=dtype, routing="token_major", shared=False, seed=5),
        Case(3, 264, dtype=dtype, routing="finalized", norm=False, seed=6),
        Case(3, 64, dtype=dtype, output_scale_tensor=0.75, scale_dtype=dtype, seed=8),
        Case(3, 4096, dtype=dtype, weights_dtype=torch.bfloat16, norm_dtype=torch.float32, seed=7),
    ]
    outputs = pool.run(ranks.run_cases, cases)
    assert_ranks_agree(outputs)
    for case, got in zip(cases, outputs[0], strict=True):
        assert_close(case, got, pool.world_size)


def test_a_row_is_bit_equal_in_batches_of_1_7_and_128(pool):
    assert is_fused(pool)
    case = replace(MODEL, routing="token_major")
    outputs = pool.run(ranks.run_batches, case, (1, 7, 128))
    assert_ranks_agree(outputs)
    assert same_bits(outputs[0][0], outputs[0][1])
    assert same_bits(outputs[0][0], outputs[0][2])


@pytest.mark.timeout(300)  # processes that share a device take it in turns, a few ms each
def test_a_thousand_random_rounds_with_late_ranks_repeat_bit_for_bit(pool):
    assert is_fused(pool)
    kinds = [Case(t, h, top_k=4, seed=10 * t + h) for t in (1, 3, 8, 40) for h in (64, 2880, 7168)]
    outcomes = pool.run(ranks.run_random_rounds, kinds, 1000, 0, timeout_s=240.0)
    for rank, (first, differing) in enumerate(outcomes):
        assert differing == 0, f"rank {rank}"
        assert len(first) == len(kinds)
        for kind, got in first.items():
            assert same_bits(got, outcomes[0][0][kind])
    for kind, got in outcomes[0][0].items():
        assert_close(kinds[kind], got, pool.world_size)


def test_calls_from_two_streams_take_turns(pool):
    assert is_fused(pool)
    kinds = [Case(3, 2880, seed=5), Case(17, 2880, seed=6), Case(1, 2880, seed=7)]
    outputs = pool.run(ranks.run_two_streams, kinds, 40)
    assert_ranks_agree(outputs)
    for number, got in enumerate(outputs[0]):
        assert_close(kinds[number % 3], got, pool.world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_values_cross_the_exchange_in_every_slot(pool, dtype):
    assert is_fused(pool, 16, dtype)
    for calls in pool.run(ranks.run_special, dtype, 5):
        for call, got in enumerate(calls):
            expected = special_sum(dtype, call, pool.world_size)
            nan = expected.isnan()
            assert torch.equal(got.isnan(), nan)
            assert same_bits([got[~nan]], [expected[~nan]])


def test_a_captured_graph_replays_new_inputs_between_eager_calls(pool):
    assert is_fused(pool)
    case, other = replace(MODEL, num_tokens=4), Case(9, 2880, seed=1)
    seeds = list(range(200, 207))
    outputs = pool.run(ranks.run_graph, case, seeds, other)
    assert_ranks_agree(outputs)
    expected = [replace(c, seed=seed) for seed in seeds for c in (case, other)]
    for this, got in zip(expected, outputs[0], strict=True):
        assert_close(this, got, pool.world_size)


def test_a_first_call_inside_graph_capture_says_what_to_call_before(pool):
    for message in pool.run(ranks.capture_first, Case(1, 640)):
        assert message is not None
        assert "call moe_fusion.prepare(group, hidden_dim, dtype)" in message


def test_reduce_overhead_replays_new_inputs(pool):
    assert is_fused(pool)
    case, seeds = replace(MODEL, num_tokens=4, routing="token_major"), list(range(300, 306))
    outputs = pool.run(ranks.run_compiled, case, seeds, timeout_s=110.0)
    assert_ranks_agree(outputs)
    for seed, got in zip(seeds, outputs[0], strict=True):
        assert_close(replace(case, seed=seed), got, pool.world_size)


def test_above_the_ceiling_and_without_tokens_the_op_still_answers(pool):
    above = replace(MODEL, num_tokens=129, hidden_dim=512)
    none = replace(MODEL, num_tokens=0, hidden_dim=512)
    for norm_out, residual_out in (pair[0] for pair in pool.run(ranks.run_cases, [none])):
        assert norm_out.shape == residual_out.shape == (0, 512)
    for got in (pair[0] for pair in pool.run(ranks.run_cases, [above])):
        for value, exact in zip(got, oracle(above, pool.world_size), strict=True):
            # gloo rounds the running sum after each of W - 1 additions
            assert relative_error(value, exact) <= 2 * TOLERANCE[torch.bfloat16]


def test_a_call_allocates_its_two_outputs_and_does_not_synchronize(pool):
    assert is_fused(pool)
    for made, outputs in pool.run(ranks.count_allocations, MODEL):
        assert made == outputs == 2


def test_a_killed_rank_is_named_and_nobody_spins_for_ever(tmp_path):
    pool = RankPool(4, **SHARED)
    try:
        config = CONFIG | {"peer_timeout_s": 2.0}
        pool.run(ranks.join, str(tmp_path), "store", config, timeout_s=60.0)
        assert is_fused(pool)
        pool.pipes[2].send((ranks.die, 4, (2,)))
        pool.processes[2].join(20.0)
        alive = [0, 1, 3]
        rows = replace(MODEL, num_tokens=120)
        for rank, (seconds, poisoned, errors, total) in zip(
            alive, pool.run(ranks.miss_a_peer, rows, ranks=alive, timeout_s=60.0), strict=True
        ):
            assert 1.9 < seconds < 20.0
            assert poisoned
            assert errors == [(rank, (2,)), (rank, (2,))]
            assert total == 8.0
    finally:
        pool.close()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.timeout(200)
def test_compute_sanitizer_finds_nothing(tool, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    script = Path(__file__).parent / "sanitized_ranks.py"
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "both ranks matched" in done.stdout
