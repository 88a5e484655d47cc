"""Every fault that was found in the pass, as a test of its whole kind."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused, assert_untouched, error
from regressions import (
    H,
    K,
    T,
    both_dtypes,
    each,
    finalize,
    norm,
    reduce,
    tail,
    wide,
)
from torch._dynamo import mark_dynamic
from torch_versions import OLD_TORCH
from tracing import CEILING

import moe_fusion
from moe_fusion import FusionConfig

pytestmark = pytest.mark.usefixtures("fake_group")


LATE_WEIGHTS = {
    "view": lambda w: w.view(1, -1),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "computed": lambda w: (w * 1.5).view(1, -1),
    "a constant added": lambda w: (w + 0.25).view(1, -1),
    "of rank 1": lambda w: w * 1.5,
}


@pytest.mark.parametrize(
    ("batched", "dtype"),
    [(False, torch.bfloat16), (True, torch.float32)],
    ids=["[T, H] bf16", "[B, S, H] fp32"],
)
@each(LATE_WEIGHTS)
def test_a_norm_weight_that_is_made_after_the_sum_precedes_the_op(case, batched, dtype):
    """The reshape of the weight was put before the node that makes the weight: lint failed."""

    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index))
        if batched:
            y, residual = y.view(2, T // 2, H), residual.view(2, T // 2, H)
        total = residual + y
        weight = LATE_WEIGHTS[case](norm_weight)
        return norm(total, weight.unsqueeze(0) if batched and weight.dim() > 1 else weight), total

    assert_fused(function, inputs.make(dtype, missing=True), finalize="permuted rows")


SCALAR_WEIGHTS = {
    "an element": lambda w: w[0],
    "a sum": lambda w: w.sum(),
    "a maximum, computed late": lambda w: w.max() * 1.5,
    "one element, of rank 2": lambda w: w[:1].view(1, 1),
}


@both_dtypes
@each(SCALAR_WEIGHTS)
def test_a_norm_weight_of_one_element_stays_outside_the_op(case, dtype):
    """A 0-d factor of the normalised rows was unpacked as a shape: ValueError."""
    function = tail(close=lambda total, w: norm(total, SCALAR_WEIGHTS[case](w)))
    assert_fused(function, inputs.make(dtype, missing=True), norm="no weight")


@pytest.mark.parametrize(
    ("leading", "dtype"), [((1, 1), torch.bfloat16), ((1, 1, 1), torch.float32)], ids=str
)
def test_a_weight_of_more_dimensions_gives_the_norm_its_own_shape(leading, dtype):
    """A [1, 1, H] weight makes [1, T, H] rows; the fused ones were [T, H]."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        return norm(total, norm_weight.view(*leading, H)), total

    traced = assert_fused(function, inputs.make(dtype, missing=True))
    assert traced.output[0].shape == (*leading[1:], T, H)


def _taller(dim, fill):
    def close(total, norm_weight):
        x = wide(total)
        eps = torch.full(fill, 1e-3) if fill else 1e-3
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (norm_weight * ((x if dim is None else x.unsqueeze(dim)) * inverse)).to(total.dtype)

    return close


TALLER = {
    "the rows have one more dimension": _taller(1, None),
    "eps has more rows": _taller(None, (2, 1, 1)),
}


@each(TALLER)
def test_a_norm_with_more_rows_than_the_sum_is_refused(case):
    """A norm that broadcasts its rows was fused, and its output had the rows of the sum."""
    reason = "the norm's output has more rows than the sum"
    assert_untouched(tail(close=TALLER[case]), reason, inputs.make(torch.float32, missing=True))


