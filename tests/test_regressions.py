"""Every fault that was found in the pass, as a test of its whole kind."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
from checks import assert_exact, assert_fused, assert_untouched, error
from torch._dynamo import mark_dynamic
from tracing import CEILING, trace

import moe_fusion
from moe_fusion import FusionConfig

pytestmark = pytest.mark.usefixtures("fake_group")

T, K, H = inputs.T, inputs.K, inputs.H
finalize = spellings.where_masked
reduce = spellings.functional
norm = spellings.norm_a
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def each(cases):
    return pytest.mark.parametrize("case", cases)


def wide(x):
    """In fp32, or in fp64 for the oracle."""
    return x if x.dtype == torch.float64 else x.float()


def tail(partial=finalize, after=lambda y, shared: y, close=norm):
    """The usual tail, with another partial, something after the reduction, or another norm."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + after(reduce(partial(rows, weights, index)), shared)
        return close(total, norm_weight), total

    return function


def normed(total, norm_weight):
    """A norm in fp32 of a sum in any dtype; its output has the weight's dtype."""
    x = wide(total)
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spellings.EPS)
    return (norm_weight * (x * inverse)).to(norm_weight.dtype)


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
    readers = {
        torch.float32: "aten.mul.Tensor, aten.pow.Tensor_Scalar",
        torch.bfloat16: "prims.convert_element_type",
    }
    reason = f"what the all_reduce feeds is read several times ({readers[dtype]})"
    assert_untouched(with_eps(lambda x, w: eps), reason, inputs.make(dtype, missing=True))


EPS_TENSORS = {
    "negative": lambda x, w: w[0] * -1e-6,
    "converted to int": lambda x, w: (w[0].abs() * 0.7).int(),
    "converted to int, above one": lambda x, w: (w[0].abs() * 2.9).int(),
    "rounded to fp16": lambda x, w: (w[0].abs() * 1234.567).half().float(),
    "rounded to bf16": lambda x, w: (w[0].abs() * 1234.567).bfloat16().float(),
    "read from an integer": lambda x, w: torch.full((), 3, dtype=torch.int64) * w[0].abs(),
}


OLD_TORCH = torch.__version__ < "2.13"  # its Inductor drops a conversion there and back


@each([case for case in EPS_TENSORS if not (OLD_TORCH and "rounded" in case)])
def test_an_eps_tensor_is_passed_as_the_graph_makes_it(case):
    """A conversion that changes it was dropped; a negative one raised when the op was called."""
    assert_fused(with_eps(EPS_TENSORS[case]), inputs.make(torch.float32, missing=True))


STRIDED = {
    "the sum": lambda total, rows: total.as_strided((H, H), (1, H)),
    "a view of the sum": lambda total, rows: total.view(H, H, 1).as_strided((H, H), (1, H)),
    "the norm's output": lambda total, rows: rows.as_strided((H, H), (1, H)),
    "a view of the output": lambda total, rows: rows.unsqueeze(0).as_strided((H, H), (1, H)),
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
    [(strided("the sum"), 0), (transposed, 1)],
    ids=["as_strided", "returned"],
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


def sum_in_fp32(total_of):
    def function(*tensors):
        data = inputs.Inputs(*tensors)
        total = total_of(data)
        return normed(total, data.norm_weight), total

    return function


WIDE_ADDENDS = {
    "scaled": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) * 0.001 + wide(d.shared)) * 0.3
    ),
    "two": lambda d: (
        wide(d.residual)
        + (wide(reduce(d.shared.flip(1))) + wide(d.shared) + wide(d.shared.flip(0)))
    ),
    "subtracted and scaled": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) - wide(d.shared)) * 0.3
    ),
    "scaled, widened by the add": lambda d: (
        wide(d.residual) + (wide(reduce(d.shared.flip(1))) + d.shared) * 0.3
    ),
    "scaled by alpha, widened by the add": lambda d: torch.add(
        wide(d.residual) + reduce(d.shared.flip(1)), d.shared, alpha=0.3
    ),
    "two, widened by the add": lambda d: (
        wide(d.residual) + reduce(d.shared.flip(1)) + d.shared + d.shared.flip(0)
    ),
}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALVES
@each(WIDE_ADDENDS)
def test_addends_that_the_graph_sums_in_fp32_are_not_summed_in_less(case, dtype):
    """They were scaled and added up in the activation dtype: a thousand times the error."""
    data = inputs.make(dtype, tokens=256)
    reason = "addends are scaled or summed in torch.float32"
    assert_untouched(sum_in_fp32(WIDE_ADDENDS[case]), reason, data)


