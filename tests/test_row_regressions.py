"""Faults that were found in which rows are taken for the experts', and by which index."""

from __future__ import annotations

import inputs
import pytest
import torch
from checks import assert_fused
from regressions import (
    H,
    each,
    tail,
)
from torch._dynamo import mark_dynamic

pytestmark = pytest.mark.usefixtures("fake_group")


def back_in_place(rows, weights, base, permutation):
    """Rows that an index puts in token order, where each is weighted and summed."""
    each = base.index_put([permutation], rows[: len(permutation)])
    return (each.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def taken_back(rows, weights, order, inverse):
    """Rows that are weighted in sorted order, and then taken by an index."""
    weighted = rows[: len(order)] * weights.flatten()[order].unsqueeze(-1)
    return weighted[inverse].view(*weights.shape, -1).sum(1)


def by_token(index):
    """The order of each token's own rows, from 0 to K - 1."""
    return torch.argsort(index, dim=-1).flatten()


def sorted_again(rows, weights, index):
    order = torch.argsort(index, dim=-1)
    return taken_back(rows, weights, order.flatten(), by_token(order))


def accumulated(rows, weights, order):
    weighted = rows[: len(order)] * weights.flatten()[order].unsqueeze(-1)
    zeros = rows.new_zeros(len(weights), rows.shape[1])
    return zeros.index_add(0, order // weights.shape[1], weighted)


def inverse_of(order):
    """By index_put into zeros: entries that the order does not name are 0."""
    return torch.zeros_like(order).index_put([order], torch.arange(len(order)))


NO_PERMUTATIONS = {
    "some rows twice, into zeros": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), m.flatten().long() // 2
    ),
    "some rows twice, into others": lambda r, w, m: back_in_place(
        r, w, r[: m.numel()].sin(), m.flatten().long() // 2
    ),
    "from the end": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), m.flatten().long() - 3
    ),
    "sorted by token, into zeros": lambda r, w, m: back_in_place(
        r, w, torch.zeros_like(r[: m.numel()]), by_token(m)
    ),
    "sorted by token, accumulated": lambda r, w, m: accumulated(r, w, by_token(m)),
    "sorted by token, inverted": lambda r, w, m: taken_back(
        r, w, by_token(m), inverse_of(by_token(m))
    ),
    "sorted by token, sorted again": sorted_again,
}


@each(NO_PERMUTATIONS)
def test_an_index_that_is_no_permutation_is_not_inverted(case):
    """Entries of its inverse that it does not name were undefined: rows anywhere were read."""
    assert_fused(tail(NO_PERMUTATIONS[case]), inputs.make(torch.float32, tokens=48))


def in_blocks(rows, index):
    """The first rows as [experts, capacity, H]: what a batched matrix product leaves."""
    return rows[: index.numel()].view(3, -1, rows.shape[-1]).sin()


