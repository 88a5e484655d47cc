"""What is matched beside the table of ``test_table.py``: forms of single parts, with numbers.

Numbers are compared with the same function in fp64; the fused graph's error may not exceed that of
the unfused one, but for the last bit of a value that both round.
"""

from __future__ import annotations

import itertools

import inputs
import pytest
import spellings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from checks import RANKS, assert_fused, error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch_versions import NEW_TORCH_ONLY
from tracing import Tracer, trace

pytestmark = pytest.mark.usefixtures("fake_group")

SCALE = 2.5


def tail(finalize, norm=spellings.norm_a, reduce=spellings.functional, combine=None):
    def function(rows, weights, index, shared, residual, norm_weight):
        partial = finalize(rows, weights, index)
        if combine is not None:
            partial = combine(partial, shared)
        total = residual + reduce(partial)
        return norm(total, norm_weight), total

    return function


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", spellings.FINALIZE)
def test_finalize_with_weights_in_fp32(name, dtype):
    data = inputs.make(dtype, missing=name in spellings.MASKED, weights=torch.float32)
    finalize = spellings.FINALIZE[name]

    def cast(*args):
        return finalize(*args).to(dtype if args[0].dtype == dtype else args[0].dtype)

    form = "token-major rows" if name in ("token-major", "einsum") else "permuted rows"
    assert_fused(tail(cast), data, finalize=form, top_k=inputs.K, shared="none")


@pytest.mark.parametrize("name", spellings.NORMS)
@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norm_weight_dtypes_are_right_or_refused(name, activation, weight):
    """The same op list with an fp32 weight can give fp32 rows: only the meta dtype tells."""
    data = inputs.make(activation, missing=True, norm_weight=weight)
    function = tail(spellings.where_masked, spellings.NORMS[name])
    unfused = function(*data.args())
    oracle = function(*data.to(torch.float64).args())
    traced = trace(function, *data.args())
    keeps = unfused[0].dtype == activation
    assert traced.report.fused == int(keeps), str(traced.report)
    if not keeps:
        assert traced.reasons == [f"the norm's output is {unfused[0].dtype}: expected {activation}"]
    for got, plain, want in zip(traced.output, unfused, oracle, strict=True):
        assert got.dtype == plain.dtype
        assert error(got, want) <= 1.02 * error(plain, want) + 3e-7


@pytest.mark.parametrize("one", [1, 1.0])
def test_one_over_the_root(one):
    def norm(total, norm_weight):
        root = torch.sqrt(total.pow(2).mean(-1, keepdim=True) + spellings.EPS)
        return norm_weight * (total * (one / root))

    data = inputs.make(torch.float32, missing=True)
    assert_fused(tail(spellings.where_masked, norm), data)


def before(scale_first, flip):
    """Shared expert added before the all_reduce, the scale on routed experts alone or on both."""

    def combine(partial, shared):
        pair = (partial * SCALE, shared) if scale_first else (partial, shared)
        total = pair[1] + pair[0] if flip else pair[0] + pair[1]
        return total if scale_first else SCALE * total

    return combine


