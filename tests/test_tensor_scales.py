"""Scales that are tensors of one element, before and after the reduction."""

from __future__ import annotations

import inputs
import pytest
import torch
from arithmetic import WITH_ADDEND
from checks import assert_fused, assert_untouched
from spellings import functional as reduce
from spellings import norm_a as norm
from spellings import where_masked as finalize
from torch_versions import NEW_TORCH_ONLY
from tracing import trace

pytestmark = pytest.mark.usefixtures("fake_group")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def each_in_turn(cases):
    """Each case in one dtype; between them all cases of a kind are in every dtype."""
    return [(case, DTYPES[place % 3]) for place, case in enumerate(cases)]


def scale_of(norm_weight, place=0):
    """A 0-d tensor that the graph computes, near 1."""
    return norm_weight[place] * 0.75


class Scaled(torch.nn.Module):
    """``residual + scale * all_reduce``, where ``hold`` says how the module holds the scale."""

    def __init__(self, hold, dtype):
        super().__init__()
        if hold == "attribute":
            self.scale = torch.tensor(0.75, dtype=dtype)
        elif hold == "buffer":
            self.register_buffer("scale", torch.tensor(0.75, dtype=dtype))
        elif hold == "parameter":
            self.scale = torch.nn.Parameter(torch.tensor(0.75, dtype=dtype), requires_grad=False)
        else:
            self.scale = torch.full([1] * int(hold[0]), 0.75, dtype=dtype)

    def forward(self, rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index)) * self.scale
        total = residual + y.to(residual.dtype)
        return norm(total, norm_weight), total


HELD = (
    ("attribute", None, torch.bfloat16),
    ("attribute", torch.float64, torch.bfloat16),
    ("buffer", None, torch.float16),
    ("buffer", torch.float32, torch.bfloat16),
    ("parameter", torch.float32, torch.float16),
    ("parameter", torch.bfloat16, torch.float32),
    ("1 dimension", None, torch.bfloat16),
    ("1 dimension", torch.float32, torch.bfloat16),
    ("2 dimensions", torch.float32, torch.float16),
    ("2 dimensions", None, torch.float32),
)


@pytest.mark.parametrize(("hold", "scale_dtype", "dtype"), HELD, ids=str)
def test_a_scale_that_a_module_holds(hold, dtype, scale_dtype):
    """One element of one dimension or more promotes the product, and is converted back."""
    module = Scaled(hold, scale_dtype or dtype)
    traced = assert_fused(module, inputs.make(dtype, missing=True), shared="none")
    assert "mul.Tensor(wait" not in traced.after[0]


NO_RESIDUAL = {
    "(y + residual) * s": lambda y, residual, shared, s, t: (y + residual) * s,
    "y * s alone": lambda y, residual, shared, s, t: y * s,
}


def tail(total_of):
    def function(rows, weights, index, shared, residual, norm_weight):
        scales = (scale_of(norm_weight), scale_of(norm_weight, 1))
        y = reduce(finalize(rows, weights, index))
        total = total_of(y, residual, shared, *scales)
        return norm(total, norm_weight), total

    return function


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", NO_RESIDUAL)
def test_a_scale_that_covers_the_residual(case, dtype):
    assert_fused(tail(NO_RESIDUAL[case]), inputs.make(dtype, missing=True), residual="none")


BEFORE = {
    "0-d": lambda s: s,
    "0-d, fp32": lambda s: s.float(),
    "one dimension": lambda s: s.view(1),
    "two dimensions, first": lambda s: s.view(1, 1),
}


