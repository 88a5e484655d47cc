"""Faults that were found in what is taken for the routing: weights, map and mask."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused
from regressions import (
    H,
    K,
    T,
    each,
    tail,
)

pytestmark = pytest.mark.usefixtures("fake_group")


BROADCAST_PARTIALS = {
    "over K": (
        lambda r, w, m: (
            r[:T].unsqueeze(1) * torch.full((T, K, 1), 0.5, dtype=r.dtype) * w.unsqueeze(-1)
        ).sum(1),
        "token-major rows",
    ),
    "over K, unweighted rows": (
        lambda r, w, m: (r[:T].unsqueeze(1) * w.unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "weights over K": (
        lambda r, w, m: (r[: T * K].view(T, K, H) * w[:, :1].unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "weights over T": (
        lambda r, w, m: (r[: T * K].view(T, K, H) * w[:1].unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "map over K": (
        lambda r, w, m: (r[m[:, :1]] * w.unsqueeze(-1)).sum(1),
        "finalized",
    ),
}


@each(BROADCAST_PARTIALS)
def test_rows_or_routing_that_broadcast_are_not_passed(case):
    """Rows that a factor spreads over K were taken for T * K token-major rows: ValueError."""
    partial, form = BROADCAST_PARTIALS[case]
    assert_fused(tail(partial), inputs.make(), finalize=form)


def _longer_weights(rows, weights, index):
    order = torch.sort(index.flatten()).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    scores = torch.cat([weights, weights]).flatten()[order]
    return (rows[: order.numel()] * scores.unsqueeze(-1))[inverse].view(*index.shape, -1).sum(1)


def test_weights_of_more_entries_than_the_permutation_are_left_to_the_graph():
    """The sorted weights were looked up in a tensor of 2 * T * K entries: ValueError."""
    assert_fused(tail(_longer_weights), inputs.make(), finalize="finalized")


FACTORS = {
    "mask": (
        lambda rows, w, m: (rows[m.clamp_min(0)] * (m >= 0).unsqueeze(-1)).sum(1),
        "finalized",
    ),
    "mask, then weight": (
        lambda rows, w, m: (rows[m.clamp_min(0)] * (m >= 0).unsqueeze(-1) * w.unsqueeze(-1)).sum(1),
        "token-major rows",  # the masked rows are what is weighted
    ),
    "int32": (lambda rows, w, m: (rows[m] * m.unsqueeze(-1)).sum(1), "finalized"),
    "int64": (lambda rows, w, m: (rows[m] * m.long().unsqueeze(-1)).sum(1), "finalized"),
    "uint8, token-major": (
        lambda rows, w, m: (rows[: T * K].view(T, K, H) * m.to(torch.uint8).unsqueeze(-1)).sum(1),
        "finalized",
    ),
}


@each(FACTORS)
def test_a_factor_of_the_rows_that_is_no_float_is_no_weight(case):
    """Booleans and integers were passed as weights: TypeError in place of a smaller fusion."""
    partial, form = FACTORS[case]
    assert_fused(tail(partial), inputs.make(torch.float32), finalize=form)


def masked_by(mask, index_of=lambda m: m):
    def partial(rows, weights, index):
        gathered = torch.where(mask(index).unsqueeze(-1), rows[index_of(index)], 0)
        return (gathered * weights.unsqueeze(-1)).sum(1)

    return tail(partial)


def finite_rows(**options):
    """Inputs whose every row holds numbers: a wrong row shows as a wrong number."""
    data = inputs.make(torch.float32, **options)
    data.rows = torch.randn(data.rows.shape, generator=torch.Generator().manual_seed(3))
    return data


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16], ids=str)
def test_a_map_that_is_narrowed_reads_the_rows_that_the_narrow_one_names(dtype):
    """``map.bool().long()`` and ``map.to(int8).long()`` were taken for the map itself."""
    function = masked_by(lambda m: m >= 0, lambda m: m.to(dtype).long())
    data = finite_rows(tokens=100, missing=True)
    assert data.index.max() > torch.iinfo(torch.int8).max
    assert_fused(function, data)


NARROWED_MASKS = {
    "uint8 >=": lambda m: m.to(torch.uint8) >= 0,
    "uint8 >": lambda m: m.to(torch.uint8) > -1,
    "uint8, not <": lambda m: ~(m.to(torch.uint8) < 0),
    "int8 >=": lambda m: m.to(torch.int8) >= 0,
    "bool >=": lambda m: m.bool() >= 0,
}


@each(NARROWED_MASKS)
def test_a_mask_of_a_narrowed_map_drops_what_it_says(case):
    """``map.to(uint8) >= 0`` always holds; it was taken for ``map >= 0``."""
    assert_fused(masked_by(NARROWED_MASKS[case]), finite_rows(tokens=100, missing=True))


NEGATIVE_MASKS = {
    "!= -1": lambda m: m != -1,
    "not == -1": lambda m: ~(m == -1),
    "-1 != map": lambda m: torch.ne(m.long(), -1),
    ">= -1": lambda m: m >= -1,
}


@each(NEGATIVE_MASKS)
def test_a_mask_keeps_the_negative_entries_that_it_does_not_name(case):
    """``map != -1`` was taken for ``map >= 0``: an entry of -2 lost its row, the last but one."""
    data = finite_rows()
    data.index[0, 0], data.index[1, 1], data.index[2, 0] = -2, -1, -3
    assert_fused(masked_by(NEGATIVE_MASKS[case]), data, finalize="permuted rows")


SELECTED = {
    "a flat mask": lambda rows, m: rows[m.flatten() >= 0],
    "a mask of two dimensions": lambda rows, m: rows.view(*m.shape, -1)[m >= 0],
}


@pytest.mark.parametrize(("tokens", "top_k"), [(4, 4), (1, 2)])
@each(SELECTED)
def test_rows_that_a_mask_selects_are_not_gathered_by_it(case, tokens, top_k):
    """``rows[mask]`` selects; the mask was taken for row numbers 0 and 1."""

    def partial(rows, weights, index):
        chosen = SELECTED[case](rows[: weights.numel()], index)
        return (chosen.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)

    data = inputs.make(torch.float32, tokens=tokens, top_k=top_k)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_fused(tail(partial), data, finalize="token-major rows")