BLOCKS = {
    "as they are": lambda r, w, m: (in_blocks(r, m).flatten(0, 1)[m.long()] * w.unsqueeze(-1)).sum(
        1
    ),
    "counted from the end": lambda r, w, m: (
        in_blocks(r, m).flatten(0, 1)[m.long() - 7] * w.unsqueeze(-1)
    ).sum(1),
    "weighted, then accumulated": lambda r, w, m: (
        in_blocks(r, m).neg().exp().reshape(-1, r.shape[-1])[m] * w.unsqueeze(-1)
    ).sum(1),
    "with a block of zeros": lambda r, w, m: (
        torch.cat([in_blocks(r, m), r.new_zeros(1, m.numel() // 3, r.shape[-1])]).flatten(0, 1)[
            torch.where(m >= 5, m - 5, 3).long()
        ]
        * w.unsqueeze(-1)
    ).sum(1),
}


@each(BLOCKS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_that_were_blocks_are_counted_as_rows(case, dynamic):
    """An index that may count from the end was taken modulo the number of blocks."""
    data = inputs.make(torch.float32, tokens=48)
    for tensor in (data.weights, data.index, data.shared, data.residual) if dynamic else ():
        mark_dynamic(tensor, 0)
    assert_fused(tail(BLOCKS[case]), data)


PROJECTIONS = {
    "einsum over heads": lambda rows, matrix: torch.einsum(
        "tnh,nhd->td", rows.view(len(rows), 8, -1), matrix.view(8, -1, H)
    ),
    "einsum": lambda rows, matrix: torch.einsum("tk,kd->td", rows, matrix),
    "einsum, transposed": lambda rows, matrix: torch.einsum("tk,dk->td", rows, matrix.t()),
    "matmul": torch.matmul,
    "bmm": lambda rows, matrix: torch.bmm(rows[None], matrix[None])[0],
    "bmm by token": lambda rows, matrix: torch.bmm(rows[:, None], matrix[None])[:, 0],
}


@each(PROJECTIONS)
def test_a_matrix_product_of_one_token_is_no_sum_over_experts(case):
    """It has a top-k reduction's shape, and was refused for more experts than a token has."""

    def partial(rows, weights, index):
        return PROJECTIONS[case](weights[:, :H], rows[: weights.shape[1]])

    data = inputs.make(torch.float32, tokens=1, top_k=64)
    assert_fused(tail(partial), data, finalize="finalized", top_k=None)


def sorted_by_rows(rows, weights, index):
    order = torch.argsort(index.flatten())
    return taken_back(rows, weights, order, torch.argsort(order.view(index.shape), -1).flatten())


def test_an_order_that_is_sorted_row_by_row_is_not_inverted():
    """``argsort(order.view(T, K))`` was taken for the inverse of ``order``: weights of others."""
    data = inputs.make(torch.float32, tokens=48)
    assert_fused(tail(sorted_by_rows), data, finalize="permuted rows")


def weighted_by_index(rows, weights, index):
    """Rows that are taken by their places among those of their token."""
    places = torch.empty_like(index.flatten().long())
    places[index.long()] = torch.arange(index.shape[1])
    scores = weights.flatten()[index.long()].reshape(-1, 1)
    return (rows[: index.numel()] * scores)[places].view(*index.shape, -1).sum(1)


def test_positions_that_broadcast_to_the_index_invert_nothing():
    """``inverse[map] = arange(K)`` was taken for an inverse of the map: weights of others."""
    assert_fused(tail(weighted_by_index), inputs.make(torch.float32, tokens=48))


def added_at(tokens_of):
    """Weighted rows that scatter_add adds at an index that is made of their tokens."""

    def partial(rows, weights, index):
        order = torch.argsort(index.flatten())
        weighted = rows[: len(order)] * weights.flatten()[order].unsqueeze(-1)
        tokens = tokens_of(order // index.shape[1])
        return rows.new_zeros(len(index), H).scatter_add(0, tokens, weighted)

    return tail(partial)


PARTS_OF_ROWS = {
    "the first column": lambda tokens: tokens.unsqueeze(-1),
    "half of the columns": lambda tokens: tokens.unsqueeze(-1).expand(-1, H // 2),
    "a token for each column": lambda tokens: tokens.expand(len(tokens), H),
}


@each(PARTS_OF_ROWS)
def test_a_scatter_add_of_less_than_whole_rows_is_left_to_the_graph(case):
    """An index of fewer columns, or of the other dimension, was taken for one of whole rows."""
    data = inputs.make(torch.float32, tokens=H // 2)  # as many rows as columns
    assert_fused(added_at(PARTS_OF_ROWS[case]), data, finalize="finalized")


def one_row_for_all(rows, weights, index):
    order = torch.argsort(index.flatten())
    return rows[: len(index)].sin().index_put([order // index.shape[1]], rows[:1], accumulate=True)


def test_one_row_that_is_added_to_every_token_is_not_gathered():
    """It was taken for T * K rows, and the op read past its end: IndexError."""
    assert_fused(tail(one_row_for_all), inputs.make(torch.float32), finalize="finalized")


def permuted_then_masked(rows, weights, index):
    """A mask that asks the permutation itself: all of it is there."""
    order = torch.argsort(index.flatten())
    back = torch.zeros_like(rows[: len(order)]).index_put([order], rows[: len(order)])
    back = torch.where((order >= 0).unsqueeze(-1), back, 0.0)
    return (back.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


def permuted_with_zeros(rows, weights, index):
    """The row of zeros goes where the permutation says nothing: to the last place."""
    last = index.numel() - 1
    places = torch.where(index.flatten() == last, -1, index.flatten())
    places = torch.where(places >= 0, places, last).long()
    padded = torch.cat([rows[:last], rows.new_zeros(1, H)])
    back = torch.empty_like(padded).index_put([places], padded)
    return (back.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


INVERSES = {"masked": permuted_then_masked, "with a row of zeros": permuted_with_zeros}


@each(INVERSES)
def test_a_permutation_whose_signs_are_asked_is_still_inverted(case):
    """What says which entries are there was taken for the map, though it is the inverse's."""
    data = inputs.make(torch.float32, tokens=8)
    assert_fused(tail(INVERSES[case]), data, finalize="permuted rows")


def absent_in_either_map(rows, weights, index):
    other = index.flip(0)
    padded = torch.cat([rows, rows.new_zeros(1, H)])
    each = padded[torch.where(index >= 0, index, len(rows))]
    each = torch.where((other >= 0).unsqueeze(-1), each, 0.0)
    return (each * weights.unsqueeze(-1)).sum(1)


def test_a_mask_of_another_map_counts_beside_a_row_of_zeros():
    """The row of zeros, which says what is absent too, made the pass forget the mask."""
    data = inputs.make(torch.float32, tokens=24, missing=True)
    data.rows = data.rows.nan_to_num(0.5)
    assert_fused(tail(absent_in_either_map), data)


def weighted_before_zeros(rows, weights, index):
    scores = weights.flatten().flip(0).unsqueeze(-1)
    weighted = rows[: index.numel()] * scores
    padded = torch.cat([weighted, weighted.new_zeros(1, H)])
    return padded[torch.where(index >= 0, index, index.numel())].sum(1)


def test_rows_that_are_weighted_before_a_row_of_zeros_is_appended():
    """The weight of the row of zeros was looked up, which has none: IndexError."""
    data = inputs.make(torch.float32, tokens=24, missing=True)
    assert_fused(tail(weighted_before_zeros), data, finalize="permuted rows")
