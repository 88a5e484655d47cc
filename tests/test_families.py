"""Every mixture-of-experts family of transformers that builds small, as its own plans shard it.

A model of one layer is traced with fake tensors over a fake group of two. CI traces half of the
families, chosen so that every kind of tail and every refusal is there, each in one way of computing
and sharding the experts; ``ALL_FAMILIES=1`` traces all of them in every way.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from families import EXPERT_PARALLEL_ONLY, FAMILIES, MODES, fields_of

from moe_fusion.cli.explain import explain
from moe_fusion.cli.models import ModelSpec, require_transformers

FORMS = {"grouped_mm": "permuted rows", "batched_mm": "token-major rows"}
ALL = os.environ.get("ALL_FAMILIES") == "1"


def cases():
    chosen = [name for name, family in FAMILIES.items() if ALL or family.ci]
    for place, name in enumerate(chosen):
        for turn, (experts, expert_parallel) in enumerate(MODES):
            if name in EXPERT_PARALLEL_ONLY and not expert_parallel:
                continue
            if not FAMILIES[name].experts and turn > 0:
                continue
            only = not FAMILIES[name].experts or name in EXPERT_PARALLEL_ONLY
            if ALL or only or turn == place % len(MODES):
                label = f"{name}-{experts}{'-expert-parallel' if expert_parallel else ''}"
                yield pytest.param(name, experts, expert_parallel, id=label)


def found(tmp_path, name, experts, *, expert_parallel):
    known = require_transformers().CONFIG_MAPPING[name]()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **fields_of(name, known)}))
    spec = ModelSpec(
        config=path,
        dtype="fp32",
        experts=experts if FAMILIES[name].experts else None,
        expert_parallel=expert_parallel,
    )
    return explain(spec, 2).report


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "experts", "expert_parallel"), list(cases()))
def test_a_family(tmp_path, name, experts, expert_parallel):
    family = FAMILIES[name]
    report = found(tmp_path, name, experts, expert_parallel=expert_parallel)
    assert report["graphs"] == 1
    assert report["refusals"] == family.refused
    rows = family.rows or FORMS[experts]
    expected = Counter({("finalized", "none", family.norm): family.plain})
    if family.shared is not None:
        expected[rows, family.shared, family.norm] += 1
    sites = Counter((s["finalize"], s["shared"], s["norm"]) for s in report["sites"])
    assert sites == +expected
    left = report["all_reduces_before"] - report["all_reduces_after"]
    assert left == report["fused"] + (family.shared == "its own all_reduce")
