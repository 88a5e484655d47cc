"""What is left alone: each with its reason, the graph untouched, the numbers those of eager."""

from __future__ import annotations

import inputs
import pytest
import spellings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from checks import assert_untouched
from conftest import make_fake_group
from refused_tails import reduced
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch_versions import NEW_TORCH_ONLY
from tracing import CEILING, trace

from moe_fusion import FusionConfig, MoEFusionPass, UnfusedTailError

finalize = spellings.where_masked
reduce = spellings.functional
norm = spellings.norm_a


def plain_tail(rows, weights, index, shared, residual, norm_weight):
    total = residual + reduced(rows, weights, index)
    return norm(total, norm_weight), total


@pytest.mark.usefixtures("fake_group")
def test_the_token_ceiling():
    config = FusionConfig(token_ceiling=inputs.T - 1)
    reason = f"token ceiling: expected at most {inputs.T - 1} tokens, got {inputs.T}"
    assert_untouched(plain_tail, reason, inputs.make(), config)


@pytest.mark.usefixtures("fake_group")
def test_a_kind_that_the_configuration_leaves_out():
    reason = "the configuration does not fuse unfinalized tails: fuse=('finalized',)"
    assert_untouched(plain_tail, reason, inputs.make(), FusionConfig(fuse=("finalized",)))


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_world_sizes_without_a_kernel(world_size):
    make_fake_group(world_size)
    reason = f"world size: expected one of (2, 4, 8), got {world_size}"
    assert_untouched(plain_tail, reason, inputs.make(), FusionConfig(token_ceiling=CEILING))


@pytest.mark.usefixtures("fake_group")
def test_a_hidden_size_that_no_vector_load_divides():
    reason = "hidden size: expected a multiple of 8 in [16, 16384], got 20"
    assert_untouched(plain_tail, reason, inputs.make(hidden=20))


@pytest.mark.usefixtures("fake_group")
def test_more_experts_a_token_than_are_tested():
    reason = "top-k: expected 1 to 32 experts, got 33"
    assert_untouched(plain_tail, reason, inputs.make(top_k=33), FusionConfig(token_ceiling=CEILING))


@pytest.mark.usefixtures("fake_group")
def test_two_chained_all_reduces():
    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(reduced(rows, weights, index).view(-1, inputs.H))
        return norm(total, norm_weight), total

    assert_untouched(function, "two all_reduces are chained", inputs.make(), count=2)


@pytest.mark.usefixtures("fake_group")
def test_a_coalesced_all_reduce():
    def function(rows, weights, index, shared, residual, norm_weight):
        parts = [finalize(rows, weights, index), shared]
        first, second = funcol.all_reduce_coalesced(parts, "sum", "0")
        total = residual + first
        return norm(total, norm_weight), second * 2

    assert_untouched(function, "the all_reduce is coalesced with others", inputs.make())


@NEW_TORCH_ONLY
@pytest.mark.usefixtures("fake_group")
def test_a_group_that_a_mesh_hands_over_in_each_call():
    """``compile_on_one_rank``: another rank's mesh may hold a group of another name."""
    mesh = init_device_mesh("cpu", (2,))

    def function(rows, weights, index, shared, residual, norm_weight):
        total = residual + funcol.all_reduce(finalize(rows, weights, index), "sum", mesh)
        return norm(total, norm_weight), total

    reason = (
        "the group is computed in the graph by _dtensor.mesh_get_process_group: "
        "expected its name or the group itself"
    )
    with dist.config.patch(compile_on_one_rank=True):
        assert_untouched(function, reason, inputs.make())


class Foreign:
    """What a graph module may hold in the place of a group."""


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("held", [Foreign(), None], ids=["not a group", "nothing"])
def test_an_attribute_that_holds_no_group(held):
    gm = make_fx(plain_tail, tracing_mode="fake")(*inputs.make().args())
    (node,) = [n for n in gm.graph.nodes if "all_reduce" in str(n.target)]
    gm.held = held
    with gm.graph.inserting_before(node):
        node.update_arg(2, gm.graph.create_node("get_attr", "held"))
    before = str(gm.graph)
    fusion = MoEFusionPass()
    fusion(gm.graph)
    assert str(gm.graph) == before
    reason = (
        f"the graph's attribute held is {type(held).__name__}: "
        "expected a process group of this process"
    )
    assert dict(fusion.report.refusals) == {reason: 1}


@pytest.mark.usefixtures("fake_group")
def test_a_graph_with_a_backward():
    data = inputs.make(torch.float32)
    data.residual.requires_grad_()
    torch._dynamo.reset()
    fusion = MoEFusionPass(FusionConfig(token_ceiling=CEILING))
    compiled = torch.compile(plain_tail, options={"post_grad_custom_pre_pass": fusion})
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(*data.args())[0].sum().backward()
    grad, data.residual.grad = data.residual.grad, None
    plain_tail(*data.args())[0].sum().backward()
    torch.testing.assert_close(grad, data.residual.grad)
    assert fusion.report.graphs == 2
    assert dict(fusion.report.refusals) == {"the graph has a backward: inference only": 1}


@pytest.mark.usefixtures("fake_group")
def test_a_group_of_another_process():
    def function(rows, weights, index, shared, residual, norm_weight):
        summed = torch.ops._c10d_functional.all_reduce(finalize(rows, weights, index), "sum", "77")
        total = residual + torch.ops._c10d_functional.wait_tensor(summed)
        return norm(total, norm_weight), total

    gm = make_fx(function, tracing_mode="fake")(*inputs.make().args())
    before = str(gm.graph)
    fusion = MoEFusionPass()
    fusion(gm.graph)
    assert str(gm.graph) == before
    reason = "group_name: expected a process group of this process, one of ['0'], got '77'"
    assert dict(fusion.report.refusals) == {reason: 1}


@pytest.mark.usefixtures("fake_group")
def test_strict_raises_for_a_moe_tail_only():
    config = FusionConfig(token_ceiling=1, strict=True)
    with pytest.raises(Exception, match="expected at most 1 tokens, got 6") as caught:
        trace(plain_tail, *inputs.make().args(), config=config)
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, UnfusedTailError)

    def attention(rows, weights, index, shared, residual, norm_weight):
        total = residual + reduce(shared)
        return norm(total, norm_weight), total

    traced = trace(attention, *inputs.make().args(), config=config)
    assert traced.report.refusals.total() == 1
    assert torch.equal(traced.output[1], attention(*inputs.make().args())[1])
    assert dist.is_initialized()
