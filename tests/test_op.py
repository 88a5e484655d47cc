"""The op: what it refuses, what it returns, and real ranks against the fp64 oracle."""

from __future__ import annotations

import contextlib
import dataclasses

import inputs
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from moe_fusion import InferenceOnlyError, reference
from moe_fusion.contract import TailArguments
from moe_fusion.op import OP, OP_EPS_TENSOR

BF16 = torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
T, K, H = inputs.T, inputs.K, inputs.H
FIELDS = [field.name for field in dataclasses.fields(TailArguments)]
GROUP = FIELDS.index("output_scale_tensor")


def operands(args: TailArguments, group="0", *, eps_tensor=False):
    values = [getattr(args, name) for name in FIELDS]
    if eps_tensor:
        values[FIELDS.index("eps")] = torch.tensor(args.eps, dtype=torch.float64)
    values.insert(GROUP, group)
    return values


def converted(values, convert):
    """``values`` with each tensor converted."""
    return [convert(value) if isinstance(value, torch.Tensor) else value for value in values]


def call(args: TailArguments, group="0", *, eps_tensor=False):
    op = OP_EPS_TENSOR if eps_tensor else OP
    return op(*operands(args, group, eps_tensor=eps_tensor))


def every_operand(dtype=BF16, *, rank=0, tokens=T, missing=True, **dtypes):
    data = inputs.make(dtype, rank=rank, tokens=tokens, missing=missing, **dtypes)
    return TailArguments(
        data.rows,
        data.weights,
        data.index,
        data.shared,
        inputs.make(dtype, rank=99, tokens=tokens).shared,
        data.residual,
        data.norm_weight,
        eps=1e-5,
        weight_bias=1.0,
        routed_scaling_factor=2.5,
        output_scale=0.5,
    )


def wide(tensor, *, offset=0):
    """The same values as a slice of rows 24 elements wider, so that rows are not contiguous."""
    buffer = tensor.new_full((tensor.shape[0], tensor.shape[1] + 24), 3)
    view = buffer[:, offset : offset + tensor.shape[1]]
    view.copy_(tensor)
    return view


def strided(args):
    """Every tensor non-contiguous: slices of wider rows, a transposed map, a weight of stride 2."""
    return dataclasses.replace(
        args,
        routed=wide(args.routed),
        expert_weights=args.expert_weights.t().contiguous().t(),
        expanded_idx_to_permuted_idx=args.expanded_idx_to_permuted_idx.t().contiguous().t(),
        shared_output=args.shared_output.t().contiguous().t(),
        replicated_output=wide(args.replicated_output, offset=8),
        residual=wide(args.residual, offset=24),
        norm_weight=args.norm_weight.repeat_interleave(2)[::2],
    )


NO_ROUTING = {"expert_weights": None, "expanded_idx_to_permuted_idx": None}
NO_ADDENDS = {"shared_output": None, "replicated_output": None, "residual": None}
NO_NORM_WEIGHT = {"norm_weight": None, "weight_bias": 0.0}


def without(**names):
    return dataclasses.replace(every_operand(), **names)


def finalized(args):
    return dataclasses.replace(args, routed=args.routed[:T].nan_to_num(), **NO_ROUTING)


def token_major():
    args = every_operand(missing=False)
    return dataclasses.replace(args, expanded_idx_to_permuted_idx=None)


