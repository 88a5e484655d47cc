"""The dataclasses: what they refuse and in which words, pytrees, and the plain-torch finalize."""

from __future__ import annotations

import dataclasses

import inputs
import pytest
import torch
from torch.utils import _pytree as pytree

from moe_fusion import MoEOutput, UnfinalizedMoEOutput, reference
from moe_fusion.contract import TailArguments

T, K, H = 3, 2, 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPE_LIST = "(torch.bfloat16, torch.float16, torch.float32)"


def parts(**changes):
    """Valid fields of an :class:`UnfinalizedMoEOutput`, some of them replaced."""
    valid = {
        "gemm2_permuted": torch.zeros(T * K, H),
        "expert_weights": torch.ones(T, K),
        "expanded_idx_to_permuted_idx": torch.arange(T * K, dtype=torch.int32).view(T, K),
    }
    return {**valid, **changes}


def moe_parts(**changes):
    return {"routed": torch.zeros(T, H), "shared_output": torch.zeros(T, H), **changes}


def ints(*sizes, dtype=torch.int32, device=None):
    return torch.zeros(sizes, dtype=dtype, device=device)


UNFINALIZED_ERRORS = {
    "rows of another kind": (
        {"gemm2_permuted": [1.0]},
        TypeError,
        "gemm2_permuted: expected a torch.Tensor, got list",
    ),
    "no weights": (
        {"expert_weights": None},
        TypeError,
        "expert_weights: expected a torch.Tensor, got NoneType",
    ),
    "no map": (
        {"expanded_idx_to_permuted_idx": None},
        TypeError,
        "expanded_idx_to_permuted_idx: expected a torch.Tensor, got NoneType",
    ),
    "rows' dtype": (
        {"gemm2_permuted": torch.zeros(T * K, H, dtype=torch.float64)},
        TypeError,
        f"gemm2_permuted: expected dtype in {DTYPE_LIST}, got torch.float64",
    ),
    "rows' rank": (
        {"gemm2_permuted": torch.zeros(T, K, H)},
        ValueError,
        "gemm2_permuted: expected shape [R, H], got [3, 2, 16]",
    ),
    "rows' last dim": (
        {"gemm2_permuted": torch.zeros(H, T * K).t()},
        ValueError,
        "gemm2_permuted: expected a contiguous last dim (stride 1), got strides (1, 6)",
    ),
    "weights' dtype": (
        {"expert_weights": torch.ones(T, K, dtype=torch.int32)},
        TypeError,
        f"expert_weights: expected dtype in {DTYPE_LIST}, got torch.int32",
    ),
    "weights' rank": (
        {"expert_weights": torch.ones(T * K)},
        ValueError,
        "expert_weights: expected shape [T, K], got [6]",
    ),
    "weights' device": (
        {"expert_weights": torch.ones(T, K, device="meta")},
        ValueError,
        "expert_weights: expected device cpu (that of the rows), got meta",
    ),
    "map's dtype": (
        {"expanded_idx_to_permuted_idx": ints(T, K, dtype=torch.int64)},
        TypeError,
        "expanded_idx_to_permuted_idx: expected dtype torch.int32, got torch.int64",
    ),
    "a flat map": (
        {"expanded_idx_to_permuted_idx": ints(T * K)},
        ValueError,
        "expanded_idx_to_permuted_idx: expected shape [T, K], got [6]",
    ),
    "map's shape": (
        {"expanded_idx_to_permuted_idx": ints(K, T)},
        ValueError,
        "expanded_idx_to_permuted_idx: expected shape [T, K] = [3, 2], got [2, 3]",
    ),
    "map's device": (
        {"expanded_idx_to_permuted_idx": ints(T, K, device="meta")},
        ValueError,
        "expanded_idx_to_permuted_idx: expected device cpu (that of the rows), got meta",
    ),
}


@pytest.mark.parametrize("name", UNFINALIZED_ERRORS)
def test_unfinalized_errors(name):
    changes, kind, message = UNFINALIZED_ERRORS[name]
    with pytest.raises(kind) as caught:
        UnfinalizedMoEOutput(**parts(**changes))
    assert str(caught.value) == message