KEPT_WIDE = {
    "up to the residual": lambda d, y, z: wide(d.residual) + wide(z) + wide(y),
    "up to the residual, widened by the add": lambda d, y, z: wide(d.residual) + z + y,
    "twice, then in fp32": lambda d, y, z: (wide(d.norm_weight) + (z + z) + y).to(y.dtype),
    "a bf16 sum, then in fp32": lambda d, y, z: wide(d.residual) + (z + d.shared.sin()) + y,
    "three sums, rounded once": lambda d, y, z: (
        wide(d.residual) + (wide(y) + wide(z) + wide(reduce(d.residual))).to(y.dtype)
    ),
    "scaled, then rounded": lambda d, y, z: (
        wide(d.residual) + (wide(y) * 0.3 + wide(z)).to(y.dtype)
    ),
    "their sum scaled, then rounded": lambda d, y, z: (
        wide(d.residual) + ((wide(y) + wide(z)) * 0.3).to(y.dtype)
    ),
}


KEPT_APART = ("three sums, rounded once", "their sum scaled, then rounded")  # nothing is fused


@HALVES
@each(KEPT_WIDE)
def test_sums_that_the_graph_adds_in_fp32_are_not_merged(case, dtype):
    """Two reductions became one whose sum of partials was rounded to the activation dtype."""

    def total_of(data):
        return KEPT_WIDE[case](data, reduce(data.shared), reduce(data.shared.flip(0)))

    data = inputs.make(dtype, tokens=256)
    traced = trace(sum_in_fp32(total_of), *data.args())
    fused = traced.report.fused
    assert traced.report.all_reduces_after == traced.report.all_reduces_before - fused
    assert fused == (case not in KEPT_APART)
    if case.startswith("up to the residual"):
        assert traced.reasons == ["the sum is an operand of another tail, which is reduced apart"]
    assert_exact(traced.output, sum_in_fp32(total_of), data)