FILLED = {
    "scale before": lambda fill: tail(lambda *args: finalize(*args) * fill()),
    "scale of the rows": lambda fill: tail(lambda rows, w, m: finalize(rows * fill(), w, m)),
    "scale after": lambda fill: tail(after=lambda y, shared: y * fill()),
    "eps": lambda fill: tail(close=lambda total, w: norm(total, w, fill())),
    "weight's bias": lambda fill: tail(close=lambda total, w: norm(total, w + fill())),
}
FILLS = {
    "int64": lambda: torch.full((), 2.7, dtype=torch.int64),
    "bf16": lambda: torch.full((), 0.1, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("fill", FILLS)
@each(FILLED)
def test_a_filled_tensor_counts_as_its_dtype_rounds_it(case, fill):
    """``full((), 2.7, dtype=int64)`` was read as 2.7, not as the 2 that it holds."""
    assert_fused(FILLED[case](FILLS[fill]), inputs.make(torch.float32, missing=True))


BROADCASTING = {
    "rows": lambda y, residual: y * torch.full((2, 1, 1), 0.5, dtype=y.dtype),
    "rows, then a residual": lambda y, residual: (
        y * torch.full((2, 1, 1), 0.5, dtype=y.dtype) + residual.unsqueeze(0).expand(2, -1, -1)
    ),
    "one dimension more": lambda y, residual: y * torch.full((1, 1, 1), 0.5, dtype=y.dtype),
    "a quotient": lambda y, residual: y / torch.full((2, 1, 1), 2.0, dtype=y.dtype),
}


@each(BROADCASTING)
def test_a_filled_tensor_that_broadcasts_the_sum_is_no_scale(case):
    """``full((2, 1, 1), 0.5)`` doubles the rows; it was taken for the number 0.5."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = BROADCASTING[case](reduce(shared), residual)
        return norm(total, norm_weight), total

    which = "div" if case == "a quotient" else "mul"
    reason = f"aten.{which}.Tensor comes between the all_reduce and the norm"
    assert_untouched(function, reason, inputs.make())


BROADCAST_PARTIALS = {
    "over K": (
        lambda r, w, m: (
            r[:T].unsqueeze(1) * torch.full((T, K, 1), 0.5, dtype=r.dtype) * w.unsqueeze(-1)
        ).sum(1),
        "token-major rows",
    ),
    "over K, unweighted rows": (
        lambda r, w, m: (r[:T].unsqueeze(1) * w.unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "weights over K": (
        lambda r, w, m: (r[: T * K].view(T, K, H) * w[:, :1].unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "weights over T": (
        lambda r, w, m: (r[: T * K].view(T, K, H) * w[:1].unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "map over K": (
        lambda r, w, m: (r[m[:, :1]] * w.unsqueeze(-1)).sum(1),
        "finalized",
    ),
}


@each(BROADCAST_PARTIALS)
def test_rows_or_routing_that_broadcast_are_not_passed(case):
    """Rows that a factor spreads over K were taken for T * K token-major rows: ValueError."""
    partial, form = BROADCAST_PARTIALS[case]
    assert_fused(tail(partial), inputs.make(), finalize=form)


def _longer_weights(rows, weights, index):
    order = torch.sort(index.flatten()).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    scores = torch.cat([weights, weights]).flatten()[order]
    return (rows[: order.numel()] * scores.unsqueeze(-1))[inverse].view(*index.shape, -1).sum(1)


def test_weights_of_more_entries_than_the_permutation_are_left_to_the_graph():
    """The sorted weights were looked up in a tensor of 2 * T * K entries: ValueError."""
    assert_fused(tail(_longer_weights), inputs.make(), finalize="finalized")


FACTORS = {
    "mask": (
        lambda rows, w, m: (rows[m.clamp_min(0)] * (m >= 0).unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "mask, then weight": (
        lambda rows, w, m: (rows[m.clamp_min(0)] * (m >= 0).unsqueeze(-1) * w.unsqueeze(-1)).sum(1),
        "token-major rows",  # the masked rows are what is weighted
    ),
    "int32": (lambda rows, w, m: (rows[m] * m.unsqueeze(-1)).sum(1), "finalized"),
    "int64": (lambda rows, w, m: (rows[m] * m.long().unsqueeze(-1)).sum(1), "finalized"),
    "uint8, token-major": (
        lambda rows, w, m: (rows[: T * K].view(T, K, H) * m.to(torch.uint8).unsqueeze(-1)).sum(1),
        "finalized",
    ),
}


@each(FACTORS)
def test_a_factor_of_the_rows_that_is_no_float_is_no_weight(case):
    """Booleans and integers were passed as weights: TypeError in place of a smaller fusion."""
    partial, form = FACTORS[case]
    assert_fused(tail(partial), inputs.make(torch.float32), finalize=form)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_a_norm_weight_that_is_no_float_stays_outside_the_op(dtype):
    """An integer vector was passed as ``norm_weight``: TypeError."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        return norm(total, torch.arange(H).to(dtype)), total

    data = inputs.make(torch.float32, missing=True)
    assert_fused(function, data, finalize="permuted rows", norm="no weight")


def masked_by(mask, index_of=lambda m: m):
    def partial(rows, weights, index):
        gathered = torch.where(mask(index).unsqueeze(-1), rows[index_of(index)], 0)
        return (gathered * weights.unsqueeze(-1)).sum(1)

    return tail(partial)


def finite_rows(**options):
    """Inputs whose every row holds numbers: a wrong row shows as a wrong number."""
    data = inputs.make(torch.float32, **options)
    data.rows = torch.randn(data.rows.shape, generator=torch.Generator().manual_seed(3))
    return data


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16], ids=str)
def test_a_map_that_is_narrowed_reads_the_rows_that_the_narrow_one_names(dtype):
    """``map.bool().long()`` and ``map.to(int8).long()`` were taken for the map itself."""
    function = masked_by(lambda m: m >= 0, lambda m: m.to(dtype).long())
    data = finite_rows(tokens=100, missing=True)
    assert data.index.max() > torch.iinfo(torch.int8).max
    assert_fused(function, data)


