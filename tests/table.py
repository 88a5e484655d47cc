"""The table: every spelling of every part, in every dtype and shape mode, and what is found.

A row is one tail. Rows differ in what is written between the finalize and the norm; the spellings
of the finalize, the norm and the all_reduce go round among them, so that each of them is in some
row. Several rows are compiled as one graph, which takes half the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import inputs
import spellings
import torch
from arithmetic import BIASED, SCALED_AFTER, SCALED_BEFORE, SIGNED_AFTER, SIGNED_BEFORE, WITH_ADDEND
from checks import error
from families import APART, GATED, OVERFLOW
from refused_tails import CASES
from shared_places import AFTER, BEFORE, OWN, PLACES
from torch_versions import OLD_TORCH
from tracing import trace

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
MODES = ("static", "marked", "dynamic")
BATCH = 8  # rows of one graph
TOKENS = 10

NONE = "none"
FORMS = {"token-major": "token-major rows", "einsum": "token-major rows"}


@dataclass(frozen=True)
class Found:
    """What the pass makes of a tail: (finalize, shared) of each site, and what it refuses."""

    sites: tuple[tuple[str, str], ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One tail.

    Attributes:
        name: its spelling.
        function: of the tensors of ``inputs.Inputs``.
        found: what is found in every dtype,
        but: except in these.
        all_reduces: how many the graph has.
        masked: whether some entries of the map are -1.
        replicated: whether all ranks have the same outputs: what is added after is replicated.
        functional: whether its reductions are functional ones.
    """

    name: str
    function: Callable[..., tuple[torch.Tensor, ...]]
    found: Found
    but: dict[torch.dtype, Found] = field(default_factory=dict)
    all_reduces: int = 1
    masked: bool = True
    replicated: bool = True
    functional: bool = True

    def __str__(self):
        return self.name

    def found_in(self, dtype):
        return self.but.get(dtype, self.found)

    def doubles_in(self, dtype):
        """Whether a reduction that multiplies by two may take the place of all of its own."""
        return self.functional and not self.found_in(dtype).refused


def scales(norm_weight):
    """Two 0-d tensors near 1 and a vector near 0.5."""
    return norm_weight[0] * 0.75, norm_weight[1] * 0.75, norm_weight - 0.5


PARTIALS = {
    "routed": lambda routed, shared, s, t: routed,
    **{
        name: lambda routed, shared, s, t, form=form: form(routed, shared)
        for name, form in SIGNED_BEFORE.items()
    },
    **SCALED_BEFORE,
    "routed * s": lambda routed, shared, s, t: routed * s,
    "t * (s.view(1, 1) * routed)": lambda routed, shared, s, t: (
        t * (s.view(1, 1) * routed).to(routed.dtype)
    ),
    "s * routed + shared": lambda routed, shared, s, t: s * routed + shared,
    "routed / s": lambda routed, shared, s, t: routed / s,
    "t * (routed / s.view(1)) / s": lambda routed, shared, s, t: (
        t * (routed / s.view(1)).to(routed.dtype) / s
    ),
    "shared - routed / s": lambda routed, shared, s, t: shared - routed / s,
}
SUMS = {
    **{
        name: lambda y, residual, shared, s, t, b, form=form: form(y, residual, shared)
        for name, (form, *_) in SIGNED_AFTER.items()
    },
    **{
        name: lambda y, residual, shared, s, t, b, form=form: form(y, residual, shared, s, t)
        for name, form in {**SCALED_AFTER, **WITH_ADDEND}.items()
    },
    **{
        name: lambda y, residual, shared, s, t, b, form=form: form(y, residual, shared, b)
        for name, form in BIASED.items()
    },
}
ONLY_ROUTED = (
    "routed",
    "routed * s",
    "t * (s.view(1, 1) * routed)",
    "routed / s",
    "t * (routed / s.view(1)) / s",
)
ADDENDS = {
    **{name: shared for name, (_, _, shared) in SIGNED_AFTER.items()},
    **dict.fromkeys(SCALED_AFTER, NONE),
    **dict.fromkeys((*WITH_ADDEND, *BIASED), AFTER),
}
WIDE_ADDEND = "what is added after the reduction is torch.float32: expected {}"
# In fp16 an addend that is scaled up alone could overflow where the sum does not: before the
# reduction the partial is then taken as it is, after it the tail is refused.
TAKEN_AS_IT_IS = ("add of shared, alpha", *SCALED_BEFORE)
OVERFLOWING = (
    "add of the residual, alpha",
    "add of shared to y, alpha",
    "(y + shared) * s",
    "t * (s * y + shared)",
    "addcmul(y, shared, s)",
    "residual + b[0] * (y + b)",
)


