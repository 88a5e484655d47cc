"""The grouped_mm producer and the tail on a GPU: numbers, no waiting for the host, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from moe_layers import H, error, layer, oracle

from moe_fusion import MoETailRMSNorm, reference
from moe_fusion.contract import TailArguments
from moe_fusion.producers import grouped_mm_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(120),
]
EPS = 1e-6
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}


def on_gpu(data):
    return [tensor.cuda() for tensor in data.args()]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("tokens", [0, 1, 6, 300])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_numbers(dtype, tokens, first):
    data = layer(dtype, tokens=tokens)
    x, ids, weights, w13, w2 = on_gpu(data)
    local = slice(first, first + 2)
    output = grouped_mm_experts(x, ids, weights, w13[local], w2[local], local_expert_offset=first)
    want = oracle(data, experts=range(first, first + 2))
    assert output.finalize().shape == (tokens, H)
    if tokens:
        assert error(output.finalize().cpu(), want) <= TOLERANCE[dtype]


def has_own_kernel():
    """Elsewhere torch's grouped_mm reads the offsets on the host."""
    return torch.cuda.get_device_capability()[0] in {9, 10}


def tail(norm, x, ids, weights, w13, w2):
    return norm(grouped_mm_experts(x, ids, weights, w13, w2), x)


def expected(data):
    """The tail of one rank over the oracle's partial."""
    partial = oracle(data).to(data.x.dtype)
    args = TailArguments(partial, residual=data.x, norm_weight=torch.ones(H), eps=EPS)
    return reference.tail([args], torch.float64)[0]


@pytest.mark.skipif("not torch.cuda.is_available() or not has_own_kernel()")
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_waits_for_the_host_and_a_graph_replays_new_routing(compiled):
    data, other = layer(torch.bfloat16), layer(torch.bfloat16, seed=1)
    norm = MoETailRMSNorm(H, EPS, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(tail, fullgraph=True) if compiled else tail
    args = on_gpu(data)
    with torch.no_grad():
        run(norm, *args)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(norm, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(norm, *args)
    for value, want in zip(got, expected(data), strict=True):
        assert error(value.cpu(), want) <= TOLERANCE[torch.bfloat16]
    for tensor, new in zip(args, other.args(), strict=True):
        tensor.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for value, want in zip(captured, expected(other), strict=True):
        assert error(value.cpu(), want) <= TOLERANCE[torch.bfloat16]
