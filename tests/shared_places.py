"""Where a shared expert's output joins the tail, and what is found in each place."""

from __future__ import annotations

import spellings
import torch

SCALE = 2.5


def gate(residual):
    """Replicated: all ranks have the same residual."""
    return torch.sigmoid(residual[:, :1])


def add_widened(a, b):
    return (spellings.widened(a) + spellings.widened(b)).to(a.dtype)


def scale_tensor(like):
    return torch.full((), SCALE, dtype=torch.float32).to(like.dtype).sigmoid()


def routed(rows, weights, index):
    return spellings.where_masked(rows, weights, index)


def tail(partial=None, after=None):
    """A tail whose partial, or what is added after its reduction, has the shared output in it."""

    def function(rows, weights, index, shared, residual, norm_weight):
        if partial is None:
            y = spellings.functional(routed(rows, weights, index))
        else:
            y = spellings.functional(partial(rows, weights, index, shared, residual))
        if after is not None:
            y = after(y, shared, residual)
        total = residual + y
        return spellings.norm_a(total, norm_weight), total

    return function


# name: (tail, the site's finalize, its shared, all_reduces before and after)
PERMUTED, PLAIN = "permuted rows", "finalized"
BEFORE, AFTER, OWN = "before the all_reduce", "after the all_reduce", "its own all_reduce"
PLACES = {
    "base of scatter_add": (
        tail(lambda r, w, i, s, _: spellings.scatter_add(r, w, i, s)),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "base of index_add": (
        tail(lambda r, w, i, s, _: spellings.index_add(r, w, i, s)),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "gated, before the all_reduce": (
        tail(lambda r, w, i, s, x: routed(r, w, i) + gate(x) * s),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "gated, the base of scatter_add": (
        tail(lambda r, w, i, s, x: spellings.scatter_add(r, w, i, gate(x) * s)),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "replicated and gated, after the all_reduce": (
        tail(after=lambda y, s, x: y + gate(x) * x.sin()),
        (PERMUTED, AFTER, 1, 0),
    ),
    "its own all_reduce": (
        tail(after=lambda y, s, x: y + spellings.functional(s)),
        (PERMUTED, OWN, 2, 0),
    ),
    "its own all_reduce, both sums widened": (
        tail(after=lambda y, s, x: add_widened(y, spellings.functional(s))),
        (PERMUTED, OWN, 2, 0),
    ),
    # the gate is replicated, which the graph does not say: the second all_reduce stays
    "its own all_reduce, then gated": (
        tail(after=lambda y, s, x: y + gate(x) * spellings.functional(s)),
        (PERMUTED, AFTER, 2, 1),
    ),
    "gated, then its own all_reduce": (
        tail(after=lambda y, s, x: spellings.functional(gate(x) * s) + y),
        (PERMUTED, OWN, 2, 0),
    ),
    "addcmul, a number": (
        tail(lambda r, w, i, s, _: torch.addcmul(s, routed(r, w, i), s.new_ones(()), value=SCALE)),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "addcmul, a 0-d tensor": (
        tail(lambda r, w, i, s, _: torch.addcmul(s, routed(r, w, i), scale_tensor(s))),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "addcmul, a 0-d tensor first and value": (
        tail(lambda r, w, i, s, _: torch.addcmul(s, scale_tensor(s), routed(r, w, i), value=-0.5)),
        (PERMUTED, BEFORE, 1, 0),
    ),
    "addcmul after the all_reduce": (
        tail(after=lambda y, s, x: torch.addcmul(x.sin(), y, x.new_ones(()), value=0.5)),
        (PERMUTED, AFTER, 1, 0),
    ),
    # a product of two tensors is no addend of the op: the partial is sent as it is
    "addcmul of the shared output and its gate": (
        tail(lambda r, w, i, s, x: torch.addcmul(routed(r, w, i), s, gate(x))),
        (PLAIN, "none", 1, 0),
    ),
    "where, by a replicated condition": (
        tail(lambda r, w, i, s, x: torch.where(x[:, :1] > 0, routed(r, w, i) + s, s)),
        (PLAIN, "none", 1, 0),
    ),
}