COMBINATIONS = {
    "every operand": every_operand,
    "fp32": lambda: every_operand(torch.float32),
    "fp16, fp32 router, bf16 norm weight": lambda: every_operand(
        torch.float16, weights=torch.float32, norm_weight=BF16
    ),
    "fp32 residual": lambda: without(residual=every_operand().residual.float()),
    "no shared output": lambda: without(shared_output=None),
    "no replicated output": lambda: without(replicated_output=None),
    "no residual": lambda: without(residual=None),
    "a scale tensor": lambda: without(output_scale_tensor=torch.tensor(0.75)),
    "a scale tensor, bf16": lambda: without(output_scale_tensor=torch.tensor(0.75, dtype=BF16)),
    "a scale tensor, fp64": lambda: without(output_scale_tensor=torch.tensor(0.1).double()),
    "no norm weight": lambda: without(**NO_NORM_WEIGHT),
    "rows alone": lambda: without(**NO_ADDENDS, **NO_NORM_WEIGHT),
    "token-major rows": token_major,
    "finalized": lambda: finalized(every_operand()),
    "finalized rows alone": lambda: finalized(without(**NO_ADDENDS, **NO_NORM_WEIGHT)),
    "non-contiguous": lambda: strided(every_operand()),
    "non-contiguous, finalized": lambda: finalized(strided(every_operand())),
    "one token": lambda: every_operand(tokens=1, missing=False),
    "no tokens": lambda: every_operand(tokens=0),
    "no rows": lambda: without(
        routed=torch.empty(0, H, dtype=BF16),
        expanded_idx_to_permuted_idx=torch.full((T, K), -1, dtype=torch.int32),
    ),
}
both_overloads = pytest.mark.parametrize("eps_tensor", [False, True], ids=["eps", "eps_tensor"])


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", COMBINATIONS)
@both_overloads
def test_opcheck(name, eps_tensor):
    args = COMBINATIONS[name]()
    # unread rows are NaN, which opcheck's comparison of inputs before and after takes for a change
    args = dataclasses.replace(args, routed=args.routed.clone().nan_to_num_())
    op = OP_EPS_TENSOR if eps_tensor else OP
    results = opcheck(op, operands(args, eps_tensor=eps_tensor))
    assert set(results.values()) == {"SUCCESS"}


