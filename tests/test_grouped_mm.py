"""The grouped_mm producer: numbers, experts of other ranks, no copies, no waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import make_fake_group
from moe_layers import GATES, INNER, E, H, K, T, error, layer, oracle
from torch import Tensor
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from tracing import Tracer

from moe_fusion import FusionConfig, InferenceOnlyError, UnfinalizedMoEOutput
from moe_fusion.config import set_active_config
from moe_fusion.producers import grouped_mm_experts
from moe_fusion.producers.grouped_product import OP

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
# Relative, in the Frobenius norm: two roundings of the activations to their dtype, then the rows'.


@pytest.fixture
def group():
    make_fake_group(2)
    set_active_config(FusionConfig(token_ceiling=8))
    yield dist.group.WORLD
    set_active_config(None)


@pytest.mark.parametrize("tokens", [1, T, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_partial_is_the_oracles_on_either_side_of_the_ceiling(group, dtype, tokens):
    data = layer(dtype, tokens=tokens)
    output = grouped_mm_experts(*data.args())
    assert isinstance(output.routed, UnfinalizedMoEOutput) == (tokens <= 8)
    assert output.dtype == output.finalize().dtype == dtype
    assert error(output.finalize(), oracle(data)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", GATES)
def test_gated_activations(name):
    data = layer()
    got = grouped_mm_experts(*data.args(), activation=name).finalize()
    assert error(got, oracle(data, GATES[name])) <= TOLERANCE[torch.float32]


def test_an_ungated_activation_of_another_width():
    """relu(x) ** 2 of [E, I, H], as nemotron's experts."""
    data = layer()
    data.w13 = data.w13[:, :INNER].contiguous()
    got = grouped_mm_experts(*data.args(), activation=lambda x: torch.relu(x).square())
    want = torch.zeros(T, H, dtype=torch.float64)
    exact = data.to(torch.float64)
    for t in range(T):
        for k in range(K):
            e = data.ids[t, k]
            inner = torch.relu(exact.w13[e] @ exact.x[t]).square()
            want[t] += exact.weights[t, k] * (exact.w2[e] @ inner)
    assert error(got.finalize(), want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize("chosen", [0, 2, E - 1, -1])
def test_every_token_chooses_alike(group, chosen, top_k):
    """One expert has all rows, of each choice; -1 is nobody's."""
    data = layer(top_k=top_k)
    data.ids = torch.full_like(data.ids, chosen)
    got = grouped_mm_experts(*data.args()).finalize()
    if chosen < 0:
        assert torch.equal(got, torch.zeros(T, H))
    else:
        assert error(got, oracle(data)) <= TOLERANCE[torch.float32]


PLACES = {"whole": (slice(None), 0), "second half": (slice(E // 2, None), E // 2)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_closed_by_hand_it_is_fused_by_the_pass(group, dtype, place):
    experts, offset = PLACES[place]

    def function(x, ids, weights, w13, w2):
        output = grouped_mm_experts(
            x, ids, weights, w13[experts], w2[experts], local_expert_offset=offset
        )
        total = x + funcol.all_reduce(output.finalize(), "sum", "0")
        return torch.nn.functional.rms_norm(total, (H,), eps=1e-6), total

    data = layer(dtype)
    traced = Tracer(function, FusionConfig(token_ceiling=8))(*data.args())
    assert traced.report.fused == 1, str(traced.report)
    assert traced.report.sites[0].finalize == "permuted rows"
    mine = range(offset, E)
    total = data.x.double() + oracle(data, experts=mine)
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    for got, want in zip(traced.output, (norm, total), strict=True):
        assert error(got, want) <= TOLERANCE[dtype]


def test_without_a_group_the_partial_is_finished():
    data = layer()
    output = grouped_mm_experts(*data.args())
    assert isinstance(output.routed, Tensor)
    assert error(output.routed, oracle(data)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [5, 9])
def test_shared_expert_and_scale_are_counted_once(group, tokens):
    data = layer(tokens=tokens)
    output = grouped_mm_experts(
        *data.args(), shared_expert=lambda x: 3 * x, routed_scaling_factor=2.5, group=group
    )
    want = 2.5 * oracle(data) + 3 * data.x.double()
    assert error(output.finalize(), want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_experts_of_other_ranks_are_absent_and_their_rows_not_computed(group, dtype, id_dtype):
    """New memory holds NaN: what no product wrote is NaN still."""
    data = layer(dtype, tokens=8)
    total = torch.zeros(8, H, dtype=torch.float64)
    for rank in range(2):
        mine = range(2 * rank, 2 * rank + 2)
        output = grouped_mm_experts(
            data.x,
            data.ids.to(id_dtype),
            data.weights,
            data.w13[mine.start : mine.stop],
            data.w2[mine.start : mine.stop],
            local_expert_offset=mine.start,
        )
        rows, index = output.routed.gemm2_permuted, output.routed.expanded_idx_to_permuted_idx
        present = (data.ids >= mine.start) & (data.ids < mine.stop)
        assert torch.equal(index >= 0, present)
        assert torch.equal(index[present].sort().values, torch.arange(present.sum()).int())
        assert torch.isfinite(rows[: present.sum()]).all()
        assert torch.isnan(rows[present.sum() :]).all()
        partial = output.finalize()
        assert error(partial, oracle(data, experts=mine)) <= TOLERANCE[dtype]
        total += partial.double()
    assert error(total, oracle(data)) <= TOLERANCE[dtype]


def test_a_rank_without_any_chosen_expert(group):
    data = layer()
    data.ids = data.ids % 2
    output = grouped_mm_experts(*data.args(), local_expert_offset=E)
    assert (output.routed.expanded_idx_to_permuted_idx == -1).all()
    assert torch.equal(output.finalize(), torch.zeros(T, H))


@pytest.mark.parametrize("offset", [0, 2])
def test_no_tokens(group, offset):
    data = layer(tokens=0)
    output = grouped_mm_experts(*data.args(), local_expert_offset=offset, shared_expert=lambda x: x)
    assert isinstance(output.routed, UnfinalizedMoEOutput)
    assert output.routed.expanded_idx_to_permuted_idx.shape == (0, K)
    assert output.finalize().shape == (0, H)


def test_a_row_does_not_depend_on_its_batch(group):
    data = layer(torch.bfloat16, tokens=8)
    whole = grouped_mm_experts(*data.args()).finalize()
    for t in range(8):
        alone = grouped_mm_experts(
            data.x[t : t + 1], data.ids[t : t + 1], data.weights[t : t + 1], data.w13, data.w2
        )
        torch.testing.assert_close(alone.finalize(), whole[t : t + 1], rtol=2e-2, atol=2e-2)


@dataclass
class Recorded(TorchDispatchMode):
    """The ops that run, and the bytes of memory that each makes anew."""

    ops: list[str] = field(default_factory=list)
    new_bytes: list[int] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.new_bytes.append(leaf.untyped_storage().nbytes())
        return result


LAYOUTS = {
    "as documented": lambda w: w,
    "stored transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of padded rows": lambda w: torch.nn.functional.pad(w, (0, 8))[..., : w.shape[2]],
    "every second expert": lambda w: w.repeat_interleave(2, 0)[::2],
}
WAITS = ("_local_scalar_dense", "nonzero", "bincount", "unique")


def in_layout(data, layout):
    return data.x, data.ids, data.weights, LAYOUTS[layout](data.w13), LAYOUTS[layout](data.w2)


def assert_small_and_on_the_device(ops, new_bytes, dtype):
    """Two tokens' memory is far smaller than the 64 experts' weights."""
    assert sum("grouped_mm" in op for op in ops) == 2
    assert max(new_bytes) < 64 * H * INNER * dtype.itemsize / 4
    assert not [op for op in ops if any(wait in op for wait in WAITS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_read_in_place_and_nothing_waits_for_the_host(group, dtype, layout):
    data = layer(dtype, tokens=2, experts=64)
    args = in_layout(data, layout)
    with Recorded() as recorded:
        got = grouped_mm_experts(*args).finalize()
    assert error(got, oracle(data)) <= TOLERANCE[dtype]
    assert_small_and_on_the_device(recorded.ops, recorded.new_bytes, dtype)


def holds_tensor(node):
    return isinstance(node.meta.get("val"), Tensor)


def storage(node):
    return StorageWeakRef(node.meta["val"].untyped_storage())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nor_does_the_compiled_graph_copy_or_wait(group, dtype, layout):
    data = layer(dtype, tokens=2, experts=64)
    ops, new_bytes = [], []

    def record(graph):
        for node in (n for n in graph.nodes if n.op == "call_function"):
            ops.append(str(node.target))
            values = {storage(n) for n in node.all_input_nodes if holds_tensor(n)}
            if holds_tensor(node) and storage(node) not in values:
                new_bytes.append(node.meta["val"].untyped_storage().nbytes())

    def function(*args):
        return grouped_mm_experts(*args).finalize()

    got = Tracer(function, passes=(record,))(*in_layout(data, layout)).output
    assert error(got, oracle(data)) <= TOLERANCE[dtype]
    assert_small_and_on_the_device(ops, new_bytes, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_once_for_each_side_of_the_ceiling_without_a_break(group, dtype):
    kinds = []

    def function(x, ids, weights, w13, w2):
        output = grouped_mm_experts(x, ids, weights, w13, w2)
        return output, output.finalize()

    tracer = Tracer(function, dynamic=True)
    for tokens in (6, 12, 20, 5):
        data = layer(dtype, tokens=tokens, seed=tokens)
        for tensor in (data.w13, data.w2):
            for dim in range(3):
                torch._dynamo.mark_static(tensor, dim)
        torch._dynamo.mark_static(data.x, 1)
        torch._dynamo.mark_static(data.ids, 1)
        torch._dynamo.mark_static(data.weights, 1)
        output, partial = tracer(*data.args()).output
        kinds.append(isinstance(output.routed, UnfinalizedMoEOutput))
        assert error(partial, oracle(data)) <= TOLERANCE[dtype]
    assert kinds == [True, False, False, True]
    assert len(tracer.after) == 2


@pytest.mark.parametrize("ceiling", [8, 512])
def test_a_declared_range_of_tokens_is_served_by_one_graph(group, ceiling):
    """A guard at the ceiling would contradict ``mark_dynamic(max=64)``."""
    set_active_config(FusionConfig(token_ceiling=ceiling))

    def function(x, ids, weights, w13, w2):
        output = grouped_mm_experts(x, ids, weights, w13, w2)
        return output, output.finalize()

    tracer = Tracer(function)
    for tokens in (6, 40, 9):
        data = layer(tokens=tokens, seed=tokens)
        for tensor in (data.x, data.ids, data.weights):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
        output, partial = tracer(*data.args()).output
        assert isinstance(output.routed, UnfinalizedMoEOutput)
        assert error(partial, oracle(data)) <= TOLERANCE[torch.float32]
    assert len(tracer.after) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_the_grouped_product(dtype):
    data = layer(dtype)
    ends = torch.tensor([2, 2, 5, T], dtype=torch.int32)
    results = opcheck(OP, (data.x, data.w13.transpose(1, 2), ends))
    assert set(results.values()) == {"SUCCESS"}
    got = OP(data.x, data.w13.transpose(1, 2), ends).double()
    expert = torch.tensor([0, 0, 2, 2, 2, 3])
    want = torch.einsum("rnh,rh->rn", data.w13.double()[expert], data.x.double())
    assert error(got, want) <= TOLERANCE[dtype]


def test_backward_through_the_op_is_an_error():
    data = layer()
    data.w2.requires_grad_()
    output = grouped_mm_experts(*data.args())
    with pytest.raises(InferenceOnlyError, match="moe_fusion::grouped_mm is for inference only"):
        output.finalize().sum().backward()