@HALVES
@pytest.mark.parametrize("first", [False, True], ids=["scaled second", "scaled first"])
def test_a_scaled_partial_is_rounded_no_more_than_its_sum(first, dtype):
    """The second was scaled in the activation dtype, where the graph scales its sum in fp32."""

    def total_of(data):
        scaled = reduce(data.shared) if first else None
        plain = reduce(data.shared.flip(0) * 0.05)
        scaled = reduce(data.shared) if scaled is None else scaled
        return wide(data.residual) + torch.add(wide(plain), wide(scaled), alpha=0.3).to(plain.dtype)

    data = inputs.make(dtype, tokens=256)
    traced = assert_fused(sum_in_fp32(total_of), data, shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2


KEPT_WHOLE = {
    "the residual, scaled": lambda d, y, z: (wide(d.residual) + wide(z)) * 0.5 + y,
    "the residual, of three": lambda d, y, z: wide(d.residual) + (wide(d.shared.sin()) + z) + y,
    "in fp32, rounded": lambda d, y, z: (
        wide(d.residual) + (y + ((wide(z) + wide(d.shared.sin())) * 0.5).to(y.dtype))
    ),
}


@HALVES
@each(KEPT_WHOLE)
def test_an_addend_of_which_nothing_is_merged_stays_whole(case, dtype):
    """The terms of a sum that has a reduced sum in it were added apart, which was then refused."""

    def total_of(data):
        return KEPT_WHOLE[case](data, reduce(data.shared), reduce(data.shared.flip(0)))

    data = inputs.make(dtype, tokens=256)
    left = {"the sum is an operand of another tail, which is reduced apart": 1}
    traced = assert_fused(sum_in_fp32(total_of), data, left=left)
    assert traced.report.all_reduces_before == 2


def test_an_addend_with_several_factors_is_rounded_once():
    """Each of its factors rounded it, where the graph multiplies in fp32."""

    def total_of(data):
        y = wide(reduce(data.shared.flip(0) * 0.05) + data.shared)
        one, two = wide(data.norm_weight[0]).exp(), wide(data.norm_weight[1]).sin()
        return wide(data.residual) * 0.01 + y * one * two * 0.3

    data = inputs.make(tokens=256)
    assert_fused(sum_in_fp32(total_of), data, shared="after the all_reduce")


def test_an_all_reduce_that_was_refused_and_merged_later_is_not_reported_as_left():
    """fp16: from one of the two sums on, an addend may overflow; from the other, it may not."""

    def function(rows, weights, index, shared, residual, norm_weight):
        first = (reduce(shared) + residual.sin()) * 2.0
        total = residual + (first * 0.5 + reduce(shared.flip(0)))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16, tokens=256)
    assert_fused(function, data, shared="its own all_reduce and after the all_reduce")


REDUCED_TWICE = {
    "another all_reduce": (2, lambda routed: reduce(routed) - reduce(routed) * 0.5),
    "the same": (1, lambda routed: reduce(routed + routed)),
    "the same, alpha": (1, lambda routed: reduce(torch.add(routed, routed, alpha=-0.5))),
}


@each(REDUCED_TWICE)
def test_a_finalize_that_is_an_addend_too_is_not_computed_twice(case):
    """The op had it to compute and read it, as finalized, as well."""
    count, reduced = REDUCED_TWICE[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduced(finalize(rows, weights, index))
        return norm(total, norm_weight), total

    traced = assert_fused(function, inputs.make(missing=True), slack=1.1, finalize="finalized")
    assert traced.report.all_reduces_before == count


WIDE_PARTIALS = {
    "scaled": lambda d: (finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared)) * 0.3,
    "two": lambda d: (
        finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared) + wide(d.shared.flip(0))
    ),
    "divided": lambda d: finalize(wide(d.rows), wide(d.weights), d.index) + wide(d.shared) / 3.0,
    "scaled, widened by the add": lambda d: (
        (finalize(wide(d.rows), wide(d.weights), d.index) + d.shared) * 0.3
    ),
    "scaled, widened by the weights": lambda d: (
        (finalize(d.rows, wide(d.weights), d.index) + d.shared) * 0.3
    ),
    "two, widened by the add": lambda d: (
        finalize(wide(d.rows), wide(d.weights), d.index) + d.shared + d.shared.flip(0)
    ),
}


@HALVES
@each(WIDE_PARTIALS)
def test_a_partial_that_is_summed_in_fp32_is_rounded_once(case, dtype):
    """Shared addends were scaled and added up in the activation dtype before the op rounded."""

    def total_of(data):
        partial = WIDE_PARTIALS[case](data).to(data.shared.dtype)
        return wide(data.residual) + wide(reduce(partial))

    data = inputs.make(dtype, tokens=256, missing=True)
    assert_fused(sum_in_fp32(total_of), data, finalize="finalized", shared="none")


def test_a_single_wide_addend_is_still_taken():
    """What is only widened is the same number in the activation dtype."""

    def total_of(data):
        partial = finalize(wide(data.rows), wide(data.weights), data.index) + wide(data.shared)
        return wide(data.residual) + wide(reduce(partial.to(data.shared.dtype)))

    assert_fused(
        sum_in_fp32(total_of),
        inputs.make(tokens=256, missing=True),
        finalize="permuted rows",
        shared="before the all_reduce",
    )