def storages(values):
    return [v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", COMBINATIONS)
@both_overloads
def test_outputs_are_the_references_fresh_contiguous_and_as_the_fake_says(name, eps_tensor):
    args = COMBINATIONS[name]()
    given = operands(args, eps_tensor=eps_tensor)
    kept = converted(given, torch.clone)
    outputs = call(args, eps_tensor=eps_tensor)
    for got, want in zip(outputs, reference.tail([args])[0], strict=True):
        assert torch.equal(got, want)
        assert torch.isfinite(got).all()
        assert got.is_contiguous()
    if args.num_tokens:
        assert len({*storages(outputs), *storages(given)}) == 2 + len({*storages(given)})
    for value, before in zip(given, kept, strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, before, rtol=0, atol=0, equal_nan=True)
    with FakeTensorMode() as mode:
        fakes = converted(given, mode.from_tensor)
        shapes = (OP_EPS_TENSOR if eps_tensor else OP)(*fakes)
    for got, fake in zip(outputs, shapes, strict=True):
        assert got.shape == fake.shape == (args.num_tokens, H)
        assert got.stride() == fake.stride()
        assert got.dtype == fake.dtype
        assert got.device == fake.device
    assert outputs[0].dtype == args.routed.dtype
    assert outputs[1].dtype == args.residual_dtype


@both_overloads
def test_an_empty_group_name_is_this_rank_alone(eps_tensor):
    """No group was initialised, and none is needed."""
    args = every_operand()
    args = dataclasses.replace(args, routed=args.routed.clone().nan_to_num_())
    outputs = call(args, "", eps_tensor=eps_tensor)
    for got, want in zip(outputs, reference.tail([args])[0], strict=True):
        assert torch.equal(got, want)
    op = OP_EPS_TENSOR if eps_tensor else OP
    results = opcheck(op, operands(args, "", eps_tensor=eps_tensor))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fake_group")
def test_the_outputs_of_identity_arguments_are_copies():
    """Nothing to add, scale or weigh: ``residual_out`` equals ``routed`` and may not be it."""
    rows = torch.randn(T, H)
    args = TailArguments(rows, eps=0.0)
    norm_out, residual_out = call(args)
    assert torch.equal(residual_out, rows)
    assert len({*storages((norm_out, residual_out, rows))}) == 3


@pytest.mark.usefixtures("fake_group")
@both_overloads
def test_eps_and_weight_bias_are_not_exchanged(eps_tensor):
    """mean(x^2) = 1 and eps = 3: 1 / 2 * (1 + 3)."""
    args = TailArguments(
        torch.ones(1, H), norm_weight=torch.full((H,), 3.0), eps=3.0, weight_bias=1.0
    )
    norm_out, _ = call(args, eps_tensor=eps_tensor)
    assert torch.equal(norm_out, torch.full((1, H), 2.0))


def test_the_schema_is_fixed():
    text = (
        "finalize_allreduce_rms_norm(Tensor routed, Tensor? expert_weights, "
        "Tensor? expanded_idx_to_permuted_idx, Tensor? shared_output, Tensor? replicated_output, "
        "Tensor? residual, Tensor? norm_weight, float eps, float weight_bias, "
        "float routed_scaling_factor, float output_scale, str group_name, "
        "Tensor? output_scale_tensor=None) "
        "-> (Tensor norm_out, Tensor residual_out)"
    )
    assert str(OP._schema) == f"moe_fusion::{text}"
    other = text.replace("norm(", "norm.eps_tensor(").replace("float eps", "Tensor eps")
    assert str(OP_EPS_TENSOR._schema) == f"moe_fusion::{other}"
    assert [a.name for a in OP._schema.arguments] == [
        *FIELDS[:GROUP],
        "group_name",
        *FIELDS[GROUP:],
    ]


def zeros(*sizes, dtype=BF16, device=None):
    return torch.zeros(sizes, dtype=dtype, device=device)


ROWS = every_operand().routed.shape[0]
DTYPE_LIST = "(torch.bfloat16, torch.float16, torch.float32)"
MAP = "expanded_idx_to_permuted_idx"
ERRORS = {
    "routed's dtype": (
        {"routed": zeros(ROWS, H, dtype=torch.float64)},
        TypeError,
        f"routed: expected dtype in {DTYPE_LIST}, got torch.float64",
    ),
    "routed's rank": (
        {"routed": zeros(1, ROWS, H)},
        ValueError,
        f"routed: expected shape [R, H], got [1, {ROWS}, {H}]",
    ),
    "weights' dtype": (
        {"expert_weights": zeros(T, K, dtype=torch.int64)},
        TypeError,
        f"expert_weights: expected dtype in {DTYPE_LIST}, got torch.int64",
    ),
    "weights' rank": (
        {"expert_weights": zeros(T * K)},
        ValueError,
        f"expert_weights: expected shape [T, K], got [{T * K}]",
    ),
    "weights without a map for more rows than there are": (
        {"routed": zeros(T, H), MAP: None},
        ValueError,
        (
            "routed: expected at least one row for each entry of expert_weights "
            f"[{T}, {K}] when there is no map, got [{T}, {H}]"
        ),
    ),
    "a flat map": (
        {MAP: zeros(T * K, dtype=torch.int32)},
        ValueError,
        f"{MAP}: expected shape [T, K], got [{T * K}]",
    ),
    "an int64 map": (
        {MAP: zeros(T, K, dtype=torch.int64)},
        TypeError,
        f"{MAP}: expected dtype torch.int32, got torch.int64",
    ),
    "map's shape": (
        {MAP: zeros(T, K + 1, dtype=torch.int32)},
        ValueError,
        f"{MAP}: expected shape [T, K] = [{T}, {K}], got [{T}, {K + 1}]",
    ),
    "a map without weights": (
        {"expert_weights": None},
        ValueError,
        f"{MAP}: expected None without expert_weights, got a tensor",
    ),
    "shared's dtype": (
        {"shared_output": zeros(T, H, dtype=torch.float32)},
        TypeError,
        "shared_output: expected dtype torch.bfloat16, got torch.float32",
    ),
    "shared's shape": (
        {"shared_output": zeros(T + 1, H)},
        ValueError,
        f"shared_output: expected shape [T, H] = [{T}, {H}], got [{T + 1}, {H}]",
    ),
    "replicated's dtype": (
        {"replicated_output": zeros(T, H, dtype=torch.float16)},
        TypeError,
        "replicated_output: expected dtype torch.bfloat16, got torch.float16",
    ),
    "replicated's rank": (
        {"replicated_output": zeros(H)},
        ValueError,
        f"replicated_output: expected shape [T, H], got [{H}]",
    ),
    "residual's dtype": (
        {"residual": zeros(T, H, dtype=torch.float64)},
        TypeError,
        f"residual: expected dtype in {DTYPE_LIST}, got torch.float64",
    ),
    "a residual of R rows": (
        {"residual": zeros(ROWS, H)},
        ValueError,
        f"residual: expected shape [T, H] = [{T}, {H}], got [{ROWS}, {H}]",
    ),
    "norm weight's dtype": (
        {"norm_weight": zeros(H, dtype=torch.int32)},
        TypeError,
        f"norm_weight: expected dtype in {DTYPE_LIST}, got torch.int32",
    ),
    "norm weight's rank": (
        {"norm_weight": zeros(1, H)},
        ValueError,
        f"norm_weight: expected shape [H], got [1, {H}]",
    ),
    "norm weight's shape": (
        {"norm_weight": zeros(H - 8)},
        ValueError,
        f"norm_weight: expected shape [H] = [{H}], got [{H - 8}]",
    ),
    "scale tensor's rank": (
        {"output_scale_tensor": torch.ones(1)},
        ValueError,
        "output_scale_tensor: expected a 0-d tensor, got shape [1]",
    ),
    "scale tensor's dtype": (
        {"output_scale_tensor": torch.tensor(2)},
        TypeError,
        "output_scale_tensor: expected a float dtype, got torch.int64",
    ),
    "scale tensor's device": (
        {"output_scale_tensor": torch.ones((), device="meta")},
        ValueError,
        "output_scale_tensor: expected device cpu (that of the rows), got meta",
    ),
    "a bias without a norm weight": (
        {"norm_weight": None},
        ValueError,
        "weight_bias: expected 0.0 without norm_weight, got 1.0",
    ),
}


for _name in FIELDS[1:7]:
    ERRORS[f"{_name}'s device"] = (
        {_name: getattr(every_operand(), _name).to("meta")},
        ValueError,
        f"{_name}: expected device cpu (that of the rows), got meta",
    )


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", ERRORS)
@both_overloads
def test_errors(name, eps_tensor, fake):
    changes, kind, message = ERRORS[name]
    values = operands(without(**changes), eps_tensor=eps_tensor)
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    if fake:
        values = converted(values, mode.from_tensor)
    with pytest.raises(kind) as caught, mode:
        (OP_EPS_TENSOR if eps_tensor else OP)(*values)
    assert str(caught.value) == message


@pytest.mark.usefixtures("fake_group")
def test_an_unknown_group():
    """The fake kernel takes any name, so that a graph can be looked at without its processes."""
    args = every_operand()
    with pytest.raises(ValueError, match="group_name") as caught:
        call(args, "77")
    assert str(caught.value) == (
        "group_name: expected a process group of this process, one of ['0'], got '77'"
    )
    outputs = OP(*converted(operands(args, "77"), lambda tensor: tensor.to("meta")))
    assert [out.shape for out in outputs] == [(T, H), (T, H)]


def test_without_any_group():
    with pytest.raises(ValueError, match=r"one of \[\], got '0'$"):
        call(every_operand())


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("eps", "message"),
    [
        (torch.ones(1), "eps: expected a float or a 0-d CPU tensor, got shape [1] on cpu"),
        (
            torch.ones((), device="meta"),
            "eps: expected a float or a 0-d CPU tensor, got shape [] on meta",
        ),
    ],
    ids=["rank", "device"],
)
def test_eps_tensor_errors(eps, message):
    values = list(operands(every_operand()))
    values[FIELDS.index("eps")] = eps
    with pytest.raises(ValueError, match="eps") as caught:
        OP_EPS_TENSOR(*values)
    assert str(caught.value) == message


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("eps", [-1e-6, -0.5, float("nan")])
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_an_eps_that_is_not_at_least_zero_is_an_error(eps, fake):
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    values = operands(without(eps=eps))
    if fake:
        values = converted(values, mode.from_tensor)
    with pytest.raises(ValueError, match="eps") as caught, mode:
        OP(*values)
    assert str(caught.value) == f"eps: expected a float >= 0, got {eps}"


