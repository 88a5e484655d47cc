"""Every spelling in every dtype and shape mode: what is found, with the right numbers.

Counts and numbers of each cell are those of a fake group, whose reduction multiplies by two; then
each row runs in one of the cells on two real ranks, whose inputs differ.
"""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, doubled
from distributed import run_ranks
from shared_places import PLACES
from table import (
    DTYPES,
    MATCHED_BATCHES,
    MODES,
    REFUSED_BATCHES,
    assert_found,
    data_for,
    run_batches,
    together,
)
from tracing import trace

RANKS = 2
SLACK = 1.05  # a small tensor's error moves with one rounding more or less of a few values
CELLS = [(dtype, mode) for dtype in DTYPES for mode in MODES]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(len(MATCHED_BATCHES)))
def test_matched(place, dtype, mode):
    batch = MATCHED_BATCHES[place]
    data = data_for(batch, dtype, mode)
    ranks = RANKS if all(row.doubles_in(dtype) for row in batch) else 1
    with doubled(ranks):
        traced = trace(together(batch), *data.args(), dynamic=True if mode == "dynamic" else None)
    assert_found(batch, dtype, traced.report)
    for row, output in zip(batch, traced.output, strict=True):
        assert_exact(output, row.function, data, ranks, slack=SLACK)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(len(REFUSED_BATCHES)))
def test_refused(place, dtype, mode):
    batch = REFUSED_BATCHES[place]
    data = data_for(batch, dtype, mode)
    traced = trace(together(batch), *data.args(), dynamic=True if mode == "dynamic" else None)
    assert_found(batch, dtype, traced.report)
    assert traced.before == traced.after or traced.report.fused
    for row, output in zip(batch, traced.output, strict=True):
        if mode == "static" and row.found_in(dtype).refused:
            unfused = row.function(*data.args())
            torch.testing.assert_close(output, unfused, equal_nan=True)


def chosen():
    """For each batch one cell in turn; for the places of a shared expert three."""
    for place, batch in enumerate(MATCHED_BATCHES):
        count = 3 if batch[0].name in PLACES else 1
        for step in range(place, place + count):
            yield (place, *CELLS[4 * step % len(CELLS)])


@pytest.fixture(scope="module")
def on_two_ranks():
    cells = list(chosen())
    return dict(zip(cells, zip(*run_ranks(RANKS, run_batches, cells), strict=True), strict=True))


@pytest.mark.parametrize("cell", list(chosen()), ids=str)
def test_numbers_on_two_ranks_whose_inputs_differ(on_two_ranks, cell):
    """A partial taken for a replicated addend, or the other way round, shows in the sum."""
    place, dtype, _ = cell
    batch = MATCHED_BATCHES[place]
    for rank in on_two_ranks[cell]:
        assert_found(batch, dtype, rank["report"])
        for row, errors, unfused in zip(batch, rank["errors"], rank["unfused"], strict=True):
            assert all(a <= SLACK * b + 1e-6 for a, b in zip(errors, unfused, strict=True)), row
    for row, *outputs in zip(batch, *(rank["outputs"] for rank in on_two_ranks[cell]), strict=True):
        alike = [torch.equal(*each) for each in zip(*outputs, strict=True)]
        assert alike == [row.replicated] * len(alike), row


def test_the_cells_on_two_ranks_are_of_every_kind():
    assert {(dtype, mode) for _, dtype, mode in chosen()} == set(CELLS)
    assert {place for place, *_ in chosen()} == set(range(len(MATCHED_BATCHES)))