NARROWED_MASKS = {
    "uint8 >=": lambda m: m.to(torch.uint8) >= 0,
    "uint8 >": lambda m: m.to(torch.uint8) > -1,
    "uint8, not <": lambda m: ~(m.to(torch.uint8) < 0),
    "int8 >=": lambda m: m.to(torch.int8) >= 0,
    "bool >=": lambda m: m.bool() >= 0,
}


@each(NARROWED_MASKS)
def test_a_mask_of_a_narrowed_map_drops_what_it_says(case):
    """``map.to(uint8) >= 0`` always holds; it was taken for ``map >= 0``."""
    assert_fused(masked_by(NARROWED_MASKS[case]), finite_rows(tokens=100, missing=True))


NEGATIVE_MASKS = {
    "!= -1": lambda m: m != -1,
    "not == -1": lambda m: ~(m == -1),
    "-1 != map": lambda m: torch.ne(m.long(), -1),
    ">= -1": lambda m: m >= -1,
}


@each(NEGATIVE_MASKS)
def test_a_mask_keeps_the_negative_entries_that_it_does_not_name(case):
    """``map != -1`` was taken for ``map >= 0``: an entry of -2 lost its row, the last but one."""
    data = finite_rows()
    data.index[0, 0], data.index[1, 1], data.index[2, 0] = -2, -1, -3
    assert_fused(masked_by(NEGATIVE_MASKS[case]), data, finalize="permuted rows")


SELECTED = {
    "a flat mask": lambda rows, m: rows[m.flatten() >= 0],
    "a mask of two dimensions": lambda rows, m: rows.view(*m.shape, -1)[m >= 0],
}


@pytest.mark.parametrize(("tokens", "top_k"), [(4, 4), (1, 2)])
@each(SELECTED)
def test_rows_that_a_mask_selects_are_not_gathered_by_it(case, tokens, top_k):
    """``rows[mask]`` selects; the mask was taken for row numbers 0 and 1."""

    def partial(rows, weights, index):
        chosen = SELECTED[case](rows[: weights.numel()], index)
        return (chosen.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)

    data = inputs.make(torch.float32, tokens=tokens, top_k=top_k)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_fused(tail(partial), data, finalize="token-major rows")


BIASED = {
    "a bias of the other sum": lambda d, y: y + (d.norm_weight + reduce(d.shared)),
    "the other way round": lambda d, y: (reduce(d.shared) + d.norm_weight) + y,
}


@each(BIASED)
def test_a_sum_with_a_bias_is_opened_for_the_sum_in_it(case):
    """The vector was taken for rows, which the op does not add: ValueError."""

    def function(*tensors):
        data = inputs.Inputs(*tensors)
        total = BIASED[case](data, reduce(finalize(data.rows, data.weights, data.index)))
        return norm(total, data.norm_weight), total

    shared = "its own all_reduce and after the all_reduce"
    data = inputs.make(torch.float32, missing=True)
    assert_fused(function, data, shared=shared, residual="none", finalize="permuted rows")