OVERFLOWS_AFTER = {
    "one factor": lambda y, shared: (y + shared * -499) * 200.0,
    "two factors": lambda y, shared: ((y + shared * -499) * 20.0) * 10.0,
    "a division": lambda y, shared: (y + shared * -499) / 0.005,
    "subtracted": lambda y, shared: (y - shared * 499) * 200.0,
}


@each(OVERFLOWS_AFTER)
def test_a_factor_that_could_overflow_an_addend_after_the_reduction_is_refused(case):
    """fp16: the factor was distributed, each addend overflowed, and inf - inf is NaN."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + OVERFLOWS_AFTER[case](reduce(shared * 500), shared)
        return norm(total, norm_weight), total

    reason = "an addend that is scaled up alone could overflow float16"
    data = inputs.make(torch.float16, tokens=256)
    assert torch.isfinite(function(*data.args())[1]).all()
    assert_untouched(function, reason, data)


OVERFLOWS_BEFORE = {
    "one factor": lambda routed, shared: (routed + shared * 199) * 1000.0,
    "two factors": lambda routed, shared: ((routed + shared * 199) * 50.0) * 20.0,
    "a division": lambda routed, shared: (routed + shared * 199) / 0.001,
    "subtracted": lambda routed, shared: (routed - shared * -199) * 1000.0,
}


@each(OVERFLOWS_BEFORE)
def test_a_factor_that_could_overflow_the_shared_addend_is_left_to_the_graph(case):
    """fp16: the sum of routed and shared cancels, what each was scaled to does not."""

    def partial(rows, weights, index, shared):
        spread = (shared * -100).unsqueeze(1).expand(-1, K, -1).reshape(-1, H)
        routed = (spread.view(-1, K, H) * (weights / weights).unsqueeze(-1)).sum(1)
        return OVERFLOWS_BEFORE[case](routed, shared)

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(partial(rows, weights, index, shared))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16, tokens=256)
    assert torch.isfinite(function(*data.args())[1]).all()
    assert_fused(function, data, ranks=1, finalize="finalized", shared="none")


@pytest.mark.parametrize("scale", [50.0 * 0.01, -0.75])
def test_a_factor_of_at_most_one_is_still_distributed(scale):
    """fp16: no addend grows by it."""

    def function(rows, weights, index, shared, residual, norm_weight):
        partial = (finalize(rows, weights, index) * 0.5 + shared * 0.25) * scale
        total = residual + reduce(partial)
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16, tokens=64, missing=True)
    assert_fused(function, data, finalize="permuted rows", shared="before the all_reduce")


PROJECTIONS = {
    "einsum over heads": lambda rows, matrix: torch.einsum(
        "tnh,nhd->td", rows.view(len(rows), 8, -1), matrix.view(8, -1, H)
    ),
    "einsum": lambda rows, matrix: torch.einsum("tk,kd->td", rows, matrix),
    "einsum, transposed": lambda rows, matrix: torch.einsum("tk,dk->td", rows, matrix.t()),
    "matmul": torch.matmul,
    "bmm": lambda rows, matrix: torch.bmm(rows[None], matrix[None])[0],
    "bmm by token": lambda rows, matrix: torch.bmm(rows[:, None], matrix[None])[:, 0],
}


@each(PROJECTIONS)
def test_a_matrix_product_of_one_token_is_no_sum_over_experts(case):
    """It has a top-k reduction's shape, and was refused for more experts than a token has."""

    def partial(rows, weights, index):
        return PROJECTIONS[case](weights[:, :H], rows[: weights.shape[1]])

    data = inputs.make(torch.float32, tokens=1, top_k=64)
    assert_fused(tail(partial), data, finalize="finalized", top_k=None)


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