@pytest.mark.usefixtures("fake_group")
def test_a_negative_eps_tensor_gives_what_the_norm_would():
    """A graph computes it, so that its value is no reason to fail in the middle of a call."""
    args = without(eps=-0.5)
    args.residual[0] *= 0.1
    args = dataclasses.replace(args, routed=args.routed * 0.0, shared_output=None)
    outputs = call(dataclasses.replace(args, replicated_output=None), eps_tensor=True)
    norm_out, residual_out = (out.double() for out in outputs)
    shifted = residual_out.pow(2).mean(-1, keepdim=True) - 0.5
    assert bool((shifted[0] < 0.0).all())
    assert norm_out[0].isnan().all()
    want = residual_out * shifted.rsqrt() * (args.norm_weight.double() + args.weight_bias)
    torch.testing.assert_close(norm_out[1:], want[1:], rtol=2**-7, atol=0)


@pytest.mark.usefixtures("fake_group")
@both_overloads
def test_no_tokens_make_no_collective(monkeypatch, eps_tensor):
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(args))
    outputs = call(every_operand(tokens=0), eps_tensor=eps_tensor)
    assert [out.shape for out in outputs] == [(0, H), (0, H)]
    assert [out.dtype for out in outputs] == [BF16, BF16]
    assert calls == []
    call(every_operand(tokens=1, missing=False), eps_tensor=eps_tensor)
    assert len(calls) == 1
    assert calls[0][0].shape == (1, H)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("output", [0, 1])
