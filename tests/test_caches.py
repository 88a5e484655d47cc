"""Compile caches on disk, across processes: the right graph is served, and only that one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cached_compiles
import pytest

ROUNDING = 0.07  # the unfused graph rounds the norm before the weight
FUSES_BELOW_THE_CEILING = [1, 0]  # calls of the op, for each of the two sizes
NEVER_FUSES = [0, 0]
EXPECTED = {
    "usual": FUSES_BELOW_THE_CEILING,
    "another ceiling": NEVER_FUSES,
    "another selection of tails": NEVER_FUSES,
    "another group size": FUSES_BELOW_THE_CEILING,
    "several hosts": NEVER_FUSES,
}


def in_a_fresh_process(folder, settings):
    root = Path(__file__).parent
    path = os.pathsep.join([str(root.parent), str(root)])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, cached_compiles.__file__, *settings],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What two processes did, the second with the caches of the first and one setting more."""
    folder = tmp_path_factory.mktemp("caches")
    first = in_a_fresh_process(folder, EXPECTED)
    return first, in_a_fresh_process(folder, [*EXPECTED, "another package"])


@pytest.mark.parametrize("name", EXPECTED)
def test_each_setting_has_graphs_of_its_own(runs, name):
    outcome = runs[0][name]
    graphs = len(set(EXPECTED[name]))
    assert (outcome["hits"], outcome["bypassed"]) == (0, 0)
    assert outcome["seen"] == outcome["misses"] == graphs
    assert outcome["fused"] == sum(EXPECTED[name])
    assert [calls for calls, _ in outcome["served"]] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_same_setting_is_a_hit_in_another_process(runs, name):
    """The pass does not run, and each size gets the graph that is right for it."""
    outcome = runs[1][name]
    assert outcome["hits"] == runs[0][name]["misses"]
    assert (outcome["misses"], outcome["bypassed"]) == (0, 0)
    assert (outcome["seen"], outcome["fused"]) == (0, 0)
    assert [calls for calls, _ in outcome["served"]] == EXPECTED[name]


def test_another_package_is_another_graph(runs):
    outcome = runs[1]["another package"]
    assert (outcome["hits"], outcome["misses"]) == (0, 2)
    assert (outcome["seen"], outcome["fused"]) == (2, 1)
    assert [calls for calls, _ in outcome["served"]] == FUSES_BELOW_THE_CEILING


def test_cached_or_not_the_numbers_are_right(runs):
    errors = [error for run in runs for outcome in run.values() for _, error in outcome["served"]]
    assert len(errors) == 2 * (2 * len(EXPECTED) + 1)
    assert max(errors) <= ROUNDING