@pytest.mark.parametrize(("case", "dtype"), each_in_turn(BEFORE))
def test_scales_before_and_after_the_reduction(case, dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        scale = BEFORE[case](scale_of(norm_weight))
        routed = finalize(rows, weights, index)
        partial = scale * routed if case.endswith("first") else routed * scale
        y = reduce(partial + shared)
        total = residual + y * scale_of(norm_weight, 1)
        return norm(total, norm_weight), total

    data = inputs.make(dtype, missing=True)
    assert_fused(function, data, finalize="permuted rows", shared="before the all_reduce")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_of_a_finalized_partial(dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(shared @ shared.T @ shared) * scale_of(norm_weight)
        return norm(total, norm_weight), total

    assert_fused(function, inputs.make(dtype), finalize="finalized")


def two_sums(first, second):
    def function(rows, weights, index, shared, residual, norm_weight):
        scales = (scale_of(norm_weight), scale_of(norm_weight, 1))
        routed, other = reduce(finalize(rows, weights, index)), reduce(shared)
        total = residual + (first(routed, *scales) + second(other, *scales))
        return norm(total, norm_weight), total

    return function


ALIKE = {
    "of both": (lambda y, s, t: y * s, lambda y, s, t: s * y),
    "and numbers": (lambda y, s, t: 0.5 * (y * s), lambda y, s, t: s * y),
    "two in either order": (lambda y, s, t: s * (y * t), lambda y, s, t: t * (y * s)),
}
APART = {
    "of one": (lambda y, s, t: y * s, lambda y, s, t: y),
    "of the other": (lambda y, s, t: y, lambda y, s, t: s * y),
    "one each": (lambda y, s, t: s * y, lambda y, s, t: t * y),
    "once and twice": (lambda y, s, t: s * y, lambda y, s, t: s * (y * s)),
}


@pytest.mark.parametrize("case", ALIKE)
def test_two_all_reduces_scaled_alike_become_one(case):
    traced = assert_fused(
        two_sums(*ALIKE[case]),
        inputs.make(torch.float32, missing=True),
        shared="its own all_reduce",
    )
    assert traced.report.all_reduces_before == 2


@pytest.mark.parametrize("case", APART)
def test_a_tensor_scale_never_moves_to_the_other_side_of_a_reduction(case):
    """It may differ by rank, so that ``sum(s * x)`` over the ranks is not ``s * sum(x)``."""
    data = inputs.make(torch.float32, missing=True)
    function = two_sums(*APART[case])
    traced = trace(function, *data.args())
    assert [site.shared for site in traced.report.sites] == ["after the all_reduce"]
    assert traced.report.sites[0].finalize == "permuted rows"
    assert traced.report.all_reduces_after == 1
    for got, want in zip(traced.output, function(*data.args()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


SEVERAL = {
    "[H]": lambda norm_weight, y: norm_weight * 0.5,
    "[T, 1]": lambda norm_weight, y: norm_weight[: y.shape[0], None],
    "[T, H]": lambda norm_weight, y: norm_weight.expand(y.shape),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_a_scale_of_several_elements_is_refused(case):
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index))
        total = residual + y * SEVERAL[case](norm_weight, y)
        return norm(total, norm_weight), total

    reason = (
        "the sum is multiplied by several elements that may differ by rank: expected one number"
    )
    assert_untouched(function, reason, inputs.make(missing=True))


@pytest.mark.parametrize(
    "case", ["(y + shared) * s", pytest.param("addcmul(y, shared, s)", marks=NEW_TORCH_ONLY)]
)
def test_in_fp16_no_addend_is_scaled_by_a_tensor(case):
    reason = "an addend that is scaled up alone could overflow float16"
    data = inputs.make(torch.float16, missing=True)
    assert_untouched(tail(WITH_ADDEND[case]), reason, data)


ALPHA = {
    "add": lambda y, residual, addend: residual + torch.add(y, addend, alpha=2),
    "sub": lambda y, residual, addend: residual - torch.sub(y, addend, alpha=-2),
    "residual": lambda y, residual, addend: torch.add(y, addend, alpha=2),
    "mul": lambda y, residual, addend: residual + 2 * (y + addend),
}


@pytest.mark.parametrize("case", ALPHA)
def test_in_fp16_no_addend_is_scaled_up_by_a_number(case):
    """``-60000 + 2 * 40000`` is finite, and ``2 * 40000`` is not."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = ALPHA[case](reduce(shared), residual, norm_weight.expand(shared.shape))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float16)
    data.shared.fill_(-60000.0)
    data.norm_weight.fill_(40000.0)
    assert torch.isfinite(function(*data.args())[1]).all()
    reason = "an addend that is scaled up alone could overflow float16"
    assert_untouched(function, reason, data)


@pytest.mark.parametrize("mode", ["marked", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_under_symbolic_shapes(dtype, mode):
    """Under ``dynamic=True`` a module's float is a 0-d input in host memory."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = 2.5, 0.22

        def forward(self, rows, weights, index, shared, residual, norm_weight):
            y = reduce(finalize(rows, weights, index) * self.before + shared)
            total = residual + y * self.after
            return norm(total, norm_weight), total

    data = inputs.make(dtype, tokens=10, missing=True)
    for tensor in data.args():
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    if mode == "marked":
        for tensor in (data.weights, data.index, data.shared, data.residual):
            torch._dynamo.mark_dynamic(tensor, 0)
    assert_fused(
        Module(),
        data,
        dynamic=mode == "dynamic" or None,
        finalize="permuted rows",
        shared="before the all_reduce",
    )
