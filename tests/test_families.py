"""Every mixture-of-experts family of transformers that builds small, as its own plans shard it.

A model of one layer is traced with fake tensors over a fake group of two. CI traces half of the
families, chosen so that every kind of tail and every refusal is there, each in half precision with
symbolic shapes and every sixth in fp32 with static ones, and in one way of computing and sharding
the experts; ``ALL_FAMILIES=1`` traces all of them in every way.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter

import pytest
from families import (
    EXPERT_PARALLEL_ONLY,
    EXPERTS,
    FAMILIES,
    FULLY_DYNAMIC,
    MARKED,
    OWN,
    STATIC,
    UNTRACED,
    fields_of,
)

import moe_fusion
from moe_fusion.cli import models
from moe_fusion.cli.explain import CPU, fake_group, fake_tensors, trace
from moe_fusion.cli.models import ModelSpec, require_transformers

FORMS = {"grouped_mm": "permuted rows", "batched_mm": "token-major rows"}
ALL = os.environ.get("ALL_FAMILIES") == "1"


def experts_of(name):
    """The ways of computing and sharding this family's experts."""
    if name in EXPERT_PARALLEL_ONLY:
        return [way for way in EXPERTS if way[1]]
    return EXPERTS if FAMILIES[name].experts else EXPERTS[:1]


def chosen(name, place):
    """The cases of one family: ((experts, expert parallel), (dtype, shapes))."""
    ways = experts_of(name)
    if ALL:
        every = itertools.product(models.DTYPES, ("static", "marked", "dynamic"))
        return itertools.product(ways, every)
    symbolic = FULLY_DYNAMIC.get(name, MARKED[place % len(MARKED)])
    found = [symbolic, STATIC[place % len(STATIC)]]
    return [(ways[(place + i) % len(ways)], each) for i, each in enumerate(found) if each]


def cases():
    names = [name for name, family in FAMILIES.items() if ALL or family.ci]
    for place, name in enumerate(names):
        for (experts, expert_parallel), (dtype, shapes) in chosen(name, place):
            label = f"{name}-{experts}{'-expert-parallel' if expert_parallel else ''}"
            yield pytest.param(
                name, experts, expert_parallel, dtype, shapes, id=f"{label}-{dtype}-{shapes}"
            )


def found(tmp_path, name, *, shapes="static", **options):
    known = require_transformers().CONFIG_MAPPING[name]()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **fields_of(name, known)}))
    spec = ModelSpec(config=path, dynamic=shapes == "marked", **options)
    with fake_group(2), fake_tensors():
        built = models.build(spec, CPU)
        if shapes == "dynamic":
            ids = built.kwargs["input_ids"].view(2, -1)  # a size of one is never symbolic
            built = dataclasses.replace(built, kwargs={**built.kwargs, "input_ids": ids})
        with moe_fusion.fusing() as report:
            trace(built, dynamic=True if shapes == "dynamic" else None)
    return report


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "experts", "expert_parallel", "dtype", "shapes"), list(cases()))
def test_a_family(tmp_path, name, experts, expert_parallel, dtype, shapes):
    family = FAMILIES[name]
    report = found(
        tmp_path,
        name,
        experts=experts if family.experts else None,
        expert_parallel=expert_parallel,
        dtype=dtype,
        shapes=shapes,
    )
    assert report.graphs == 1
    norm = family.norm if dtype == "fp32" else family.half
    shared, refused = family.found(dtype, shapes)
    assert dict(report.refusals) == refused
    rows = family.rows or FORMS[experts]
    expected = Counter({("finalized", "none", norm): family.plain})
    if shared is not None:
        expected[rows, shared, norm] += 1
    assert Counter((s.finalize, s.shared, s.norm) for s in report.sites) == +expected
    symbolic = [not site.num_tokens.isdigit() for site in report.sites]
    assert symbolic == [shapes != "static"] * report.fused
    left = report.all_reduces_before - report.all_reduces_after
    assert left == report.fused + (shared == OWN)


@pytest.mark.parametrize("name", UNTRACED)
def test_a_family_that_cannot_be_traced(tmp_path, name):
    """When one can be, it belongs into the table."""
    _, message = UNTRACED[name]
    with pytest.raises(Exception, match=message):
        found(tmp_path, name, dtype="fp32")