MOE_ERRORS = {
    "routed of another kind": (
        {"routed": (1, 2)},
        TypeError,
        "routed: expected a torch.Tensor, got tuple",
    ),
    "routed's dtype": (
        {"routed": ints(T, H)},
        TypeError,
        f"routed: expected dtype in {DTYPE_LIST}, got torch.int32",
    ),
    "routed's rank": (
        {"routed": torch.zeros(1, T, H)},
        ValueError,
        "routed: expected shape [T, H], got [1, 3, 16]",
    ),
    "scale's kind": (
        {"routed_scaling_factor": torch.ones(())},
        TypeError,
        "routed_scaling_factor: expected a float, got Tensor",
    ),
    "shared of another kind": (
        {"shared_output": 0.0},
        TypeError,
        "shared_output: expected a torch.Tensor, got float",
    ),
    "shared's dtype": (
        {"shared_output": torch.zeros(T, H, dtype=torch.bfloat16)},
        TypeError,
        "shared_output: expected dtype torch.float32, got torch.bfloat16",
    ),
    "shared's rank": (
        {"shared_output": torch.zeros(H)},
        ValueError,
        "shared_output: expected shape [T, H], got [16]",
    ),
    "shared's shape": (
        {"shared_output": torch.zeros(T + 1, H)},
        ValueError,
        "shared_output: expected shape [T, H] = [3, 16], got [4, 16]",
    ),
    "shared's device": (
        {"shared_output": torch.zeros(T, H, device="meta")},
        ValueError,
        "shared_output: expected device cpu (that of the rows), got meta",
    ),
}


@pytest.mark.parametrize("name", MOE_ERRORS)
def test_moe_output_errors(name):
    changes, kind, message = MOE_ERRORS[name]
    with pytest.raises(kind) as caught:
        MoEOutput(**moe_parts(**changes))
    assert str(caught.value) == message


def test_the_sizes_of_an_unfinalized_output_come_from_weights_and_row_length():
    """R is padded: a shared output of R rows is wrong, one of T rows is right."""
    unfinalized = UnfinalizedMoEOutput(**parts(gemm2_permuted=torch.zeros(128, H)))
    moe = MoEOutput(unfinalized, torch.zeros(T, H))
    assert (moe.num_tokens, moe.hidden_dim, moe.dtype) == (T, H, torch.float32)
    with pytest.raises(ValueError, match=r"expected shape \[T, H\] = \[3, 16\], got \[128, 16\]"):
        MoEOutput(unfinalized, torch.zeros(128, H))


def test_defaults_and_frozen():
    moe = MoEOutput(torch.zeros(T, H))
    assert moe.shared_output is None
    assert moe.routed_scaling_factor == 1.0
    for value, name in (
        (moe, "routed"),
        (UnfinalizedMoEOutput(**parts()), "expert_weights"),
        (TailArguments(torch.zeros(T, H)), "eps"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


TAIL_ERRORS = {
    "map without weights": (
        {"expanded_idx_to_permuted_idx": ints(T, K)},
        ValueError,
        "expanded_idx_to_permuted_idx: expected None without expert_weights, got a tensor",
    ),
    "too few token-major rows": (
        {"routed": torch.zeros(T * K - 1, H), "expert_weights": torch.ones(T, K)},
        ValueError,
        (
            "routed: expected at least one row for each entry of expert_weights [3, 2] when there "
            "is no map, got [5, 16]"
        ),
    ),
    "weight_bias without weight": (
        {"weight_bias": 1.0},
        ValueError,
        "weight_bias: expected 0.0 without norm_weight, got 1.0",
    ),
    "norm_weight's shape": (
        {"norm_weight": torch.ones(H - 1)},
        ValueError,
        "norm_weight: expected shape [H] = [16], got [15]",
    ),
    "residual's shape": (
        {"residual": torch.ones(T, H + 1)},
        ValueError,
        "residual: expected shape [T, H] = [3, 16], got [3, 17]",
    ),
}


@pytest.mark.parametrize("name", TAIL_ERRORS)
def test_tail_arguments_errors(name):
    """What the op alone can refuse; tests/test_op.py has every other field."""
    changes, kind, message = TAIL_ERRORS[name]
    args = TailArguments(**{"routed": torch.zeros(T, H), **changes})
    with pytest.raises(kind) as caught:
        args.check()
    assert str(caught.value) == message


def moe_output(dtype=torch.float32, *, unfinalized=True, shared=True, scale=2.5, **options):
    data = inputs.make(dtype, **options)
    rows = UnfinalizedMoEOutput(data.rows, data.weights, data.index)
    routed = rows if unfinalized else data.residual
    return MoEOutput(routed, data.shared if shared else None, scale)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("unfinalized", [True, False])
def test_pytree_round_trip(unfinalized, shared):
    moe = moe_output(unfinalized=unfinalized, shared=shared)
    leaves, spec = pytree.tree_flatten(moe)
    routed = dataclasses.astuple(moe.routed) if unfinalized else (moe.routed,)
    expected = [*routed, moe.shared_output] if unfinalized else [moe.routed, moe.shared_output]
    assert len(leaves) == len(expected)
    if not unfinalized:
        assert all(leaf is want for leaf, want in zip(leaves, expected, strict=True))
    back = pytree.tree_unflatten(leaves, spec)
    assert type(back) is MoEOutput
    assert type(back.routed) is type(moe.routed)
    assert back.shared_output is moe.shared_output
    assert back.routed_scaling_factor == 2.5
    assert all(a is b for a, b in zip(pytree.tree_leaves(back), leaves, strict=True))


def test_pytree_keys_name_the_fields():
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(moe_output())[0]]
    assert paths == [
        ".routed.gemm2_permuted",
        ".routed.expert_weights",
        ".routed.expanded_idx_to_permuted_idx",
        ".shared_output",
    ]


def test_the_scale_is_part_of_the_structure():
    specs = [pytree.tree_structure(moe_output(scale=scale)) for scale in (2.5, 2.5, 1.0)]
    assert specs[0] == specs[1]
    assert specs[0] != specs[2]
    assert pytree.treespec_loads(pytree.treespec_dumps(specs[2])) == specs[2]


def test_a_leaf_may_be_replaced_by_anything():
    """Pytree's users map leaves to their names or sizes, which construction would refuse."""
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), moe_output())
    assert shapes.routed.expert_weights == (inputs.T, inputs.K)
    assert shapes.shared_output == (inputs.T, inputs.H)