UNMERGED = {
    "a tensor scales one": (2, lambda a, b, s, t: a + s * b),
    "a tensor scales each": (2, lambda a, b, s, t: s * a + t * b),
    "a tensor scales one, by addcmul": (2, lambda a, b, s, t: torch.addcmul(a, b, s)),
    "three": (3, lambda a, b, c, s, t: (a + s * b) + t * c),
}


@each(UNMERGED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_without_a_finalize_that_stay_apart_do_not_yield_to_each_other(case, dtype):
    """To match one of them looks at the others, which must not look back."""
    count, sum_of = UNMERGED[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        sums = [reduce(shared * place) for place in range(1, count + 1)]
        total = residual + sum_of(*sums, norm_weight[0] * 0.75, norm_weight[1] * 0.5)
        return norm(total, norm_weight), total

    data = inputs.make(dtype)
    traced = trace(function, *data.args())
    assert [site.shared for site in traced.report.sites] == ["after the all_reduce"]
    assert traced.report.all_reduces_before == count
    assert traced.report.all_reduces_after == count - 1
    assert_exact(traced.output, function, data)


ITSELF = {
    "y + y": lambda y, shared: y + y,
    "add, alpha": lambda y, shared: torch.add(y, y, alpha=2),
    "sub, alpha": lambda y, shared: torch.sub(y, y, alpha=0.25),
    "views of a copy": lambda y, shared: (y + y).view(1, *y.shape).squeeze(0),
    "(y - shared / 2) twice": lambda y, shared: (z := y - shared * 0.25) + z,
}


@each(ITSELF)
@pytest.mark.parametrize("finalized", [False, True], ids=["routed", "finalized"])
@both_dtypes
def test_a_sum_that_is_added_to_itself_is_reduced_once(case, finalized, dtype):
    """It is twice the sum, not a second partial."""

    def partial(rows, weights, index):
        return finalize(rows, weights, index) * 0.25

    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(shared * 0.5 if finalized else partial(rows, weights, index) + shared)
        total = residual + ITSELF[case](y, shared)
        return norm(total, norm_weight), total

    form = "finalized" if finalized else "permuted rows"
    traced = assert_fused(function, inputs.make(dtype, missing=True), slack=1.1, finalize=form)
    assert traced.report.all_reduces_before == 1
    assert "its own" not in traced.report.sites[0].shared


def test_a_sum_that_is_added_to_a_multiple_of_itself_by_a_tensor_is_refused():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index))
        total = residual + torch.addcmul(y, y, norm_weight[0])
        return norm(total, norm_weight), total

    reason = "aten.addcmul comes between the all_reduce and the norm"
    assert_untouched(function, reason, inputs.make(missing=True))


SCALED_PARTIALS = {
    "alike": (1.0, 1.0),
    "apart": (1.0, 0.5),
    "both": (-0.5, 0.25),
}


@each(SCALED_PARTIALS)
@pytest.mark.parametrize("shared_in", ["neither", "first", "second"])
@both_dtypes
def test_of_two_finalized_partials_the_second_is_taken_as_it_is(case, shared_in, dtype):
    """Its own scale is in it already."""
    first_scale, second_scale = SCALED_PARTIALS[case]

    def function(rows, weights, index, shared, residual, norm_weight):
        first = finalize(rows, weights, index) * 0.25
        second = finalize(rows, weights * 0.5, index) * -0.75
        first = first + shared if shared_in == "first" else first
        second = second - shared if shared_in == "second" else second
        total = residual + (reduce(first) * first_scale + second_scale * reduce(second))
        return norm(total, norm_weight), total

    data = inputs.make(dtype, missing=True)
    traced = assert_fused(function, data, slack=1.2, finalize="permuted rows")
    assert traced.report.all_reduces_before == 2


