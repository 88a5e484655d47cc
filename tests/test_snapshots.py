"""One tail of each kind, before and after the rewrite.

Accept changes with ``EXPECTTEST_ACCEPT=1``, twice in a row. Numbers of the same spellings are compared in
``test_recognised.py`` over every dtype; here against the op's reference.
"""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
from conftest import RECORDED_GRAPHS
from expecttest import assert_expected_inline
from tracing import CEILING, Tracer

from moe_fusion import FusionConfig

pytestmark = [pytest.mark.usefixtures("fake_group"), RECORDED_GRAPHS]


def graphs(function, data=None):
    """The tail's nodes before and after, and its site; numbers are checked on the way."""
    data = data or inputs.make(missing=True)
    tracer = Tracer(function, FusionConfig(token_ceiling=CEILING))
    tracer.fusion.render = True
    traced = tracer(*data.args())
    (site,) = traced.report.sites
    assert traced.report.fused == 1
    assert not traced.report.refusals
    for got, want in zip(traced.output, function(*data.args()), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    return f"{site.before}\n--\n{site.after}", site


def snapshot(function, data=None):
    """The tail's nodes before and after, and the report's line."""
    text, site = graphs(function, data)
    return f"{text}\n--\n{site}"


def tail(partial, norm=spellings.norm_a, after=None):
    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(partial(rows, weights, index, shared))
        total = residual + (reduced if after is None else after(reduced, shared))
        return norm(total, norm_weight), total

    return function


def test_opaque_rows_masked_by_the_map():
    function = tail(lambda r, w, m, _: spellings.where_masked(r, w, m))
    assert_expected_inline(snapshot(function), """\
index: bf16[6, 2, 64] = index.Tensor(arg1_1, [convert_element_type])
where_1: bf16[6, 2, 64] = where.self(unsqueeze, index, full_default_1)
mul: bf16[6, 2, 64] = mul.Tensor(where_1, unsqueeze_1)
sum_1: bf16[6, 64] = sum.dim_IntList(mul, [1])
all_reduce: bf16[6, 64] = c10d.all_reduce(sum_1, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg3_1, wait_tensor)
convert_element_type_1: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul_1: f32[6, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
mul_2: bf16[6, 64] = mul.Tensor(arg4_1, convert_element_type_2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(arg1_1, arg2_1, arg0_1, None, None, arg3_1, arg4_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: permuted rows [6, 64] bfloat16, top-2; shared: none; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_routed_scale_and_shared_expert_before_the_all_reduce():
    function = tail(lambda r, w, m, shared: shared + spellings.where_masked(r, w, m) * 2.5)
    assert_expected_inline(snapshot(function), """\
index: bf16[6, 2, 64] = index.Tensor(arg1_1, [convert_element_type])
where_1: bf16[6, 2, 64] = where.self(unsqueeze, index, full_default_1)
mul: bf16[6, 2, 64] = mul.Tensor(where_1, unsqueeze_1)
sum_1: bf16[6, 64] = sum.dim_IntList(mul, [1])
mul_1: bf16[6, 64] = mul.Tensor(sum_1, 2.5)
add: bf16[6, 64] = add.Tensor(arg3_1, mul_1)
all_reduce: bf16[6, 64] = c10d.all_reduce(add, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add_1: bf16[6, 64] = add.Tensor(arg4_1, wait_tensor)
convert_element_type_1: f32[6, 64] = cvt(add_1, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_2: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_2)
mul_2: f32[6, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[6, 64] = cvt(mul_2, torch.bfloat16)
mul_3: bf16[6, 64] = mul.Tensor(arg5_1, convert_element_type_2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(arg1_1, arg2_1, arg0_1, arg3_1, None, arg4_1, arg5_1, 1e-06, 0, 2.5, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: permuted rows [6, 64] bfloat16, top-2; shared: before the all_reduce; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_grouped_rows_put_back_with_an_fp32_router():
    function = tail(lambda r, w, m, _: spellings.inverse_permutation(r, w, m))
    assert_expected_inline(snapshot(function, inputs.make(weights=torch.float32)), """\
mul: f32[12, 64] = mul.Tensor(slice_1, unsqueeze)
index_1: f32[12, 64] = index.Tensor(mul, [index_put])
view_2: f32[6, 2, 64] = reshape(index_1, [6, 2, -1])
sum_1: f32[6, 64] = sum.dim_IntList(view_2, [1])
convert_element_type: bf16[6, 64] = cvt(sum_1, torch.bfloat16)
all_reduce: bf16[6, 64] = c10d.all_reduce(convert_element_type, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg3_1, wait_tensor)
convert_element_type_1: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul_1: f32[6, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
mul_2: bf16[6, 64] = mul.Tensor(arg4_1, convert_element_type_2)
--
reshape_default: i64[6, 2] = reshape(index_put, [-1, 2])
convert_element_type_default: i32[6, 2] = cvt(reshape_default, torch.int32)
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(slice_1, arg2_1, convert_element_type_default, None, None, arg3_1, arg4_1, 1e-06, 0, 1, 1, 0)
getitem_2: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_3: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: permuted rows [6, 64] bfloat16, top-2; shared: none; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_token_major_rows():
    function = tail(lambda r, w, m, _: spellings.token_major(r, w, m))
    assert_expected_inline(snapshot(function, inputs.make()), """\
mul: bf16[12, 64] = mul.Tensor(slice_1, unsqueeze)
view_1: bf16[6, 2, 64] = reshape(mul, [6, 2, -1])
sum_1: bf16[6, 64] = sum.dim_IntList(view_1, [1])
all_reduce: bf16[6, 64] = c10d.all_reduce(sum_1, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg2_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul_1: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
mul_2: bf16[6, 64] = mul.Tensor(arg3_1, convert_element_type_1)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(slice_1, arg1_1, None, None, None, arg2_1, arg3_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: token-major rows [6, 64] bfloat16, top-2; shared: none; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_shared_expert_after_the_all_reduce():
    function = tail(
        lambda r, w, m, _: spellings.where_masked(r, w, m), after=lambda y, shared: shared + y
    )
    assert_expected_inline(snapshot(function), """\
index: bf16[6, 2, 64] = index.Tensor(arg1_1, [convert_element_type])
where_1: bf16[6, 2, 64] = where.self(unsqueeze, index, full_default_1)
mul: bf16[6, 2, 64] = mul.Tensor(where_1, unsqueeze_1)
sum_1: bf16[6, 64] = sum.dim_IntList(mul, [1])
all_reduce: bf16[6, 64] = c10d.all_reduce(sum_1, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg3_1, wait_tensor)
add_1: bf16[6, 64] = add.Tensor(arg4_1, add)
convert_element_type_1: f32[6, 64] = cvt(add_1, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_2: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_2)
mul_1: f32[6, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
mul_2: bf16[6, 64] = mul.Tensor(arg5_1, convert_element_type_2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(arg1_1, arg2_1, arg0_1, None, arg3_1, arg4_1, arg5_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: permuted rows [6, 64] bfloat16, top-2; shared: after the all_reduce; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_shared_expert_with_its_own_all_reduce():
    function = tail(
        lambda r, w, m, _: spellings.where_masked(r, w, m),
        after=lambda y, shared: y + spellings.functional(shared),
    )
    assert_expected_inline(snapshot(function), """\
index: bf16[6, 2, 64] = index.Tensor(arg1_1, [convert_element_type])
where_1: bf16[6, 2, 64] = where.self(unsqueeze, index, full_default_1)
mul: bf16[6, 2, 64] = mul.Tensor(where_1, unsqueeze_1)
sum_1: bf16[6, 64] = sum.dim_IntList(mul, [1])
all_reduce: bf16[6, 64] = c10d.all_reduce(sum_1, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
all_reduce_1: bf16[6, 64] = c10d.all_reduce(arg3_1, sum, 0)
wait_tensor_1: bf16[6, 64] = c10d.wait_tensor(all_reduce_1)
add: bf16[6, 64] = add.Tensor(wait_tensor, wait_tensor_1)
add_1: bf16[6, 64] = add.Tensor(arg4_1, add)
convert_element_type_1: f32[6, 64] = cvt(add_1, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_2: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_2)
mul_1: f32[6, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
mul_2: bf16[6, 64] = mul.Tensor(arg5_1, convert_element_type_2)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(arg1_1, arg2_1, arg0_1, arg3_1, None, arg4_1, arg5_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: permuted rows [6, 64] bfloat16, top-2; shared: its own all_reduce; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_attention_output_projection():
    function = tail(lambda r, w, m, shared: shared @ shared.T @ shared)
    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = c10d.all_reduce(mm_1, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type_4: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type_4, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type_4, rsqrt)
convert_element_type_5: bf16[6, 64] = cvt(mul, torch.bfloat16)
mul_1: bf16[6, 64] = mul.Tensor(arg2_1, convert_element_type_5)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(mm_1, None, None, None, None, arg1_1, arg2_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: weight after cast; residual: bfloat16; group 0 of 2""")


def test_norm_with_the_weight_before_the_cast():
    function = tail(lambda r, w, m, shared: shared.sin(), spellings.norm_b)
    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = c10d.all_reduce(sin, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[6, 64] = mul.Tensor(arg2_1, mul)
convert_element_type_1: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, arg2_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: weight before cast; residual: bfloat16; group 0 of 2""")


def test_norm_of_torch():
    function = tail(lambda r, w, m, shared: shared.sin(), spellings.norm_f)
    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = c10d.all_reduce(sin, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [1], True)
add_1: f32[6, 1] = add.Scalar(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[6, 64] = mul.Tensor(mul, arg2_1)
convert_element_type_1: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, arg2_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: weight before cast; residual: bfloat16; group 0 of 2""")


def test_norm_without_weight():
    function = tail(lambda r, w, m, shared: shared.sin(), spellings.norm_no_weight)
    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = c10d.all_reduce(sin, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[6, 64] = cvt(mul, torch.bfloat16)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, None, 1e-06, 0, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: no weight; residual: bfloat16; group 0 of 2""")


def test_norm_of_gemma():
    function = tail(lambda r, w, m, shared: shared.sin(), spellings.norm_gemma)
    assert_expected_inline(snapshot(function), """\
all_reduce: bf16[6, 64] = c10d.all_reduce(sin, sum, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(all_reduce)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[6, 64] = mul.Tensor(mul, add_2)
convert_element_type_2: bf16[6, 64] = cvt(mul_1, torch.bfloat16)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, arg2_1, 1e-06, 1, 1, 1, 0)
getitem: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce: finalized [6, 64] bfloat16; shared: none; norm: 1 + weight before cast; residual: bfloat16; group 0 of 2""")


def test_two_symbolic_dimensions():
    def function(rows, weights, index, shared, residual, norm_weight):
        reduced = spellings.functional(spellings.where_masked(rows, weights, index))
        total = residual + reduced.view(residual.shape)
        return spellings.norm_a(total, norm_weight), total

    data = inputs.make(tokens=10, missing=True)
    data.residual = data.residual.view(2, 5, inputs.H)
    for tensor in data.args()[1:5]:
        for dim in range(tensor.dim() - 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    text, site = graphs(function, data)
    assert site.num_tokens.count("*") == 1
    assert_expected_inline(text, """\
index: bf16[s0*s1, 2, 64] = index.Tensor(arg1_1, [convert_element_type])
where_1: bf16[s0*s1, 2, 64] = where.self(unsqueeze, index, full_default_1)
mul_12: bf16[s0*s1, 2, 64] = mul.Tensor(where_1, unsqueeze_1)
sum_1: bf16[s0*s1, 64] = sum.dim_IntList(mul_12, [1])
all_reduce: bf16[s0*s1, 64] = c10d.all_reduce(sum_1, sum, 0)
wait_tensor: bf16[s0*s1, 64] = c10d.wait_tensor(all_reduce)
view: bf16[s0, s1, 64] = reshape(wait_tensor, [arg3_1, arg4_1, 64])
add_42: bf16[s0, s1, 64] = add.Tensor(arg5_1, view)
convert_element_type_1: f32[s0, s1, 64] = cvt(add_42, torch.float32)
pow_1: f32[s0, s1, 64] = pow.Tensor_Scalar(convert_element_type_1, 2)
mean: f32[s0, s1, 1] = mean.dim(pow_1, [-1], True)
add_59: f32[s0, s1, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[s0, s1, 1] = rsqrt(add_59)
mul_39: f32[s0, s1, 64] = mul.Tensor(convert_element_type_1, rsqrt)
convert_element_type_2: bf16[s0, s1, 64] = cvt(mul_39, torch.bfloat16)
mul_46: bf16[s0, s1, 64] = mul.Tensor(arg6_1, convert_element_type_2)
--
reshape_default: bf16[s0*s1, 64] = reshape(arg5_1, [-1, 64])
finalize_allreduce_rms_norm_default: (bf16[s0*s1, 64], bf16[s0*s1, 64]) = moe_fusion.finalize_allreduce_rms_norm(arg1_1, arg2_1, arg0_1, None, None, reshape_default, arg6_1, 1e-06, 0, 1, 1, 0)
getitem: bf16[s0*s1, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_1: bf16[s0*s1, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
reshape_default_1: bf16[s0, s1, 64] = reshape(getitem, [arg3_1, arg4_1, 64])
reshape_default_2: bf16[s0, s1, 64] = reshape(getitem_1, [arg3_1, arg4_1, 64])""")


def test_a_coalesced_all_reduce_of_one_tensor():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + spellings.coalesced_alone(shared.sin())
        return spellings.norm_a(total, norm_weight), total

    assert_expected_inline(snapshot(function), """\
all_reduce_coalesced: (bf16[6, 64]) = c10d.all_reduce_coalesced([sin], sum, 0)
getitem: bf16[6, 64] = getitem(all_reduce_coalesced, 0)
wait_tensor: bf16[6, 64] = c10d.wait_tensor(getitem)
add: bf16[6, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[6, 64] = cvt(add, torch.float32)
pow_1: f32[6, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[6, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[6, 1] = add.Tensor(mean, 1e-06)
rsqrt: f32[6, 1] = rsqrt(add_1)
mul: f32[6, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[6, 64] = cvt(mul, torch.bfloat16)
mul_1: bf16[6, 64] = mul.Tensor(arg2_1, convert_element_type_1)
--
finalize_allreduce_rms_norm_default: (bf16[6, 64], bf16[6, 64]) = moe_fusion.finalize_allreduce_rms_norm(sin, None, None, None, None, arg1_1, arg2_1, 1e-06, 0, 1, 1, 0)
getitem_1: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 0)
getitem_2: bf16[6, 64] = getitem(finalize_allreduce_rms_norm_default, 1)
--
all_reduce_coalesced: finalized [6, 64] bfloat16; shared: none; norm: weight after cast; residual: bfloat16; group 0 of 2""")