def test_it_crosses_the_boundaries_of_a_compiled_function():
    def scaled(moe):
        rows = moe.routed
        doubled = UnfinalizedMoEOutput(
            rows.gemm2_permuted * 2, rows.expert_weights, rows.expanded_idx_to_permuted_idx
        )
        return MoEOutput(doubled, moe.shared_output, moe.routed_scaling_factor * 2)

    moe = moe_output(missing=True)
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    got = compiled(moe)
    assert type(got) is MoEOutput
    assert type(got.routed) is UnfinalizedMoEOutput
    assert got.routed_scaling_factor == 5.0
    want = 5.0 * 2 * moe.routed.finalize() + moe.shared_output
    torch.testing.assert_close(got.finalize(), want)


def test_a_wrong_field_inside_a_compiled_function_is_the_same_error():
    def build(rows, weights):
        return UnfinalizedMoEOutput(rows, weights, torch.zeros_like(weights)).finalize()

    compiled = torch.compile(build, backend="eager")
    with pytest.raises(TypeError, match=r"expected dtype torch\.int32, got torch\.float32"):
        compiled(torch.zeros(T, H), torch.ones(T, 1))


class Finalizer(torch.nn.Module):
    def forward(self, moe):
        return {"partial": moe.finalize(), "moe": moe}


@pytest.mark.parametrize("unfinalized", [True, False])
def test_it_crosses_export(unfinalized):
    moe = moe_output(unfinalized=unfinalized, missing=True)
    program = torch.export.export(Finalizer(), (moe,))
    other = moe_output(unfinalized=unfinalized, missing=True, rank=1)
    got = program.module()(other)
    assert torch.equal(got["partial"], other.finalize())
    assert type(got["moe"]) is MoEOutput
    assert got["moe"].routed_scaling_factor == 2.5


def test_export_with_a_dynamic_number_of_tokens():
    moe = moe_output(missing=True)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    rows = torch.export.Dim("rows", min=2, max=4096)
    fields = [[{0: rows}, {0: tokens}, {0: tokens}], {0: tokens}]
    program = torch.export.export(Finalizer(), (moe,), dynamic_shapes=(fields,))
    other = moe_output(missing=True, tokens=11)
    assert torch.equal(program.module()(other)["partial"], other.finalize())


