"""The oracle against numbers worked out by hand, and its relation to fp64.

T num_tokens, K top_k, H hidden_dim, R rows of GEMM2's output, W world size.
"""

from __future__ import annotations

import dataclasses

import inputs
import pytest
import torch

from moe_fusion import reference
from moe_fusion.contract import TailArguments

H = 64
BF16 = torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row(value, *, tokens=1, dtype=BF16, hidden=H):
    return torch.full((tokens, hidden), value, dtype=dtype)


def in_order(tokens, top_k):
    return torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)


def arguments(dtype=BF16, *, rank=0, shared=True, replicated=False, **options):
    data = inputs.make(dtype, rank=rank, **options)
    return TailArguments(
        data.rows,
        data.weights,
        data.index,
        data.shared if shared else None,
        inputs.make(dtype, rank=99, **options).shared if replicated else None,
        data.residual,
        data.norm_weight,
        routed_scaling_factor=2.5,
    )


def test_one_large_row_and_seven_small_ones():
    """256 + 7 * 0.5 + 0.5 is 260; a bf16 running sum would stay at 256."""
    rows = torch.cat([row(256.0), row(0.5, tokens=7)])
    args = TailArguments(rows, torch.ones(1, 8, dtype=BF16), in_order(1, 8), row(0.5))
    assert torch.equal(reference.partial(args), row(260.0, dtype=torch.float32))
    _, residual_out = reference.tail([args])[0]
    assert torch.equal(residual_out, row(260.0))


def test_unread_rows_may_hold_anything():
    """Two rows are NaN and Inf and no entry names them; a token that is all -1 finalizes to 0."""
    rows = torch.cat([row(float("nan")), row(3.0), row(float("inf")), row(5.0)])
    index = torch.tensor([[1, 3], [-1, -1], [3, -1]], dtype=torch.int32)
    weights = torch.tensor([[2.0, 1.0], [7.0, 7.0], [0.5, 7.0]], dtype=BF16)
    got = reference.finalize(rows, weights, index)
    assert torch.equal(got, torch.tensor([[11.0], [0.0], [2.5]]).expand(3, H))
    args = TailArguments(rows, weights, index, None, None, row(1.0, tokens=3))
    for output in reference.tail([args])[0]:
        assert torch.isfinite(output).all()


def test_a_weight_of_zero_does_not_hide_infinity():
    rows = torch.cat([row(float("inf")), row(1.0)])
    args = TailArguments(rows, torch.tensor([[0.0, 1.0]], dtype=BF16), in_order(1, 2))
    assert torch.isnan(reference.tail([args])[0][1]).all()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_partial_is_counted_by_each_rank_and_a_replicated_output_once(world_size):
    """Rank r's shared output is r + 1, so W ranks add W (W + 1) / 2; the replicated 0.5 is once."""
    ranks = [
        TailArguments(row(0.25), shared_output=row(rank + 1.0), replicated_output=row(0.5))
        for rank in range(world_size)
    ]
    want = world_size * (world_size + 1) / 2 + 0.25 * world_size + 0.5
    for _, residual_out in reference.tail(ranks):
        assert torch.equal(residual_out, row(want))


def test_the_scale_is_of_the_routed_experts_alone():
    args = TailArguments(row(3.0), shared_output=row(0.5), routed_scaling_factor=2.0)
    assert torch.equal(reference.tail([args])[0][1], row(6.5))


def test_the_output_scale_comes_before_the_replicated_output():
    """0.5 * (2 + 4) + 3 = 6, and not 0.5 * (2 + 4 + 3)."""
    both = {"replicated_output": row(3.0), "residual": row(10.0), "output_scale": 0.5}
    ranks = [TailArguments(row(2.0), **both), TailArguments(row(4.0), **both)]
    for _, residual_out in reference.tail(ranks):
        assert torch.equal(residual_out, row(16.0))


def test_the_two_scales_multiply():
    """2 * 3 = 6 and the shared 1 before the reduction; half of 7 after it."""
    args = TailArguments(
        row(3.0), shared_output=row(1.0), routed_scaling_factor=2.0, output_scale=0.5
    )
    assert torch.equal(reference.tail([args])[0][1], row(3.5))


# 32 of 72 elements are 1.5, so the mean square is 32 * 2.25 / 72 = 1 and the row is its own norm.
UNIT_ROW = torch.tensor([[1.5] * 32 + [0.0] * 40])


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_the_gemma_bias_is_added_in_fp32(weight_dtype):
    """1.5 * (1 + 0.005859375) is 1.5088, so 1.5078125; added in bf16 it would be 1.515625."""
    weight = torch.full((72,), 0.005859375, dtype=weight_dtype)
    args = TailArguments(UNIT_ROW.to(BF16), norm_weight=weight, eps=0.0, weight_bias=1.0)
    norm_out, residual_out = reference.tail([args])[0]
    assert torch.equal(residual_out, UNIT_ROW.to(BF16))
    assert norm_out.dtype == BF16
    assert norm_out[0, 0].item() == 1.5078125
    assert norm_out[0, 32:].eq(0).all()