OPENED = {
    "one row of the other sum": lambda d, y: y + (d.residual + reduce(d.shared[:1])),
    "one column of the other sum": lambda d, y: y + (d.residual + reduce(d.shared[:, :1])),
}


@each(OPENED)
def test_a_sum_of_addends_that_broadcasts_stays_one_addend(case):
    """The addend was opened into a vector or a row, which the op does not add: ValueError."""

    def function(*tensors):
        data = inputs.Inputs(*tensors)
        y = reduce(finalize(data.rows, data.weights, data.index))
        total = OPENED[case](data, y)
        return norm(total, data.norm_weight), total

    reason = "aten.add.Tensor comes between the all_reduce and the norm"
    data = inputs.make(torch.float32, missing=True)
    assert_fused(function, data, left={reason: 1}, finalize="permuted rows")


TWO_SYMBOLS = {
    "no residual": lambda x, y: y.view(x.shape) * 0.22,
    "a residual of another shape": lambda x, y: (x.view(-1, H) + y).view(x.shape) * 0.5,
    "a residual": lambda x, y: x + y.view(x.shape),
    "a view that the norm reads": lambda x, y: (x.view(-1, H) + y).view(x.shape),
    "a view of the bare sum": lambda x, y: y.view(x.shape),
}


@pytest.mark.parametrize("case", TWO_SYMBOLS)
def test_two_symbolic_dimensions_are_found_wherever_the_graph_has_them(case):
    """With no [B, S, H] operand left the sizes of the outputs were not found: StopIteration."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = TWO_SYMBOLS[case](residual, reduce(finalize(rows, weights, index)))
        return norm(total, norm_weight), total + 1

    data = inputs.make(torch.float32, tokens=10, missing=True)
    data.residual = data.residual.view(2, 5, H)
    for tensor, dims in ((data.weights, 1), (data.index, 1), (data.residual, 2)):
        for dim in range(dims):
            mark_dynamic(tensor, dim)
    traced = assert_fused(function, data, finalize="permuted rows")
    assert "*" in traced.report.sites[0].num_tokens


def with_eps(eps):
    def close(total, norm_weight):
        x = wide(total)
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps(x, norm_weight))
        return (norm_weight * (x * inverse)).to(total.dtype)

    return tail(close=close)


EPS_OF_THE_SUM = {
    "maximum": lambda x, w: x.abs().max() * 1e-3,
    "mean": lambda x, w: x.pow(2).mean() * 1e-3,
    "element": lambda x, w: x[0, 0].abs(),
}


@each(EPS_OF_THE_SUM)
def test_an_eps_that_is_computed_from_the_sum_is_refused(case):
    """The op would have read its own output: a cycle, and an AssertionError."""
    reason = "the norm's eps is computed from the sum"
    assert_untouched(with_eps(EPS_OF_THE_SUM[case]), reason, inputs.make(missing=True))


@pytest.mark.parametrize(
    ("eps", "dtype"), [(-1e-6, torch.bfloat16), (-0.5, torch.float32)], ids=str
)
def test_a_negative_constant_eps_is_refused(eps, dtype):
    """The op does not take it: ValueError when the graph was compiled."""
    reason = (
        "the RMSNorm is not one that is known: expected x * rsqrt(mean(x ** 2, -1) + eps), eps >= 0"
    )
    assert_untouched(with_eps(lambda x, w: eps), reason, inputs.make(dtype, missing=True))


EPS_TENSORS = {
    "negative": lambda x, w: w[0] * -1e-6,
    "converted to int": lambda x, w: (w[0].abs() * 0.7).int(),
    "converted to int, above one": lambda x, w: (w[0].abs() * 2.9).int(),
    "rounded to fp16": lambda x, w: (w[0].abs() * 1234.567).half().float(),
    "rounded to bf16": lambda x, w: (w[0].abs() * 1234.567).bfloat16().float(),
    "read from an integer": lambda x, w: torch.full((), 3, dtype=torch.int64) * w[0].abs(),
}


@each([case for case in EPS_TENSORS if not (OLD_TORCH and "rounded" in case)])
def test_an_eps_tensor_is_passed_as_the_graph_makes_it(case):
    """A conversion that changes it was dropped; a negative one raised when the op was called."""
    assert_fused(with_eps(EPS_TENSORS[case]), inputs.make(torch.float32, missing=True))


STRIDED = {
    "the sum": lambda total, rows: total.as_strided((H, H), (1, H)),
    "a view of the sum": lambda total, rows: total.view(H, H, 1).as_strided((H, H), (1, H)),
    "the norm's output": lambda total, rows: rows.as_strided((H, H), (1, H)),
    "a view of the output": lambda total, rows: rows.unsqueeze(0).as_strided((H, H), (1, H)),
    "the sum, transposed": lambda total, rows: total.T.as_strided((H, H), (H, 1)),
    "a slice of the sum": lambda total, rows: total[1:].as_strided((H - 1, H), (H, 1)),
    "what has the strides of the sum": lambda total, rows: (total * 2).as_strided((H, H), (H, 1)),
    "the output, transposed": lambda total, rows: rows.T.as_strided((H, H), (H, 1)),
}


def strided(case):
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual.T + reduce(finalize(rows, weights, index))
        normalised = norm(total, norm_weight)
        return normalised, total, STRIDED[case](total, normalised)

    return function


@each(STRIDED)
def test_outputs_that_as_strided_reads_are_refused(case):
    """The op's outputs are contiguous, the transposed sum was not: other elements were read."""
    reason = "as_strided reads the memory of the sum or of the norm's output"
    assert_untouched(strided(case), reason, inputs.make(tokens=H, missing=True))