def assert_is_the_reference(moe):
    """``finalize`` is :func:`reference.partial` but for the order of the fp32 sum over K."""
    rows = moe.routed
    args = TailArguments(
        rows.gemm2_permuted,
        rows.expert_weights,
        rows.expanded_idx_to_permuted_idx,
        shared_output=moe.shared_output,
        routed_scaling_factor=moe.routed_scaling_factor,
    )
    want = reference.partial(args)
    assert rows.finalize().dtype == torch.float32
    got = moe.finalize()
    assert got.dtype == moe.dtype
    assert torch.isfinite(got).all()
    # fp32 sums in another order may fall on the other side of one rounding to the activation dtype
    spacing = torch.finfo(moe.dtype).eps * want.abs() + 1e-6
    assert ((got.float() - want).abs() <= spacing).all()
    return got


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finalize_is_the_reference(dtype, weights, shared):
    assert_is_the_reference(moe_output(dtype, weights=weights, shared=shared, missing=True))


def test_a_token_without_experts_is_its_shared_output():
    """Every row is NaN and no entry names one."""
    data = inputs.make(torch.bfloat16)
    rows = torch.full_like(data.rows, float("nan"))
    absent = torch.full_like(data.index, -1)
    unfinalized = UnfinalizedMoEOutput(rows, data.weights, absent)
    assert torch.equal(unfinalized.finalize(), torch.zeros(inputs.T, inputs.H))
    got = MoEOutput(unfinalized, data.shared, 2.5).finalize()
    assert torch.equal(got, data.shared)
    assert got.data_ptr() != data.shared.data_ptr()


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_rank_without_rows(tokens):
    """R = 0: this rank has none of the experts that were chosen."""
    unfinalized = UnfinalizedMoEOutput(
        torch.empty(0, H, dtype=torch.bfloat16),
        torch.ones(tokens, K),
        torch.full((tokens, K), -1, dtype=torch.int32),
    )
    got = MoEOutput(unfinalized).finalize()
    assert torch.equal(got, torch.zeros(tokens, H, dtype=torch.bfloat16))
    args = TailArguments(*dataclasses.astuple(unfinalized))
    assert torch.equal(reference.finalize(*dataclasses.astuple(args)[:3]), got.float())


def test_no_tokens():
    moe = moe_output(torch.bfloat16, tokens=0)
    assert moe.finalize().shape == (0, inputs.H)


def test_rows_inside_wider_rows():
    """A padded GEMM gives ``buf[:, :H]``; the padding columns are NaN and never read."""
    data = inputs.make(torch.bfloat16, missing=True)
    buffer = torch.full((data.rows.shape[0], inputs.H + 24), float("nan"), dtype=torch.bfloat16)
    buffer[:, : inputs.H] = data.rows
    view = buffer[:, : inputs.H]
    assert view.stride() == (inputs.H + 24, 1)
    got = assert_is_the_reference(
        MoEOutput(UnfinalizedMoEOutput(view, data.weights, data.index), data.shared)
    )
    tight = UnfinalizedMoEOutput(data.rows, data.weights, data.index)
    assert torch.equal(got, MoEOutput(tight, data.shared).finalize())


@pytest.mark.parametrize("padding", [0, 1, 122])
def test_padding_rows_change_nothing(padding):
    data = inputs.make(torch.bfloat16)
    count = inputs.T * inputs.K
    rows = torch.cat([data.rows[:count], data.rows.new_full((padding, inputs.H), float("nan"))])
    got = MoEOutput(UnfinalizedMoEOutput(rows, data.weights, data.index)).finalize()
    want = MoEOutput(UnfinalizedMoEOutput(data.rows, data.weights, data.index)).finalize()
    assert torch.equal(got, want)


def test_the_scale_multiplies_the_routed_experts_only():
    routed, shared = torch.full((T, H), 3.0), torch.full((T, H), 0.5)
    assert torch.equal(MoEOutput(routed, shared, 2.0).finalize(), torch.full((T, H), 6.5))


def test_shared_and_routed_are_rounded_once():
    """256 + 0.75 + 0.75 in bf16 is 257.5, so 258; rounding after each addition stays at 256."""
    rows = torch.tensor([[256.0] * H, [0.75] * H], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    weights = torch.ones(1, 2, dtype=torch.bfloat16)
    moe = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), torch.full_like(rows[:1], 0.75))
    assert torch.equal(moe.finalize(), torch.full_like(rows[:1], 258.0))
