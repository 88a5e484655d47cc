"""The rewritten graph: order, metadata, leftovers, and what other passes see."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
from tracing import CEILING, Tracer, trace

from moe_fusion import FusionConfig, MoEFusionPass, reference
from moe_fusion.contract import TailArguments
from moe_fusion.op import OP

pytestmark = pytest.mark.usefixtures("fake_group")

finalize, reduce, norm = spellings.where_masked, spellings.functional, spellings.norm_a


def plain_tail(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduce(finalize(rows, weights, index) * 2.5 + shared)
    return norm(total, norm_weight), total


def expected(data, *, scale=2.5, shared=True, eps=1e-6):
    args = TailArguments(
        routed=data.rows,
        expert_weights=data.weights,
        expanded_idx_to_permuted_idx=data.index,
        shared_output=data.shared if shared else None,
        residual=data.residual,
        norm_weight=data.norm_weight,
        eps=eps,
        routed_scaling_factor=scale,
    )
    return reference.tail([args])[0]


class Spy:
    """A pass that keeps the graph it saw."""

    def __call__(self, graph):
        self.nodes = list(graph.nodes)


def seen_after(function, data):
    """The nodes of the rewritten graph, and the outputs."""
    fusion, spy = MoEFusionPass(FusionConfig(token_ceiling=CEILING)), Spy()
    tracer = Tracer(function, passes=(fusion, spy))
    output = tracer(*data.args()).output
    return fusion.report, spy.nodes, output


def test_the_residual_is_computed_after_the_all_reduce():
    def function(rows, weights, index, shared, residual, norm_weight):
        y = reduce(finalize(rows, weights, index) * 2.5 + shared)
        total = (residual.sin() * 0 + residual) + y
        return norm(total, norm_weight), total

    data = inputs.make(missing=True)
    traced = trace(function, *data.args())
    assert traced.report.fused == 1
    for got, want in zip(traced.output, expected(data), strict=True):
        assert torch.equal(got, want)


def test_the_weight_is_computed_after_the_residual_sum():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index) * 2.5 + shared)
        early = total.cos()
        return norm(total, norm_weight.sin() * 0 + norm_weight), total, early

    data = inputs.make(missing=True)
    traced = trace(function, *data.args())
    assert traced.report.fused == 1
    want = expected(data)
    for got, right in zip(traced.output, (*want, want[1].cos()), strict=True):
        assert torch.equal(got, right)


def test_other_readers_of_the_residual_sum_read_the_op():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index) * 2.5 + shared)
        return norm(total, norm_weight), total.float() * 2, total - 1

    data = inputs.make(missing=True)
    report, nodes, output = seen_after(function, data)
    assert report.fused == 1
    normed, total = expected(data)
    for got, want in zip(output, (normed, total.float() * 2, total - 1), strict=True):
        assert torch.equal(got, want)
    assert sum(node.target is OP for node in nodes) == 1


def test_nothing_dead_is_left_and_every_node_has_its_value():
    report, nodes, _ = seen_after(plain_tail, inputs.make())
    assert report.fused == 1
    names = {str(node.target) for node in nodes}
    assert not any("c10d" in name or "rsqrt" in name or "index" in name for name in names)
    for node in nodes:
        if node.op == "call_function":
            assert node.users or node.is_impure()
            value = node.meta["val"]
            assert isinstance(value, (tuple, torch.Tensor))


def test_the_op_carries_the_source_line_of_the_tail():
    report, nodes, _ = seen_after(plain_tail, inputs.make())
    (call,) = [node for node in nodes if node.target is OP]
    assert "test_rewrite.py" in call.meta["stack_trace"]
    path, _, line = report.sites[0].source.rpartition(":")
    assert path.endswith("test_rewrite.py")
    assert int(line) > 0


def test_running_the_pass_twice_changes_nothing_more():
    first, second = (MoEFusionPass(FusionConfig(token_ceiling=CEILING)) for _ in range(2))
    data = inputs.make(missing=True)
    output = Tracer(plain_tail, passes=(first, second))(*data.args()).output
    assert (first.report.fused, second.report.fused) == (1, 0)
    assert second.report.all_reduces_before == 0
    for got, want in zip(output, expected(data), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("ours_first", [True, False])
def test_another_pass_before_or_after(ours_first):
    """Another pass that swaps the operands of every add leaves count and numbers as they are."""

    def swap(graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.add.Tensor and isinstance(node.args[1], torch.fx.Node):
                node.args = node.args[::-1]

    ours = MoEFusionPass(FusionConfig(token_ceiling=CEILING))
    order = (ours, swap) if ours_first else (swap, ours)
    data = inputs.make(missing=True)
    output = Tracer(plain_tail, passes=order)(*data.args()).output
    assert ours.report.fused == 1
    for got, want in zip(output, expected(data), strict=True):
        assert torch.equal(got, want)


def test_two_layers_with_different_eps():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(finalize(rows, weights, index) * 2.5 + shared)
        hidden = norm(total, norm_weight, 1e-2)
        total = total + reduce(hidden.sin())
        return norm(total, norm_weight, 1e-5), total

    data = inputs.make(missing=True)
    traced = trace(function, *data.args())
    assert [site.finalize for site in traced.report.sites] == ["permuted rows", "finalized"]
    assert ", 0.01, " in traced.after[0]
    assert ", 1e-05, " in traced.after[0]
    hidden, total = expected(data, eps=1e-2)
    args = TailArguments(
        routed=hidden.sin(), residual=total, norm_weight=data.norm_weight, eps=1e-5
    )
    for got, want in zip(traced.output, reference.tail([args])[0], strict=True):
        assert torch.equal(got, want)


def test_negative_indices_of_an_unmasked_gather_count_from_the_end():
    """``rows[-1]`` is the last row in torch; -1 means absent only where the graph masks it."""

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(spellings.unmasked(rows, weights, index))
        return norm(total, norm_weight), total

    data = inputs.make(torch.float32)
    data.rows = torch.nan_to_num(data.rows, nan=3.0)
    data.index[0, 0], data.index[3, 1] = -1, -2
    traced = trace(function, *data.args())
    assert traced.report.fused == 1
    for got, want in zip(traced.output, function(*data.args()), strict=True):
        torch.testing.assert_close(got, want)


def test_a_weight_of_zero_on_a_row_that_holds_infinity_is_nan():
    data = inputs.make(torch.float32)
    data.rows[data.index[2, 0]] = float("inf")
    data.weights[2, 0] = 0.0
    traced = trace(plain_tail, *data.args())
    assert traced.report.fused == 1
    assert torch.isnan(traced.output[1][2]).all()
    assert torch.isfinite(traced.output[1][[0, 1, 3, 4, 5]]).all()


def test_generated_code_gives_the_same_numbers():
    """Through Inductor's own code generation, in both overloads of the op."""
    data = inputs.make(missing=True)
    config = FusionConfig(token_ceiling=CEILING)
    import moe_fusion

    with (
        torch._inductor.config.patch(force_disable_caches=True),
        moe_fusion.fusing(config) as report,
        torch.no_grad(),
    ):
        output = torch.compile(plain_tail, fullgraph=True)(*data.args())
    assert report.fused == 1
    for got, want in zip(output, expected(data), strict=True):
        assert torch.equal(got, want)


def test_eps_as_an_input_of_the_graph():
    """Under ``dynamic=True`` a module's float is a 0-d input; the op reads it, for any value."""

    class Module(torch.nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.eps = eps

        def forward(self, rows, weights, index, shared, residual, norm_weight):
            total = residual + reduce(finalize(rows, weights, index) * 2.5 + shared)
            return norm(total, norm_weight, self.eps), total

    import moe_fusion

    data = inputs.make(tokens=10, missing=True)
    for tensor in data.args():
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        moe_fusion.fusing(FusionConfig(token_ceiling=CEILING), render=True) as report,
        torch.no_grad(),
    ):
        model = torch.compile(Module(1e-2), fullgraph=True, dynamic=True)
        for eps in (1e-2, 0.5):
            model.eps = eps
            for got, want in zip(model(*data.args()), expected(data, eps=eps), strict=True):
                assert torch.equal(got, want)
    assert report.fused == 1
    assert "eps_tensor" in report.sites[0].after