@both_dtypes
def test_a_second_sum_that_is_added_twice_counts_twice(dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        other = reduce(shared)
        total = residual + (reduce(finalize(rows, weights, index) * 0.5) + (other + other))
        return norm(total, norm_weight), total

    data = inputs.make(dtype, missing=True)
    traced = assert_fused(function, data, slack=1.1, shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2


def back_in_place(rows, weights, base, permutation):
    """Rows that an index puts in token order, where each is weighted and summed."""
    each = base.index_put([permutation], rows[: len(permutation)])
    return (each.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def taken_back(rows, weights, order, inverse):
    """Rows that are weighted in sorted order, and then taken by an index."""
    weighted = rows[: len(order)] * weights.flatten()[order].unsqueeze(-1)
    return weighted[inverse].view(*weights.shape, -1).sum(1)


def by_token(index):
    """The order of each token's own rows, from 0 to K - 1."""
    return torch.argsort(index, dim=-1).flatten()


def sorted_again(rows, weights, index):
    order = torch.argsort(index, dim=-1)
    return taken_back(rows, weights, order.flatten(), by_token(order))


def accumulated(rows, weights, order):
    weighted = rows[: len(order)] * weights.flatten()[order].unsqueeze(-1)
    zeros = rows.new_zeros(len(weights), rows.shape[1])
    return zeros.index_add(0, order // weights.shape[1], weighted)


def inverse_of(order):
    """By index_put into zeros: entries that the order does not name are 0."""
    return torch.zeros_like(order).index_put([order], torch.arange(len(order)))


NO_PERMUTATIONS = {
    "some rows twice, into zeros": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), m.flatten().long() // 2
    ),
    "some rows twice, into others": lambda r, w, m: back_in_place(
        r, w, r[: m.numel()].sin(), m.flatten().long() // 2
    ),
    "from the end": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), m.flatten().long() - 3
    ),
    "sorted by token, into zeros": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), by_token(m)
    ),
    "sorted by token, accumulated": lambda r, w, m: accumulated(r, w, by_token(m)),
    "sorted by token, inverted": lambda r, w, m: taken_back(
        r, w, by_token(m), inverse_of(by_token(m))
    ),
    "sorted by token, sorted again": sorted_again,
}


@each(NO_PERMUTATIONS)
def test_an_index_that_is_no_permutation_is_not_inverted(case):
    """Entries of its inverse that it does not name were undefined: rows anywhere were read."""
    assert_fused(tail(NO_PERMUTATIONS[case]), inputs.make(torch.float32, tokens=48))


def in_blocks(rows, index):
    """The first rows as [experts, capacity, H]: what a batched matrix product leaves."""
    return rows[: index.numel()].view(3, -1, rows.shape[-1]).sin()


BLOCKS = {
    "as they are": lambda r, w, m: (in_blocks(r, m).flatten(0, 1)[m.long()] * w.unsqueeze(-1)).sum(
        1
    ),
    "counted from the end": lambda r, w, m: (
        in_blocks(r, m).flatten(0, 1)[m.long() - 7] * w.unsqueeze(-1)
    ).sum(1),
    "weighted, then accumulated": lambda r, w, m: (
        in_blocks(r, m).neg().exp().reshape(-1, r.shape[-1])[m] * w.unsqueeze(-1)
    ).sum(1),
    "with a block of zeros": lambda r, w, m: (
        torch.cat([in_blocks(r, m), r.new_zeros(1, m.numel() // 3, r.shape[-1])]).flatten(0, 1)[
            torch.where(m >= 5, m - 5, 3).long()
        ]
        * w.unsqueeze(-1)
    ).sum(1),
}


@each(BLOCKS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_that_were_blocks_are_counted_as_rows(case, dynamic):
    """An index that may count from the end was taken modulo the number of blocks."""
    data = inputs.make(torch.float32, tokens=48)
    for tensor in (data.weights, data.index, data.shared, data.residual) if dynamic else ():
        mark_dynamic(tensor, 0)
    assert_fused(tail(BLOCKS[case]), data)