def composed():
    """A row for each sum after the reduction; the other parts take turns."""
    parts = zip(
        SUMS,
        cycle(PARTIALS),
        cycle(spellings.FINALIZE),
        cycle(spellings.NORMS),
        strict=False,
    )
    for place, names in enumerate(parts):
        reduces = list(spellings.ALL_REDUCES)  # alike in all rows of a batch
        yield _row(*names, reduces[place // BATCH % len(reduces)])


def _row(total, partial, finalize, norm, reduce):
    def function(rows, weights, index, shared, residual, norm_weight):
        s, t, b = scales(norm_weight)
        routed = spellings.FINALIZE[finalize](rows, weights, index).to(rows.dtype)
        y = spellings.ALL_REDUCES[reduce](PARTIALS[partial](routed, shared, s, t))
        summed = SUMS[total](y, residual, shared, s, t, b)
        return spellings.NORMS[norm](summed, norm_weight), summed

    form = FORMS.get(finalize, "permuted rows")
    found = Found(((form, _together(partial, total)),))
    but = {}
    if partial in TAKEN_AS_IT_IS:
        but[torch.float16] = Found((("finalized", ADDENDS[total]),))
    if total in OVERFLOWING:
        but[torch.float16] = Found((), (OVERFLOW,))
    if OLD_TORCH and total == "addcmul(y, shared, s)":  # y + 1 * shared * s in fp32
        but |= {dtype: Found((), (WIDE_ADDEND.format(dtype),)) for dtype in HALVES}
    name = f"{finalize} | {partial} | {reduce} | {total} | {norm}"
    return Row(
        name,
        function,
        found,
        but,
        masked=finalize in spellings.MASKED,
        replicated="shared" not in total,
        functional=reduce in ("functional", "waited"),
    )


def _together(partial, total):
    places = [NONE if partial in ONLY_ROUTED else BEFORE, ADDENDS[total]]
    return " and ".join(place for place in places if place != NONE) or NONE


def placed():
    """A row for each place of a shared expert."""
    for name, (function, (form, shared, before, after)) in PLACES.items():
        left = (GATED,) * after
        found = Found(((form, shared),), left)
        but = {}
        if shared == OWN:  # a rank's sum of two partials could overflow where that of all does not
            but[torch.float16] = Found(((form, AFTER),), (APART,))
        if OLD_TORCH and name == "addcmul of the shared output and its gate":  # in fp32 an add
            but[torch.float32] = Found((("permuted rows", BEFORE),))
        yield Row(name, function, found, but, all_reduces=before, masked=False)


def refused():
    """A row for each kind of tail that is refused."""
    for name, (function, reason) in CASES.items():
        but = {
            dtype: Found((), (reason.replace("torch.bfloat16", str(dtype)),)) for dtype in DTYPES
        }
        if name in REFUSED_BUT:
            but[torch.float32] = Found((("permuted rows", REFUSED_BUT[name]),))
        if OLD_TORCH and name == "wide_residual_read_rounded_and_unrounded":  # then only unrounded
            but |= dict.fromkeys(HALVES, Found((("permuted rows", NONE),)))
        yield Row(name, function, Found((), (reason,)), but)


# In fp32 nothing is wider than the activation dtype.
REFUSED_BUT = {
    "wide_residual_read_rounded": NONE,
    "wide_residual_read_rounded_and_unrounded": NONE,
    "wide_replicated": AFTER,
}


def _nameless(reason):
    """Without the names of nodes, which depend on what else is in the graph."""
    return re.sub(r" \(\w+\) is also", " is also", reason)


def batches(rows):
    rows = list(rows)
    return [rows[place : place + BATCH] for place in range(0, len(rows), BATCH)]


MATCHED_BATCHES = [*batches(composed()), *batches(placed())]
REFUSED_BATCHES = batches(refused())


def together(batch):
    """One function of all rows: the outputs of each."""

    def function(*tensors):
        return [row.function(*tensors) for row in batch]

    return function


def data_for(batch, dtype, mode, rank=0):
    """Inputs whose sizes are symbolic, all or some of them, or none."""
    data = inputs.make(dtype, tokens=TOKENS, missing=all(row.masked for row in batch), rank=rank)
    if mode == "static":
        return data
    for tensor in data.args():  # a model's parameters fix K and H
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    if mode == "marked":
        for tensor in (data.weights, data.index, data.shared, data.residual):
            torch._dynamo.mark_dynamic(tensor, 0)
    return data


def assert_found(batch, dtype, report):
    """The sites and the refusals are those of the rows, and so is what becomes of all_reduces."""
    found = [row.found_in(dtype) for row in batch]
    sites = Counter(site for each in found for site in each.sites)
    assert Counter((site.finalize, site.shared) for site in report.sites) == sites, str(report)
    refusals = Counter(_nameless(reason) for each in found for reason in each.refused)
    got = Counter()
    for reason, count in report.refusals.items():
        got[_nameless(reason)] += count
    assert got == refusals, str(report)
    assert report.all_reduces_before == sum(row.all_reduces for row in batch)
    assert report.all_reduces_after == refusals.total()


def run_batches(rank, chosen):
    """On real ranks: for each (batch, dtype, mode) its report, errors and outputs."""
    return [_run_batch(rank, *each) for each in chosen]


def _run_batch(rank, place, dtype, mode):
    batch = MATCHED_BATCHES[place]
    function, data = together(batch), data_for(batch, dtype, mode, rank.index)
    with torch.no_grad():
        traced = trace(function, *data.args(), dynamic=True if mode == "dynamic" else None)
        unfused = function(*data.args())
        exact = function(*data.to(torch.float64).args())
    return {
        "report": traced.report,
        "outputs": traced.output,
        "errors": [_errors(*each) for each in zip(traced.output, exact, strict=True)],
        "unfused": [_errors(*each) for each in zip(unfused, exact, strict=True)],
    }


def _errors(outputs, exact):
    return [error(got, want) for got, want in zip(outputs, exact, strict=True)]