def test_eps_is_inside_the_root():
    """mean(x^2) = 1 and eps = 3: 1.5 / sqrt(4) * 2."""
    args = TailArguments(UNIT_ROW, norm_weight=torch.full((72,), 2.0), eps=3.0)
    norm_out, _ = reference.tail([args])[0]
    assert torch.equal(norm_out, UNIT_ROW)


@pytest.mark.parametrize("routing", DTYPES, ids=str)
@pytest.mark.parametrize("norm_weight", DTYPES, ids=str)
@pytest.mark.parametrize("activation", DTYPES, ids=str)
def test_dtypes(activation, norm_weight, routing):
    """The activation decides the outputs' dtypes; weights are read in their own."""
    args = arguments(activation, weights=routing, norm_weight=norm_weight, missing=True)
    norm_out, residual_out = reference.tail([args])[0]
    assert norm_out.dtype == residual_out.dtype == activation
    exact_norm, exact_residual = reference.tail([args], torch.float64)[0]
    assert exact_norm.dtype == exact_residual.dtype == torch.float64
    # the partial, the sum and the output are each rounded once, and the partial is the widest
    bound = 4 * torch.finfo(activation).eps
    assert (residual_out - exact_residual).abs().max() <= bound * exact_residual.abs().max()
    assert (norm_out - exact_norm).abs().max() <= bound * exact_norm.abs().max()


@pytest.mark.parametrize("padding", [0, 1, 122])
def test_padding_rows_change_nothing(padding):
    data = inputs.make(BF16, missing=True)
    count = inputs.T * inputs.K
    rows = torch.cat([data.rows[:count], row(float("nan"), tokens=padding)])
    got = reference.finalize(rows, data.weights, data.index)
    assert got.shape == (inputs.T, inputs.H)
    assert torch.equal(got, reference.finalize(data.rows, data.weights, data.index))


def test_without_a_map_rows_are_token_major():
    rows = torch.arange(1.0, 7.0).unsqueeze(1).expand(6, H).contiguous()
    weights = torch.tensor([[1.0, 10.0], [1.0, 100.0], [0.5, 2.0]])
    got = reference.finalize(rows, weights, None)
    assert torch.equal(got[:, 0], torch.tensor([21.0, 403.0, 14.5]))
    assert torch.equal(got, reference.finalize(rows, weights, in_order(3, 2)))


def test_without_weights_rows_are_finalized():
    rows = torch.randn(3, H)
    assert torch.equal(reference.finalize(rows.to(BF16), None, None), rows.to(BF16).float())


def test_experts_are_added_in_order():
    """1e8 + 1 is 1e8 in fp32, so the order of three addends decides between 0 and 1."""
    values = {(0, 1, 2): 0.0, (0, 2, 1): 1.0}
    rows = torch.tensor([[1e8], [1.0], [-1e8]]).expand(3, H).contiguous()
    for order, want in values.items():
        index = torch.tensor([order], dtype=torch.int32)
        got = reference.finalize(rows, torch.ones(1, 3), index)
        assert torch.equal(got, row(want, dtype=torch.float32))


def test_ranks_are_added_in_rank_order():
    partials = [row(1e8, dtype=torch.float32), row(1.0, dtype=torch.float32)]
    partials.append(-partials[0])
    assert torch.equal(reference.all_reduce(partials), row(0.0, dtype=torch.float32))
    swapped = [partials[0], partials[2], partials[1]]
    assert torch.equal(reference.all_reduce(swapped), row(1.0, dtype=torch.float32))
    ranks = [TailArguments(partial) for partial in swapped]
    for _, residual_out in reference.tail(ranks):
        assert torch.equal(residual_out, row(1.0, dtype=torch.float32))


def test_a_partial_is_rounded_when_it_is_sent():
    """256 + 3 is 260 in bf16, so three ranks of it sum to 780; 3 * 259 would round to 776."""
    args = TailArguments(row(256.0), shared_output=row(3.0))
    assert torch.equal(reference.partial(args), row(259.0, dtype=torch.float32))
    for _, residual_out in reference.tail([args] * 3):
        assert torch.equal(residual_out, row(780.0))