def transposed(rows, weights, index, shared, residual, norm_weight):
    total = residual.T + reduce(finalize(rows, weights, index))
    return norm(total, norm_weight), total


@pytest.mark.parametrize(
    ("function", "fused"),
    [(strided("the sum"), 0), (strided("the sum, transposed"), 0), (transposed, 1)],
    ids=["as_strided", "transposed, then as_strided", "returned"],
)
def test_inductor_keeps_the_elements_and_strides_of_a_transposed_sum(function, fused):
    """Inductor's as_strided read the op's contiguous outputs as if they were transposed."""
    data = inputs.make(torch.float32, tokens=H, missing=True)
    eager = function(*data.args())
    oracle = function(*data.to(torch.float64).args())
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        torch.no_grad(),
        moe_fusion.fusing(FusionConfig(token_ceiling=CEILING)) as report,
    ):
        outputs = torch.compile(function, fullgraph=True)(*data.args())
    assert report.fused == fused, str(report)
    for got, plain, want in zip(outputs, eager, oracle, strict=True):
        assert got.shape == plain.shape
        assert got.stride() == plain.stride()
        assert error(got, want) <= 1.02 * error(plain, want) + 3e-7


BIASES = {
    "ones + element": lambda w: torch.ones(H, dtype=w.dtype) + w[:1],
    "element + ones": lambda w: w[:1] + torch.ones(H, dtype=w.dtype),
    "full + 0-d": lambda w: torch.full((H,), 0.5, dtype=w.dtype) + w[0],
    "zeros + element": lambda w: torch.zeros(H, dtype=w.dtype) + w[:1],
}


@each(BIASES)
def test_a_constant_vector_plus_one_element_is_the_weight_itself(case):
    """It was taken for a one-element weight with a bias: ValueError."""
    function = tail(close=lambda total, w: norm(total, BIASES[case](w)))
    data = inputs.make(torch.float32, missing=True)
    assert ", 0, 1, 1, 0)" in assert_fused(function, data).after[0]


FIRST_NORMS = {
    "its output is wide": lambda x, w: w * x,
    "its weight is a matrix": lambda x, w: x * x.sin(),
}


@each(FIRST_NORMS)
def test_of_two_norms_the_one_that_the_op_can_express_is_found(case):
    """Only the first was looked at, and what is wrong with it was the reason for a refusal."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index))
        x = wide(total)  # with an eps of its own, lest both norms be one in part
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        first = FIRST_NORMS[case](x, norm_weight.to(x.dtype))
        return first, norm(total, norm_weight), total

    assert_fused(function, inputs.make(missing=True), slack=1.1, finalize="permuted rows")
