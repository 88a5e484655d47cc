"""Ops of other libraries: recognised once registered, with the right numbers; else named."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
from custom_checks import assert_fused, assert_left
from custom_dialect import OPS
from tracing import CEILING, trace

import moe_fusion
from moe_fusion import FusionConfig, MoEFusionPass
from moe_fusion.passes import custom_ops

pytestmark = pytest.mark.usefixtures("fake_group", "nothing_registered")

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


@pytest.fixture
def nothing_registered():
    yield
    custom_ops._registered.clear()


def tail(reduce, norm=spellings.norm_a):
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(spellings.where_masked(rows, weights, index))
        return norm(total, norm_weight), total

    return function


def by_name(x):
    return OPS.all_reduce(x, "0")


@DTYPES
def test_a_registered_all_reduce(dtype):
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    traced = assert_fused(tail(by_name), inputs.make(dtype, missing=True), group="0", top_k=2)
    assert "dialect.all_reduce" in traced.before[0]
    assert "dialect.all_reduce" not in traced.after[0]


def test_an_all_reduce_by_other_positions_and_overload():
    moe_fusion.register_all_reduce(
        OPS.reduce.default, input_arg="tensor", group_arg=1, reduce_op_arg="reduce_op"
    )
    assert_fused(tail(lambda x: OPS.reduce("sum", "0", tensor=x)), inputs.make(missing=True))
    reason = "the reduction is 'avg': expected 'sum'"
    assert_left(tail(lambda x: OPS.reduce("avg", "0", tensor=x)), inputs.make(), reason)


def test_a_group_that_the_op_calls_by_another_name():
    function = tail(lambda x: OPS.tp_all_reduce(x, "tp:0"))
    moe_fusion.register_all_reduce(OPS.tp_all_reduce, group_arg="group_name")
    reason = "group_name: expected a process group of this process, one of ['0'], got 'tp:0'"
    assert_left(function, inputs.make(), reason)
    moe_fusion.unregister_op(OPS.tp_all_reduce)
    moe_fusion.register_all_reduce(
        OPS.tp_all_reduce, group_arg="group_name", group_names={"tp:0": "0"}
    )
    assert_fused(function, inputs.make(), group="0")


def torch_name(group):
    return {"tp:0": "0"}[group]


def test_a_group_that_a_function_finds():
    moe_fusion.register_all_reduce(
        OPS.tp_all_reduce, group_arg="group_name", group_resolver=torch_name
    )
    assert_fused(tail(lambda x: OPS.tp_all_reduce(x, "tp:0")), inputs.make(), group="0")
    reason = "the group '0' is not known: '0'"
    assert_left(tail(lambda x: OPS.tp_all_reduce(x, "0")), inputs.make(), reason)
    (text,) = custom_ops.registrations()
    assert f"resolver='{__name__}.torch_name'" in text
    assert "0x" not in text  # no address: the same in every process


def numbered(group):
    return 0


def test_a_group_that_a_function_finds_no_name_of_is_left():
    moe_fusion.register_all_reduce(
        OPS.tp_all_reduce, group_arg="group_name", group_resolver=numbered
    )
    reason = f"the group '0' is not known: expected {__name__}.numbered to return a name, got 0"
    assert_left(tail(lambda x: OPS.tp_all_reduce(x, "0")), inputs.make(), reason)


def test_a_listed_group_is_not_looked_up():
    names = {"tp:1": "0"}
    moe_fusion.register_all_reduce(
        OPS.tp_all_reduce, group_arg=1, group_names=names, group_resolver=torch_name
    )
    for group in ("tp:0", "tp:1"):
        known = custom_ops._registered[OPS.tp_all_reduce.default]
        assert known.group_name(group) == "0"


def test_a_registered_all_reduce_of_the_shared_expert_is_merged():
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")

    def function(rows, weights, index, shared, residual, norm_weight):
        routed = by_name(spellings.where_masked(rows, weights, index))
        total = residual + (by_name(shared) + routed)
        return spellings.norm_a(total, norm_weight), total

    assert_fused(function, inputs.make(), shared="its own all_reduce")


def test_a_replicated_addend_after_a_registered_all_reduce():
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")

    def function(rows, weights, index, shared, residual, norm_weight):
        y = by_name(spellings.where_masked(rows, weights, index)) + shared
        total = residual.view(2, 3, -1) + y.view(2, 3, -1)
        return spellings.norm_f(total, norm_weight), total

    assert_fused(function, inputs.make(), shared="after the all_reduce")


def test_registered_all_reduces_that_are_chained():
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    reason = "two all_reduces are chained"
    assert_left(tail(lambda x: by_name(by_name(x))), inputs.make(), reason)
    assert_left(tail(lambda x: by_name(spellings.functional(x))), inputs.make(), reason)


def test_a_registered_all_reduce_read_elsewhere():
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")

    def function(rows, weights, index, shared, residual, norm_weight):
        y = by_name(spellings.where_masked(rows, weights, index))
        return spellings.norm_a(residual + y, norm_weight), y * 2

    reason = "what the all_reduce feeds is read several times (aten.add.Tensor, aten.mul.Tensor)"
    assert_left(function, inputs.make(), reason)


def test_an_op_that_is_not_registered_is_no_anchor():
    traced = trace(tail(by_name), *inputs.make().args())
    assert traced.report.all_reduces_before == 0
    assert not traced.report.refusals


def test_registering():
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    moe_fusion.register_all_reduce(OPS.all_reduce.default, input_arg="tensor", group_arg=1)
    with pytest.raises(ValueError, match=r"expected one registration, .* got another"):
        moe_fusion.register_all_reduce(
            OPS.all_reduce, group_arg="group_name", group_names={"tp:0": "0"}
        )
    moe_fusion.unregister_op(OPS.all_reduce)
    moe_fusion.unregister_op(OPS.all_reduce)
    moe_fusion.register_all_reduce(
        OPS.all_reduce, group_arg="group_name", group_names={"tp:0": "0"}
    )


def test_the_uuid_covers_registrations():
    def uuid():
        return MoEFusionPass(FusionConfig(token_ceiling=CEILING)).uuid()

    before = uuid()
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    one = uuid()
    moe_fusion.register_all_reduce(OPS.tp_all_reduce, group_arg="group_name")
    two = uuid()
    moe_fusion.unregister_op(OPS.all_reduce)
    moe_fusion.unregister_op(OPS.tp_all_reduce)
    moe_fusion.register_all_reduce(OPS.tp_all_reduce, group_arg="group_name")
    moe_fusion.register_all_reduce(OPS.all_reduce, group_arg="group_name")
    assert uuid() == two  # in whatever order
    custom_ops._registered.clear()
    assert uuid() == before
    assert len({before, one, two}) == 3


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((print, {"group_arg": 1}), TypeError, "op: expected an OpOverload or OpOverloadPacket"),
        (
            (torch.ops.aten.transpose, {"group_arg": 1}),
            ValueError,
            "aten.transpose to have a default",
        ),
        (
            (OPS.all_reduce, {"group_arg": "group"}),
            ValueError,
            "group_arg: expected one of .*got 'g",
        ),
        ((OPS.all_reduce, {"group_arg": 2}), ValueError, "expected a position below 2, got 2"),
        ((OPS.all_reduce, {"group_arg": 1.0}), TypeError, "name or position, got float"),
        (
            (OPS.all_reduce, {"group_arg": 0, "input_arg": 1}),
            ValueError,
            "input_arg: expected a Tensor argument, got 'group_name' of type str",
        ),
        (
            (OPS.all_reduce, {"group_arg": 1, "group_resolver": lambda name: name}),
            TypeError,
            "group_resolver: expected a function of a module, got <function",
        ),
        (
            (OPS.all_reduce, {"group_arg": 1, "group_resolver": "0"}),
            TypeError,
            "group_resolver: expected a function of a module, got '0'",
        ),
        (
            (OPS.all_reduce, {"group_arg": 1, "group_names": ["0"]}),
            TypeError,
            "group_names: expected a mapping, got list",
        ),
        (
            (OPS.all_reduce, {"group_arg": 1, "group_names": {"tp:0": 0}}),
            TypeError,
            "group_names: expected names of groups, got 0",
        ),
        (
            (torch.ops.aten.native_layer_norm, {"group_arg": 1}),
            ValueError,
            r"to return 1 tensors, got \['Tensor', 'Tensor', 'Tensor'\]",
        ),
        (
            (torch.ops.aten.copy_, {"group_arg": 1}),
            ValueError,
            r"expected aten.copy_.default to mutate \[\], got \['self'\]",
        ),
    ],
)
def test_what_cannot_be_registered_as_an_all_reduce(arguments, kind, message):
    op, options = arguments
    with pytest.raises(kind, match=message):
        moe_fusion.register_all_reduce(op, **options)
    assert custom_ops.registrations() == []
