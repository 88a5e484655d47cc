"""Compiles one model under several settings, with the caches on disk: run as a fresh process.

Prints one JSON object: for each setting what the pass saw and fused, what the caches say, and for
each number of tokens whether the served graph called the op, and the error of its outputs.
"""

from __future__ import annotations

import json
import os
import sys

import inputs
import spellings
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from conftest import make_fake_group
from torch._dynamo.utils import counters

import moe_fusion
import moe_fusion.op
from moe_fusion import FusionConfig, reference
from moe_fusion.passes import identity

SIZES = (4, 24)  # tokens, on both sides of the usual ceiling
SETTINGS = {
    "usual": {},
    "another ceiling": {"token_ceiling": 2},
    "another selection of tails": {"fuse": ("unfinalized",)},
    "another group size": {"world_size": 4},
    "several hosts": {"hosts": 2},
    "another package": {"sources": "another"},
}


def model(rows, residual, weight):
    total = residual + spellings.functional(rows)
    return spellings.norm_a(total, weight), total


class _Calls:
    """How often the op's kernel ran."""

    def __init__(self) -> None:
        self.count, self.partial = 0, reference.partial
        moe_fusion.op.reference.partial = self

    def __call__(self, args):
        self.count += 1
        return self.partial(args)


def compile_under(calls, *, world_size=2, hosts=1, sources=None, **fields):
    """Compile once for any size and call it for each of ``SIZES``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    counters.clear()
    make_fake_group(world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // hosts)
    versions = identity.versions
    if sources is not None:
        identity.versions = lambda: {**versions(), "moe_fusion sources": sources}
    served = []
    config = FusionConfig(**{"token_ceiling": 16} | fields)
    with (
        torch.no_grad(),
        inductor_config.patch(fallback_by_default=True),
        moe_fusion.fusing(config) as report,
    ):
        compiled = torch.compile(model, fullgraph=True)
        for tokens in SIZES:
            data = inputs.make(tokens=tokens)
            args = (data.shared, data.residual, data.norm_weight)
            for tensor in args[:2]:
                torch._dynamo.mark_dynamic(tensor, 0)
            before = calls.count
            got = compiled(*args)
            pairs = zip(got, model(*args), strict=True)
            errors = [(g.double() - w.double()).abs().max().item() for g, w in pairs]
            served.append((calls.count - before, max(errors)))
    identity.versions = versions
    return {
        "seen": report.graphs,
        "fused": report.fused,
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "bypassed": counters["inductor"]["fxgraph_cache_bypass"],
        "served": served,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    counter = _Calls()
    json.dump({name: compile_under(counter, **SETTINGS[name]) for name in chosen}, sys.stdout)