@both_overloads
def test_backward_is_refused(eps_tensor, output):
    args = without(residual=every_operand().residual.requires_grad_())
    out = call(args, eps_tensor=eps_tensor)[output]
    with pytest.raises(InferenceOnlyError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "moe_fusion::finalize_allreduce_rms_norm is for inference only: expected no backward "
        "through it, got a call of backward(), or a compilation with gradients; "
        "compile and run the model under torch.no_grad()"
    )
    with torch.no_grad():
        assert not call(args, eps_tensor=eps_tensor)[output].requires_grad


# Real ranks: one set of four processes runs every case over the world, and over its strided halves
# at the same time.
WORLD = 4
HALVES = ([0, 2], [1, 3])
OWN_SCALES = "a scale tensor that differs by rank"


def rank_arguments(rank):
    """The cases of one rank, by name: inputs differ by rank, residual and norm weight do not."""
    cases = {f"every operand, {dtype}": every_operand(dtype, rank=rank) for dtype in DTYPES}
    base = every_operand(rank=rank)
    cases["fp32 residual"] = dataclasses.replace(base, residual=base.residual.float())
    cases["no residual"] = dataclasses.replace(base, residual=None)
    cases[OWN_SCALES] = dataclasses.replace(
        base, output_scale_tensor=torch.tensor((1 + rank) / 4), residual=base.residual.float()
    )
    cases["finalized"] = finalized(base)
    cases["non-contiguous"] = strided(base)
    cases["one token"] = every_operand(rank=rank, tokens=1, missing=False)
    cases["no tokens"] = every_operand(rank=rank, tokens=0)
    data = inputs.make(torch.float32, rank=rank, missing=True)
    routed = TailArguments(data.rows, data.weights, data.index, routed_scaling_factor=2.5)
    cases["partial"] = dataclasses.replace(routed, shared_output=data.shared)
    cases["replicated"] = dataclasses.replace(
        routed, replicated_output=inputs.make(torch.float32, rank=99).shared
    )
    small = inputs.make(rank=rank)
    rows = small.rows[rank : T * K]  # each rank has its own R, and rank 3 has none of its experts
    index = torch.where(small.index >= rank, small.index - rank, -1).to(torch.int32)
    cases["R differs by rank"] = TailArguments(rows, small.weights, index)
    return cases


