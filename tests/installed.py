"""A small tail that is compiled with what is installed, and passes of others in the same slot."""

from __future__ import annotations

import inputs
import spellings
import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from moe_fusion import FusionConfig, reference
from moe_fusion.contract import TailArguments

CONFIG = FusionConfig(token_ceiling=64)


OTHER = FusionConfig(token_ceiling=8)


def slot():
    return inductor_config.post_grad_custom_pre_pass


class Counting(CustomGraphPass):
    """Somebody else's pass: counts its calls and the all_reduces that it saw."""

    identity = b"counting"

    def __init__(self):
        self.all_reduces = []

    def __call__(self, graph):
        names = [str(node.target) for node in graph.nodes]
        self.all_reduces.append(sum("all_reduce" in name for name in names if "c10d" in name))

    def uuid(self):
        return self.identity


class WithoutIdentity(Counting):
    identity = None


def tail(rows, residual, norm_weight):
    total = residual + spellings.functional(rows)
    return spellings.norm_a(total, norm_weight), total


def tensors(tokens=16, rank=0):
    data = inputs.make(tokens=tokens, rank=rank)
    return data.shared, data.residual, data.norm_weight


def settings(*, cached=False):
    """Without generated kernels: the C++ compiler takes longer than all the rest."""
    return inductor_config.patch(force_disable_caches=not cached, fallback_by_default=True)


def compile_and_check(function=tail, tokens=16, *, cached=False):
    """Compile ``function`` afresh, run it, and compare the numbers with the reference."""
    torch._dynamo.reset()
    rows, residual, norm_weight = tensors(tokens)
    with torch.no_grad(), settings(cached=cached):
        outputs = torch.compile(function, fullgraph=True)(rows, residual, norm_weight)
    args = TailArguments(rows, residual=residual, norm_weight=norm_weight, eps=spellings.EPS)
    wanted = reference.tail([args])[0]
    # the unfused graph rounds its norm before the weight
    for got, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-5)
    return outputs
