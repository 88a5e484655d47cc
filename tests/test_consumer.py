"""The tail as a function and as a module: one rank, a fake group, and two real ranks."""

from __future__ import annotations

import copy

import inputs
import pytest
import torch
import torch.distributed as dist
from conftest import make_fake_group
from consumer_ranks import CEILING, EPS, Case, run_cases
from distributed import run_ranks
from moe_layers import error, layer, oracle
from tracing import Tracer

import moe_fusion
from moe_fusion import (
    MoEOutput,
    MoETailRMSNorm,
    UnfinalizedMoEOutput,
    finalize_allreduce_rms_norm,
    reference,
)
from moe_fusion.contract import TailArguments

T, K, H = inputs.T, inputs.K, inputs.H
BF16 = torch.bfloat16
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 3e-7}
# Relative, in the Frobenius norm: three roundings to the dtype.


CASES = [
    Case("intermediate", BF16, 5),
    Case("intermediate", torch.float32, CEILING + 4),
    Case("experts", BF16, CEILING + 4),
    Case("experts", torch.float32, 5),
]


@pytest.fixture(scope="module")
def of_two_ranks():
    return dict(zip(CASES, zip(*run_ranks(2, run_cases, CASES), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_and_tail_on_two_ranks(of_two_ranks, case):
    """Against the fp64 oracle of the ranks' own rows, and of the whole layer."""
    results = of_two_ranks[case]
    wants = reference.tail([result["arguments"] for result in results], torch.float64)
    data = layer(case.dtype, tokens=case.tokens)
    args = results[0]["arguments"]
    layer_sum = 1.5 * oracle(data) + 2 * 0.25 * data.x.double() + args.residual.double()
    for result, want in zip(results, wants, strict=True):
        assert result["finished"] == (case.tokens > CEILING)
        for got, compiled, exact in zip(result["eager"], result["compiled"], want, strict=True):
            assert error(got, exact) <= TOLERANCE[case.dtype]
            assert torch.equal(got, compiled)
        assert error(result["eager"][1], layer_sum) <= 2 * TOLERANCE[case.dtype]
    for mine, theirs in zip(results[0]["eager"], results[1]["eager"], strict=True):
        assert torch.equal(mine, theirs)


def unfinalized(data):
    return UnfinalizedMoEOutput(data.rows, data.weights, data.index)


def routing(data):
    return data.rows, data.weights, data.index


FORMS = {
    "unfinalized": (lambda d: MoEOutput(unfinalized(d), d.shared, 2.5), {}),
    "finalized": (
        lambda d: MoEOutput(d.rows[:T].nan_to_num(), d.shared, 2.5),
        {"finalized": True},
    ),
    "no shared expert": (
        lambda d: MoEOutput(unfinalized(d)),
        {"shared_output": None, "routed_scaling_factor": 1.0},
    ),
    "a plain partial": (
        lambda d: d.shared,
        {"plain": True, "shared_output": None, "routed_scaling_factor": 1.0},
    ),
}


def tail_arguments(data, *, finalized=False, plain=False, **changed):
    rows = (data.rows, data.weights, data.index)
    if finalized:
        rows = (data.rows[:T].nan_to_num(), None, None)
    if plain:
        rows = (data.shared, None, None)
    fields = {
        "shared_output": data.shared,
        "residual": data.residual,
        "norm_weight": data.norm_weight,
        "eps": EPS,
        "routed_scaling_factor": 2.5,
        **changed,
    }
    return TailArguments(*rows, **fields)


NORMS = {
    "plain": {},
    "Gemma": {"weight_bias": 1.0},
    "no residual": {"residual": None},
    "Gemma, no residual": {"weight_bias": 1.0, "residual": None},
    "no weight": {"norm_weight": None},
}
WORLDS = (None, 1, 2)


def in_world(world_size):
    """Without any group, or in a fake one, whose all_reduce leaves its input as it is."""
    if world_size is not None:
        make_fake_group(world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_the_numbers_are_the_references(dtype, form, norm, world_size):
    in_world(world_size)
    data = inputs.make(dtype, missing=True)
    make, changed = FORMS[form]
    args = tail_arguments(data, **changed, **NORMS[norm])
    got = finalize_allreduce_rms_norm(
        make(data), args.residual, args.norm_weight, EPS, weight_bias=args.weight_bias
    )
    for value, want in zip(got, reference.tail([args])[0], strict=True):
        assert torch.equal(value, want)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_it_is_one_op_and_the_same_bits(form, norm):
    data = inputs.make(BF16, missing=True)
    make, changed = FORMS[form]
    args = tail_arguments(data, **changed, **NORMS[norm])

    def function(output, residual, norm_weight):
        return finalize_allreduce_rms_norm(
            output, residual, norm_weight, EPS, weight_bias=args.weight_bias
        )

    inputs_ = (make(data), args.residual, args.norm_weight)
    tracer = Tracer(function)
    traced = tracer(*inputs_)
    assert tracer.op_calls == traced.report.called == 1
    assert traced.report.all_reduces_before == 0
    assert "1 tail closed by the model itself" in str(traced.report)
    for got, want in zip(traced.output, function(*inputs_), strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("fake_group")
def test_written_out_and_fused_by_the_pass_it_has_the_same_bits():
    data = inputs.make(BF16, missing=True)

    def written_out(rows, weights, index, shared, residual, norm_weight):
        partial = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), shared, 2.5).finalize()
        total = residual + dist._functional_collectives.all_reduce(partial, "sum", "0")
        return torch.nn.functional.rms_norm(total, (H,), norm_weight, EPS), total

    traced = Tracer(written_out)(*data.args())
    assert (traced.report.fused, traced.report.called) == (1, 0)
    got = finalize_allreduce_rms_norm(
        MoEOutput(unfinalized(data), data.shared, 2.5), data.residual, data.norm_weight, EPS
    )
    assert all(torch.equal(*pair) for pair in zip(got, traced.output, strict=True))


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_rank_reduces_nothing_and_says_nothing(world_size, monkeypatch, caplog):
    in_world(world_size)
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: reduced.append(group.size()))
    data = inputs.make(BF16)
    finalize_allreduce_rms_norm(data.shared, data.residual, data.norm_weight, EPS)
    assert reduced == ([2] if world_size == 2 else [])
    assert caplog.records == []


@pytest.mark.parametrize("choose", [lambda g: g, lambda g: g.group_name])
def test_a_subgroup_by_itself_or_by_name(choose, monkeypatch):
    make_fake_group(4)
    mine = dist.new_group([0, 2])
    groups = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: groups.append(group))
    data = inputs.make(BF16)
    module = copy.deepcopy(MoETailRMSNorm(H, EPS, group=choose(mine), dtype=BF16))
    with torch.no_grad():
        module(data.shared, data.residual)
    assert groups == [mine]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("form", ["a plain partial", "unfinalized"])
def test_batches_of_sequences_keep_their_shape(form, residual):
    data = inputs.make(BF16, missing=True)
    batched = (2, T // 2, H)
    output = FORMS[form][0](data)
    flat = finalize_allreduce_rms_norm(
        output, data.residual if residual else None, data.norm_weight, EPS
    )
    if form == "a plain partial":
        output = output.view(batched)
    shaped = finalize_allreduce_rms_norm(
        output, data.residual.view(batched) if residual else None, data.norm_weight, EPS
    )
    for got, want in zip(shaped, flat, strict=True):
        assert got.shape == (batched if residual or form == "a plain partial" else (T, H))
        assert torch.equal(got.reshape(T, H), want)


def test_replicated_output_and_output_scale():
    data = inputs.make(BF16, missing=True)
    args = tail_arguments(data, replicated_output=data.shared * 2, output_scale=0.5)
    got = finalize_allreduce_rms_norm(
        MoEOutput(unfinalized(data), data.shared, 2.5),
        data.residual.view(1, T, H),
        data.norm_weight,
        EPS,
        replicated_output=(data.shared * 2).view(T, 1, H),
        output_scale=0.5,
    )
    for value, want in zip(got, reference.tail([args])[0], strict=True):
        assert torch.equal(value, want.view(1, T, H))


@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
def test_the_module_starts_as_a_norm_without_a_weight(weight_bias):
    data = inputs.make(torch.float32, missing=True)
    module = MoETailRMSNorm(H, EPS, weight_bias=weight_bias)
    assert {name: p.shape for name, p in module.named_parameters()} == {"weight": (H,)}
    assert repr(module) == f"MoETailRMSNorm({H}, eps={EPS}, weight_bias={weight_bias})"
    output = MoEOutput(unfinalized(data))
    with torch.no_grad():
        got = module(output, data.residual)
    want = finalize_allreduce_rms_norm(output, data.residual, None, EPS)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_are_compiled_without_a_break(dynamic):
    """Symbols, from the second on or at once: Dynamo could not tell whether they are numbers."""
    data = inputs.make(torch.float32, missing=True)

    def function(rows, residual, eps, output_scale, weight_bias):
        return finalize_allreduce_rms_norm(
            rows,
            residual,
            data.norm_weight,
            eps,
            output_scale=output_scale,
            weight_bias=weight_bias,
        )

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for numbers in ((1e-6, 1.0, 0.0), (1e-3, 0.5, 1.0), (1e-2, -2.0, 0.5)):
        with torch.no_grad():
            got = compiled(data.shared, data.residual, *numbers)
        want = function(data.shared, data.residual, *numbers)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_layers_with_an_eps_each_are_compiled_one_by_one():
    data = inputs.make(torch.float32, missing=True)
    norms = [MoETailRMSNorm(H, eps).requires_grad_(False) for eps in (1e-6, 1e-3, 1e-2)]
    wanted = [norm(data.shared, data.residual) for norm in norms]
    torch._dynamo.reset()
    for norm, want in zip(norms, wanted, strict=True):
        norm.compile(fullgraph=True, backend="aot_eager")
        got = norm(data.shared, data.residual)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


WRONG_MODULES = [
    ({"hidden_dim": 0}, ValueError, "hidden_dim: expected at least 1, got 0"),
    ({"hidden_dim": (H,)}, TypeError, "hidden_dim: expected an int, got tuple"),
    ({"eps": -1e-6}, ValueError, "eps: expected a float >= 0, got -1e-06"),
    ({"eps": float("nan")}, ValueError, "eps: expected a float >= 0, got nan"),
    ({"eps": None}, TypeError, "eps: expected a float, got NoneType"),
]


@pytest.mark.parametrize(("arguments", "error_type", "message"), WRONG_MODULES)
def test_the_module_checks_its_settings_when_it_is_made(arguments, error_type, message):
    with pytest.raises(error_type) as caught:
        MoETailRMSNorm(**{"hidden_dim": H, **arguments})
    assert str(caught.value) == message


def test_the_module_takes_a_norms_weights():
    data = inputs.make(torch.float32)
    norm = torch.nn.RMSNorm(H, EPS)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    module = MoETailRMSNorm(H, EPS)
    module.load_state_dict(norm.state_dict())
    with torch.no_grad():
        got, total = module(data.shared, data.residual)
        torch.testing.assert_close(got, norm(data.shared + data.residual))
    assert torch.equal(total, data.shared + data.residual)


def test_no_tokens():
    data = inputs.make(BF16, tokens=0)
    for form in (MoEOutput(unfinalized(data), data.shared), data.shared):
        got = finalize_allreduce_rms_norm(form, data.residual, data.norm_weight, EPS)
        assert [value.shape for value in got] == [(0, H)] * 2


DATA = inputs.make(BF16)
ERRORS = {
    "no output": (
        (None, None, None, EPS),
        TypeError,
        "moe_output: expected a MoEOutput or a torch.Tensor, got NoneType",
    ),
    "rows alone": (
        (unfinalized(DATA), None, None, EPS),
        TypeError,
        "moe_output: expected a MoEOutput or a torch.Tensor, got UnfinalizedMoEOutput",
    ),
    "one row": (
        (torch.zeros(H), None, None, EPS),
        ValueError,
        f"moe_output: expected shape [T, H] or [B, S, H], got [{H}]",
    ),
    "residual of another shape": (
        (DATA.shared, DATA.residual.view(1, T, H), None, EPS),
        ValueError,
        f"residual: expected shape [{T}, {H}] (that of moe_output), got [1, {T}, {H}]",
    ),
    "residual of other tokens": (
        (MoEOutput(unfinalized(DATA)), DATA.residual[1:], None, EPS),
        ValueError,
        (
            f"residual: expected shape [T, H] = [{T}, {H}] or [B, S, H] with B * S = T, "
            f"got [{T - 1}, {H}]"
        ),
    ),
    "residual with rows of another length": (
        (MoEOutput(unfinalized(DATA)), DATA.residual.view(2 * T, H // 2), None, EPS),
        ValueError,
        (
            f"residual: expected shape [T, H] = [{T}, {H}] or [B, S, H] with B * S = T, "
            f"got [{2 * T}, {H // 2}]"
        ),
    ),
    "no residual tensor": (
        (DATA.shared, 0, None, EPS),
        TypeError,
        "residual: expected a torch.Tensor, got int",
    ),
    "norm weight of another length": (
        (DATA.shared, None, torch.ones(H + 1), EPS),
        ValueError,
        f"norm_weight: expected shape [H] = [{H}], got [{H + 1}]",
    ),
    "negative eps": (
        (DATA.shared, None, None, -1.0),
        ValueError,
        "eps: expected a float >= 0, got -1.0",
    ),
    "an eps that is NaN": (
        (DATA.shared, None, None, float("nan")),
        ValueError,
        "eps: expected a float >= 0, got nan",
    ),
    "an eps in words": (
        (DATA.shared, None, None, "1e-6"),
        TypeError,
        "eps: expected a float, got str",
    ),
    "no eps": (
        (DATA.shared, None, None, None),
        TypeError,
        "eps: expected a float, got NoneType",
    ),
    "a norm weight that is a list": (
        (DATA.shared, None, [1.0] * H, EPS),
        TypeError,
        "norm_weight: expected a torch.Tensor, got list",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, kind, message = ERRORS[case]
    with pytest.raises(kind) as caught:
        finalize_allreduce_rms_norm(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["weight_bias", "output_scale"])
def test_errors_of_numbers(name):
    with pytest.raises(TypeError) as caught:
        finalize_allreduce_rms_norm(DATA.shared, None, None, EPS, **{name: None})
    assert str(caught.value) == f"{name}: expected a float, got NoneType"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("group", "kind"), [("tp", ValueError), (0, TypeError)])
def test_errors_of_the_group(group, kind):
    with pytest.raises(kind, match=r"expected a [Pp]rocess ?[Gg]roup"):
        finalize_allreduce_rms_norm(DATA.shared, None, None, EPS, group=group)


def test_backward_is_an_error():
    module = MoETailRMSNorm(H)
    norm_out, _ = module(torch.zeros(T, H), torch.zeros(T, H))
    with pytest.raises(moe_fusion.InferenceOnlyError):
        norm_out.sum().backward()