def run_rank(rank, folder):
    """What one process does: each case over the world and over this rank's half."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    halves = [dist.new_group(ranks) for ranks in HALVES]
    groups = {"world": dist.group.WORLD, "half": halves[rank % 2]}
    results = {}
    for where, group in groups.items():
        for name, args in rank_arguments(rank).items():
            results[where, name] = call(args, group.group_name)
        eps_tensor = call(rank_arguments(rank)["finalized"], group.group_name, eps_tensor=True)
        results[where, "eps_tensor"] = eps_tensor
    other = halves[1 - rank % 2]
    results["foreign"] = other is dist.GroupMember.NON_GROUP_MEMBER
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The outputs of every rank: ``ranks[r][group, case]``."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


CASES = list(rank_arguments(0))
members_of = {"world": [list(range(WORLD))], "half": list(HALVES)}
both_groups = pytest.mark.parametrize("where", ["world", "half"])


def half_ulp(dtype):
    return torch.finfo(dtype).eps / 2


def assert_near_the_oracle(outputs, everyone, rank):
    """``residual_out`` within its roundings of fp64; ``norm_out`` one rounding from its own sum."""
    args = everyone[rank]
    _, exact = reference.tail(everyone, torch.float64)[rank]
    norm_out, residual_out = outputs
    magnitude = sum((reference.partial(a, torch.float64).abs() for a in everyone), exact * 0)
    # each rank's partial, and each of the backend's W - 1 sums, is rounded to the activation dtype
    roundings = half_ulp(args.routed.dtype) * len(everyone) * magnitude
    bound = 1.01 * (roundings + half_ulp(residual_out.dtype) * exact.abs()) + 1e-6
    assert ((residual_out - exact).abs() <= bound).all()
    wide = residual_out.double()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + args.eps)
    if args.norm_weight is not None:
        norm = norm * (args.weight_bias + args.norm_weight.double())
    assert ((norm_out - norm).abs() <= 1.01 * half_ulp(norm_out.dtype) * norm.abs() + 1e-6).all()


@both_groups
@pytest.mark.parametrize("name", CASES)
def test_ranks_against_the_oracle(ranks, name, where):
    for members in members_of[where]:
        everyone = [rank_arguments(rank)[name] for rank in members]
        for place, rank in enumerate(members):
            outputs = ranks[rank][where, name]
            assert outputs[0].shape == (everyone[place].num_tokens, H)
            assert outputs[1].dtype == everyone[place].residual_dtype
            assert_near_the_oracle(outputs, everyone, place)


@both_groups
@pytest.mark.parametrize("name", [name for name in CASES if name != OWN_SCALES])
def test_ranks_are_bit_equal(ranks, name, where):
    for first, *others in members_of[where]:
        for other in others:
            pairs = zip(ranks[first][where, name], ranks[other][where, name], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_the_reference_bit_for_bit(ranks, name):
    """A sum of two is the same in either order, and gloo rounds it as the reference does."""
    for members in HALVES:
        wanted = reference.tail([rank_arguments(rank)[name] for rank in members])
        for rank, want in zip(members, wanted, strict=True):
            assert all(
                torch.equal(a, b) for a, b in zip(ranks[rank]["half", name], want, strict=True)
            )


@both_groups
def test_eps_tensor_over_ranks(ranks, where):
    for results in ranks:
        pairs = zip(results[where, "eps_tensor"], results[where, "finalized"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@both_groups
def test_a_partial_is_summed_over_ranks_and_a_replicated_output_counted_once(ranks, where):
    """With nothing else to tell them apart, the outputs differ by the addends alone."""
    shared = [inputs.make(torch.float32, rank=rank).shared for rank in range(WORLD)]
    replicated = inputs.make(torch.float32, rank=99).shared
    for members in members_of[where]:
        partial, once = (ranks[members[0]][where, name][1] for name in ("partial", "replicated"))
        want = sum(shared[rank] for rank in members) - replicated
        torch.testing.assert_close(partial - once, want, rtol=1e-5, atol=1e-5)


def test_strided_groups_are_apart(ranks):
    """[0, 2] and [1, 3] hold different sums, and neither is the world's."""
    name = "every operand, torch.float32"
    first, second, world = ranks[0]["half", name], ranks[1]["half", name], ranks[0]["world", name]
    assert all(result["foreign"] for result in ranks)
    for a, b in ((first, second), (first, world), (second, world)):
        assert (a[1] - b[1]).abs().max() > 0.1
