"""Random tails, drawn from what a tail means and from how it may be spelt."""

from __future__ import annotations

from dataclasses import dataclass

import inputs
import spellings
import torch
from hypothesis import strategies as st
from tracing import trace

SHARED = ("none", "before", "after", "own all_reduce")


@dataclass(frozen=True)
class Spec:
    """One tail."""

    finalize: str
    norm: str
    dtype: torch.dtype
    fp32_router: bool
    tokens: int
    top_k: int
    scale: float | None
    scale_covers_shared: bool
    shared: str
    own_scale: float | None
    widened: bool
    output_scale: float | None
    residual: bool
    join: str
    batched: bool
    flips: tuple[bool, ...]
    views: tuple[int, ...]
    eps: float
    read_again: bool


@st.composite
def specs(draw, *, miss=False):
    return Spec(
        finalize=draw(st.sampled_from(sorted(spellings.FINALIZE))),
        norm=draw(st.sampled_from(sorted(spellings.NORMS))),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        fp32_router=draw(st.booleans()),
        tokens=draw(st.sampled_from([4, 6] if miss else [1, 4, 6])),  # of one row a slice is all
        top_k=draw(st.sampled_from([1, 2, 3])),
        scale=draw(st.sampled_from([None, 2.5, -0.5])),
        scale_covers_shared=draw(st.booleans()),
        shared=draw(st.sampled_from(SHARED)),
        own_scale=draw(st.sampled_from([None, 0.5, -2.5])),
        widened=draw(st.booleans()),
        output_scale=draw(st.sampled_from([None, 0.22])),
        residual=miss or draw(st.booleans()),
        join=draw(st.sampled_from(["add", "alpha", "subtraction"])),
        batched=draw(st.booleans()),
        flips=tuple(draw(st.lists(st.booleans(), min_size=6, max_size=6))),
        views=tuple(draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))),
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        read_again=draw(st.booleans()),
    )


def add(a, b, flip):
    return b + a if flip else a + b


def add_widened(a, b, flip):
    wide = add(spellings.widened(a), spellings.widened(b), flip)
    return wide.to(a.dtype)


def mul(a, b, flip):
    return b * a if flip else a * b


def view(x, kind):
    """The same rows, by way of a view, a copy or a conversion that loses nothing."""
    if kind == 1:
        return x.reshape(1, *x.shape).squeeze(0)
    if kind == 2:
        return x.contiguous().view(x.shape)
    if kind == 3 and x.dtype != torch.float64:
        return x.float().to(x.dtype)
    if kind == 4:
        return x.unsqueeze(-2).view(x.shape)
    return x


def build(spec, reduce=spellings.functional, near_miss=None):
    """The tail as a function of its tensors."""

    def partial_of(rows, weights, index, shared):
        routed = spellings.FINALIZE[spec.finalize](rows, weights, index).to(rows.dtype)
        if spec.scale is not None and not spec.scale_covers_shared:
            routed = mul(routed, spec.scale, spec.flips[0])
        total = add(routed, shared, spec.flips[1]) if spec.shared == "before" else routed
        if spec.scale is not None and spec.scale_covers_shared:
            total = mul(total, spec.scale, spec.flips[0])
        return routed, view(total, spec.views[0])

    def reduced(rows, weights, index, shared):
        routed, partial = partial_of(rows, weights, index, shared)
        if near_miss == "average":
            import torch.distributed._functional_collectives as funcol

            return routed, funcol.all_reduce(partial, "avg", "0")
        y = reduce(partial)
        return routed, reduce(y) if near_miss == "chained" else y

    def function(rows, weights, index, shared, residual, norm_weight):
        routed, first = reduced(rows, weights, index, shared)
        y = view(first, spec.views[1])
        if near_miss == "gate in between":
            y = y * torch.sigmoid(shared[:, :1])
        join = add_widened if spec.widened else add
        if spec.shared == "after":
            y = join(y, shared, spec.flips[2])
        if spec.shared == "own all_reduce":
            own = reduce(shared)
            own = own if spec.own_scale is None else mul(own, spec.own_scale, spec.flips[5])
            y = join(y, own, spec.flips[2])
        if spec.output_scale is not None:
            y = mul(y, spec.output_scale, spec.flips[3])
        if spec.batched:
            y = y.view(1, *y.shape)
            residual = residual.view(y.shape)
        total = close(y, residual, norm_weight)
        extra = (total[0].sin(),) if spec.read_again else ()
        if near_miss == "all_reduce read":
            extra = (*extra, first.cos())
        if near_miss == "finalize read":
            extra = (*extra, routed.cos())
        return (*total, *extra)

    def close(y, residual, norm_weight):
        norm = spellings.NORMS[spec.norm]
        if near_miss == "norm first":
            return (residual + norm(y, norm_weight, spec.eps),)
        if near_miss == "slice":
            total = residual[..., :1, :] + y[..., :1, :]
        elif near_miss == "cat":
            total = torch.cat([residual, y], dim=-2)
        elif not spec.residual:
            total = y
        elif spec.join == "alpha":
            total = torch.add(residual, view(y, spec.views[2]), alpha=2)
        elif spec.join == "subtraction":
            total = y - residual if spec.flips[4] else residual - y
        else:
            total = add(residual, view(y, spec.views[2]), spec.flips[4])
        return total, near_norm(total, norm_weight, norm)

    def near_norm(total, norm_weight, norm):
        wide = total if total.dtype == torch.float64 else total.float()
        if near_miss == "layer norm":
            return torch.nn.functional.layer_norm(
                total, total.shape[-1:], norm_weight, None, spec.eps
            )
        if near_miss == "mean of the wrong dimension":
            inverse = torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + spec.eps)
        elif near_miss == "cube":
            inverse = torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + spec.eps)
        else:
            return norm(total, norm_weight, spec.eps)
        return norm_weight * (wide * inverse).to(total.dtype)

    return function


def data_for(spec, rank=0):
    return inputs.make(
        spec.dtype,
        tokens=spec.tokens,
        top_k=spec.top_k,
        hidden=32,
        missing=spec.finalize in spellings.MASKED,
        weights=torch.float32 if spec.fp32_router else None,
        rank=rank,
    )


def error(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check(output, unfused, oracle, spec):
    for got, plain, want in zip(output, unfused, oracle, strict=True):
        assert got.dtype == plain.dtype
        assert got.shape == plain.shape
        # each rounds at places of its own: with as few values as 32, luck decides whose is less
        luck = torch.finfo(got.dtype).eps / 4
        assert error(got, want) <= 1.25 * error(plain, want) + luck + 1e-6, spec


def run_specs(rank, specs):
    """On real ranks, whose inputs differ: each spec's report and whether its numbers are right."""
    return [_run_spec(rank, spec) for spec in specs]


def _run_spec(rank, spec):
    function, data = build(spec), data_for(spec, rank.index)
    with torch.no_grad():
        traced = trace(function, *data.args())
        unfused = function(*data.args())
        oracle = function(*data.to(torch.float64).args())
    check(traced.output, unfused, oracle, spec)
    report = traced.report
    return report.fused, report.all_reduces_before, report.all_reduces_after, str(report)