@pytest.mark.parametrize(("scale_first", "flip"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["where", "MoEOutput.finalize"])
def test_shared_before_the_all_reduce(name, dtype, scale_first, flip):
    data = inputs.make(dtype, missing=True)
    function = tail(spellings.FINALIZE[name], combine=before(scale_first, flip))
    assert_fused(function, data, shared="before the all_reduce")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_scales_multiply(dtype):
    function = tail(spellings.where_masked, combine=lambda p, shared: 0.5 * (p * SCALE) + shared)
    traced = assert_fused(function, inputs.make(dtype))
    assert ", 1.25, 1," in traced.after[0]


def test_the_dataclass_closed_in_plain_torch_is_recognised():
    """Scale and shared expert inside ``MoEOutput.finalize``, in fp32 and rounded once."""
    from moe_fusion import MoEOutput, UnfinalizedMoEOutput

    def function(rows, weights, index, shared, residual, norm_weight):
        moe = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), shared, SCALE)
        total = residual + spellings.functional(moe.finalize())
        return spellings.norm_f(total, norm_weight), total

    data = inputs.make(missing=True)
    traced = trace(function, *data.args())
    assert traced.report.fused == 1
    assert traced.report.sites[0].shared == "before the all_reduce"
    from moe_fusion import reference
    from moe_fusion.contract import TailArguments

    args = TailArguments(
        data.rows,
        data.weights,
        data.index,
        data.shared,
        None,
        data.residual,
        data.norm_weight,
        1e-6,
        0.0,
        SCALE,
    )
    for got, want in zip(traced.output, reference.tail([args])[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_replicated_after_the_all_reduce(dtype, flip):
    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(spellings.where_masked(rows, weights, index))
        y = shared + reduced if flip else reduced + shared
        total = y + residual if flip else residual + y
        return spellings.norm_a(total, norm_weight), total

    assert_fused(function, inputs.make(dtype), shared="after the all_reduce")


@pytest.mark.parametrize("order", range(3))
def test_two_all_reduces_in_one_sum_become_one(order):
    """Routed and shared reduced apart, added in each order: one collective less."""

    def function(rows, weights, index, shared, residual, norm_weight):
        routed = spellings.functional(spellings.where_masked(rows, weights, index))
        other = spellings.functional(shared)
        total = [
            lambda: residual + (routed + other),
            lambda: (residual + other) + routed,
            lambda: other + (routed + residual),
        ][order]()
        return spellings.norm_a(total, norm_weight), total

    traced = assert_fused(function, inputs.make())
    assert traced.report.all_reduces_before == 2
    assert traced.report.sites[0].shared == "its own all_reduce"
    assert traced.report.sites[0].finalize == "permuted rows"


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("name", ["token-major", "inverse permutation", "plain gather"])
def test_rows_of_weights_that_a_mask_makes_zero_are_not_read(name, flip):
    """As transformers' batched_mm does under expert parallelism."""

    def finalize(rows, weights, index):
        absent = weights < 0.5
        kept = torch.where(~absent, weights, 0.0) if flip else weights.masked_fill(absent, 0.0)
        return spellings.FINALIZE[name](rows, kept, index)

    data = inputs.make(torch.float32)
    traced = assert_fused(tail(finalize), data, ranks=1)
    assert "full([], -1, dtype=torch.int32" in traced.after[0]
    poisoned = data.rows.clone()
    entry = int((data.weights.flatten() < 0.5).nonzero()[0])
    row = entry if name == "token-major" else int(data.index.flatten()[entry])
    poisoned[row] = torch.nan
    again = Tracer(tail(finalize))(poisoned, *data.args()[1:])
    for got, want in zip(again.output, traced.output, strict=True):
        assert torch.equal(got, want)


def two_sums(first_routed, other_scale, routed_scale):
    """Routed and shared reduced apart and each scaled after its reduction, in either order."""

    def function(rows, weights, index, shared, residual, norm_weight):
        def routed():
            return spellings.functional(spellings.where_masked(rows, weights, index)) * routed_scale

        def other():
            return other_scale * spellings.functional(shared)

        pair = (routed(), other()) if first_routed else (other(), routed())
        total = residual + (pair[0] + pair[1])
        return spellings.norm_a(total, norm_weight), total

    return function


@pytest.mark.parametrize("scales", [(1.0, 2.5), (0.5, 1.0), (0.5, 2.5), (-1.0, 0.25)])
@pytest.mark.parametrize("first_routed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_all_reduces_with_scales_of_their_own_become_one(dtype, first_routed, scales):
    function = two_sums(first_routed, *scales)
    traced = assert_fused(function, inputs.make(dtype, missing=True), shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2
    assert traced.report.sites[0].finalize == "permuted rows"


@pytest.mark.parametrize("first_routed", [True, False])
def test_in_fp16_a_sum_is_not_scaled_up_before_it_is_reduced(first_routed):
    """The finalize is fused whichever all_reduce comes first, and the other one stays."""
    data = inputs.make(torch.float16, missing=True)
    function = two_sums(first_routed, 0.5, 2.5)
    traced = trace(function, *data.args())
    assert [site.finalize for site in traced.report.sites] == ["permuted rows"]
    assert traced.report.sites[0].shared == "after the all_reduce"
    assert traced.report.all_reduces_after == 1
    for got, want in zip(traced.output, function(*data.to(torch.float64).args()), strict=True):
        assert error(got, want) <= 2e-3


def test_a_scale_after_the_reduction_covers_what_was_added_before_it():
    """Granite: ``residual + 0.22 * (all_reduce + shared)``."""

    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual + 0.22 * (reduced + shared)
        return spellings.norm_a(total, norm_weight), total

    traced = assert_fused(function, inputs.make())
    assert ", 1, 0.22, 0)" in traced.after[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", spellings.ALL_REDUCES)
def test_a_finalized_partial(dtype, reduce):
    """Attention's output projection: the op with [T, H] rows."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = spellings.ALL_REDUCES[reduce](shared @ shared.T @ shared) + residual
        return spellings.norm_a(total, norm_weight), total

    ranks = RANKS if reduce in ("functional", "waited") else 1
    assert_fused(function, inputs.make(dtype), ranks=ranks, finalize="finalized", top_k=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_coalesced_all_reduce_of_one_tensor(dtype):
    function = tail(spellings.where_masked, reduce=spellings.coalesced_alone)
    assert_fused(function, inputs.make(dtype, missing=True), ranks=1, top_k=inputs.K)


def test_a_coalesced_all_reduce_of_one_is_merged_with_another():
    def function(rows, weights, index, shared, residual, norm_weight):
        routed = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual + (routed + spellings.coalesced_alone(shared))
        return spellings.norm_a(total, norm_weight), total

    traced = assert_fused(function, inputs.make(), ranks=1, shared="its own all_reduce")
    assert traced.report.all_reduces_before == 2


@NEW_TORCH_ONLY
@pytest.mark.parametrize("spelling", ["a group", "in place"])
def test_the_group_itself_instead_of_its_name(spelling):
    """``compile_on_one_rank`` leaves the group as an attribute of the graph module."""
    group = dist.group.WORLD

    def by_group(x):
        return funcol.all_reduce(x, "sum", group)

    reduce = by_group if spelling == "a group" else spellings.in_place
    with dist.config.patch(compile_on_one_rank=True):
        function = tail(spellings.where_masked, reduce=reduce)
        traced = assert_fused(function, inputs.make(), ranks=1)
    assert ", _opaque_obj0)" in traced.before[0]
    assert "_opaque_obj0" not in traced.after[0]
    assert traced.report.sites[0].group == "0"


def test_no_residual():
    """The embedding's all_reduce: the sum itself is what later layers read."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = spellings.functional(shared)
        normed = spellings.norm_a(total, norm_weight)
        return normed @ normed.T, total + 1

    assert_fused(function, inputs.make(), residual="none")


def test_a_normalised_embedding_that_is_the_residual_as_well():
    """minimax's residual is what its norm gives: attention reads it too, so it is no post-norm."""

    def function(rows, weights, index, shared, residual, norm_weight):
        normed = spellings.norm_a(spellings.functional(shared), norm_weight)
        return normed + normed.sin()

    assert_fused(function, inputs.make(), residual="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (1, 6)], ids=str)
def test_a_view_of_the_sum_is_normalised_and_the_sum_read_elsewhere(shape, dtype):
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + spellings.functional(spellings.where_masked(rows, weights, index))
        normed = spellings.norm_a(total.view(*shape, inputs.H), norm_weight)
        return normed, total.sin(), total

    data = inputs.make(dtype, missing=True)
    assert_fused(function, data, finalize="permuted rows", residual=str(dtype)[6:])


def test_an_fp32_residual_read_unrounded():
    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual.double() if residual.dtype == torch.float64 else residual.float()
        total = total + reduced.to(total.dtype)
        wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + spellings.EPS)
        return norm_weight * wide.to(rows.dtype), total.to(rows.dtype)

    assert_fused(function, inputs.make(), residual="float32")


def test_normalised_rows_read_twice():
    """The rows before the weight are read too: they are the op's output, and the weight stays."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + spellings.functional(spellings.where_masked(rows, weights, index))
        normed = spellings.norm_no_weight(total, norm_weight)
        return norm_weight * normed, normed.sin()

    assert_fused(function, inputs.make(missing=True), norm="no weight")


@pytest.mark.parametrize("shape", ["[T, H]", "[B, S, H]"])
@pytest.mark.parametrize("mode", ["static", "marked", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shapes(shape, mode, dtype):
    """A view between the collective and the add, static and symbolic, one and two symbols."""

    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual + reduced.view(residual.shape)
        return spellings.norm_a(total, norm_weight), total

    data = inputs.make(dtype, tokens=10, missing=True)
    if shape == "[B, S, H]":
        data.residual = data.residual.view(2, 5, inputs.H)
    if mode == "marked":
        for tensor in (data.weights, data.index, data.shared):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(data.residual, data.residual.dim() - 2)
    if mode == "dynamic":  # a model's parameters fix K and H
        for tensor in data.args():
            torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    unfused = function(*data.args())
    traced = trace(function, *data.args(), dynamic=True if mode == "dynamic" else None)
    assert traced.report.fused == 1, str(traced.report)
    oracle = function(*data.to(torch.float64).args())
    for got, plain, want in zip(traced.output, unfused, oracle, strict=True):
        assert got.shape == plain.shape
        assert error(got, want) <= 1.02 * error(plain, want) + 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_dtensor_that_is_partial_and_made_replicated(dtype):
    mesh = init_device_mesh("cpu", (2,))

    def reduce(x):
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()

    function = tail(spellings.where_masked, reduce=reduce)
    assert_fused(function, inputs.make(dtype, missing=True), ranks=1, top_k=inputs.K)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_norm_without_an_eps(dtype, weight):
    """It takes the machine epsilon of the dtype in which it computes."""

    def norm(total, norm_weight):
        wide = total if total.dtype == torch.float64 else total.float()
        scale = norm_weight.to(wide.dtype) if weight else None
        # fp64 has another epsilon
        eps = None if total.dtype != torch.float64 else torch.finfo(torch.float32).eps
        return torch.nn.functional.rms_norm(wide, (inputs.H,), scale, eps).to(total.dtype)

    assert_fused(tail(spellings.where_masked, norm), inputs.make(dtype, missing=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 2), (4, 1)])
def test_an_einsum_of_one_token_or_of_one_expert(tokens, top_k, dtype):
    """Its product swaps its operands for one token, and is none for one expert."""
    data = inputs.make(dtype, tokens=tokens, top_k=top_k)
    traced = assert_fused(tail(spellings.einsum), data, top_k=top_k)
    assert traced.report.sites[0].finalize == "token-major rows"
