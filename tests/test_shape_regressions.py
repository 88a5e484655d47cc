"""Faults that were found in constants and addends that broadcast, symbolic sizes and strides."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused, assert_untouched, error
from regressions import (
    H,
    each,
    finalize,
    norm,
    reduce,
    tail,
)
from torch._dynamo import mark_dynamic
from tracing import CEILING

import moe_fusion
from moe_fusion import FusionConfig

pytestmark = pytest.mark.usefixtures("fake_group")


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
    assert (
        compiled_like_eager(function, inputs.make(torch.float32, tokens=H, missing=True)) == fused
    )


def branches(taken):
    """Two tails of which one is taken; both return the same strides."""

    def function(*tensors):
        return torch.cond(torch.tensor(taken), tail(), tail(after=torch.add), tensors)

    return function


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_keeps_the_strides_of_what_it_returns(taken):
    """A branch that is fused returned contiguous rows, the other one transposed ones: no code."""
    data = inputs.make(torch.float32, missing=True)
    data.residual, data.shared = data.residual.T.contiguous().T, data.shared.T.contiguous().T
    assert compiled_like_eager(branches(taken), data) == 0


@pytest.mark.parametrize("taken", [True, False])
def test_tails_in_branches_are_fused(taken):
    assert compiled_like_eager(branches(taken), inputs.make(torch.float32, missing=True)) == 2


def compiled_like_eager(function, data):
    """How many tails are fused; elements and strides have to be those of eager."""
    eager = function(*data.args())
    oracle = function(*data.to(torch.float64).args())
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        torch.no_grad(),
        moe_fusion.fusing(FusionConfig(token_ceiling=CEILING)) as report,
    ):
        outputs = torch.compile(function, fullgraph=True)(*data.args())
    for got, plain, want in zip(outputs, eager, oracle, strict=True):
        assert got.shape == plain.shape
        assert got.stride() == plain.stride()
        assert error(got, want) <= 1.02 * error(plain, want) + 3e-7
    return report.fused