def test_the_sum_is_rounded_before_it_is_scaled():
    """256 + 3 rounds to 260, and 0.75 of that is 195; 0.75 * 259 would round to 194."""
    ranks = [TailArguments(row(value), output_scale=0.75) for value in (256.0, 3.0)]
    for _, residual_out in reference.tail(ranks):
        assert torch.equal(residual_out, row(195.0))


def test_an_fp32_residual_stays_fp32_and_the_norm_reads_it():
    """1 + 2^-10 has no bf16 form. With eps = 0 the norm of a constant row is 1."""
    step = 2.0**-10
    ranks = [TailArguments(row(step), residual=row(1.0, dtype=torch.float32), eps=0.0)]
    norm_out, residual_out = reference.tail(ranks)[0]
    assert residual_out.dtype == torch.float32
    assert torch.equal(residual_out, row(1.0 + step, dtype=torch.float32))
    assert norm_out.dtype == BF16
    assert torch.equal(norm_out, row(1.0))


def test_a_residual_narrower_than_the_activation_is_rounded_before_the_norm():
    """Half the row is 1 + 2^-10, which a bf16 residual rounds to 1: the norm is 1 everywhere."""
    rows = torch.ones(1, H)
    rows[0, ::2] += 2.0**-10
    args = TailArguments(rows, residual=row(0.0), eps=0.0)
    norm_out, residual_out = reference.tail([args])[0]
    assert residual_out.dtype == BF16
    assert norm_out.dtype == torch.float32
    assert torch.equal(residual_out, row(1.0))
    assert torch.equal(norm_out, row(1.0, dtype=torch.float32))


@pytest.mark.parametrize("hidden", [64, 2880, 7168])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype, hidden):
    """The first tokens of a batch of 128, computed alone and with seven of them, bit for bit."""
    whole = arguments(dtype, tokens=128, hidden=hidden, missing=True)
    wanted = reference.tail([whole, whole])[0]
    per_token = ("expert_weights", "expanded_idx_to_permuted_idx", "shared_output", "residual")
    for tokens in (1, 7):
        fields = {name: getattr(whole, name)[:tokens] for name in per_token}
        part = dataclasses.replace(whole, **fields)
        for got, want in zip(reference.tail([part, part])[0], wanted, strict=True):
            assert torch.equal(got, want[:tokens])


def test_every_rank_gets_the_same_bits():
    ranks = [arguments(rank=rank, missing=True) for rank in range(4)]
    first, *others = reference.tail(ranks)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def naive(ranks):
    """The tail in fp64, written without the reference's own functions."""
    total = 0.0
    for args in ranks:
        rows = torch.cat([args.routed.double(), args.routed.new_zeros(1, inputs.H).double()])
        gathered = torch.nan_to_num(rows)[args.expanded_idx_to_permuted_idx.long()]
        routed = torch.einsum("tk,tkh->th", args.expert_weights.double(), gathered)
        total = total + args.routed_scaling_factor * routed + args.shared_output.double()
    for args in ranks:
        out = args.residual.double() + args.output_scale * total + args.replicated_output.double()
        norm = out / (out.square().mean(-1, keepdim=True) + args.eps).sqrt()
        yield norm * (args.weight_bias + args.norm_weight.double()), out


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_is_exact_and_the_reference_close_to_it(dtype, world_size):
    ranks = [
        dataclasses.replace(
            arguments(dtype, rank=rank, missing=True, replicated=True),
            output_scale=0.5,
            weight_bias=1.0,
        )
        for rank in range(world_size)
    ]
    exact = reference.tail(ranks, torch.float64)
    for got, want in zip(exact, naive(ranks), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    # each partial, their sum and the output are rounded once: half an ulp each
    half_ulp = torch.finfo(dtype).eps / 2
    magnitude = sum(reference.partial(args, torch.float64).abs() for args in ranks)
    for (norm, total), (exact_norm, exact_total) in zip(reference.tail(ranks), exact, strict=True):
        bound = half_ulp * (magnitude + exact_total.abs()) * 1.01 + 1e-6
        assert ((total - exact_total).abs() <= bound).all()
        assert (norm - exact_norm).norm() <= 4 * half_ulp * exact_norm.norm() + 1e-6


def test_the_oracle_rounds_nothing():
    args = TailArguments(row(256.0), shared_output=row(1.0), residual=row(2.0**-20))
    _, residual_out = reference.tail([args], torch.float64)[0]
    assert torch.equal(residual_out, row(257.0 + 2.0**-20, dtype=torch.float64))


def test_no_tokens():
    norm_out, residual_out = reference.tail([arguments(tokens=0)])[0]
    assert norm_out.shape == residual_out.shape == (0, inputs.H)
