"""What a test of the pass asserts: a tail is fused with the right numbers, or left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import inputs
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from tracing import Traced, trace

import moe_fusion.op
from moe_fusion import FusionConfig

RANKS = 2


def error(got: Tensor, want: Tensor) -> float:
    """The relative error of ``got``, in the Frobenius norm."""
    return float((got.double() - want).norm() / want.norm())


def _sum_of_ranks(x: Tensor, *_: object) -> Tensor:
    return x * RANKS


def _sum_of_ranks_in_place(x: Tensor, **_: object) -> None:
    x.mul_(RANKS)


@contextmanager
def doubled(ranks: int) -> Iterator[None]:
    """Within the block the op's reduction multiplies by ``ranks``."""
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1:
            patch.setattr(moe_fusion.op.dist, "all_reduce", _sum_of_ranks_in_place)
        yield


def _run(function: Callable[..., object], data: inputs.Inputs, ranks: int) -> tuple[Tensor, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1:
            patch.setattr(funcol, "all_reduce", _sum_of_ranks)
        return function(*data.args())


def assert_exact(
    output: Iterable[Tensor],
    function: Callable[..., object],
    data: inputs.Inputs,
    ranks: int = 1,
    slack: float = 1.02,
) -> None:
    """Outputs have eager's dtypes and shapes, and no more error than eager's against fp64.

    As many roundings of other values may differ by a little: ``slack`` is by how much.
    """
    unfused = _run(function, data, ranks)
    oracle = _run(function, data.to(torch.float64), ranks)
    for got, plain, want in zip(output, unfused, oracle, strict=True):
        assert got.dtype == plain.dtype
        assert got.shape == plain.shape
        assert torch.isfinite(got).all()
        # fp32 sums in another order differ in the last bits
        assert error(got, want) <= slack * error(plain, want) + 3e-7


def assert_fused(
    function: Callable[..., object],
    data: inputs.Inputs,
    *,
    fused: int = 1,
    left: dict[str, int] | None = None,
    ranks: int = RANKS,
    dynamic: bool | None = None,
    slack: float = 1.02,
    **expected: object,
) -> Traced:
    """``function(*tensors)`` is fused ``fused`` times and no less exact than unfused.

    To tell what is added before the reduction from what is added after it, the reduction multiplies
    by ``ranks``, in the op and in what it is compared with; not where one stays in the graph.

    Args:
        function: the tail, of the tensors of ``data``.
        data: its tensors.
        fused: how many tails are fused.
        left: why other all_reduces stay in the graph, and how many.
        ranks: 1 for reductions other than ``spellings.functional``.
        dynamic: as for ``torch.compile``.
        slack: as for :func:`assert_exact`.
        expected: fields of the first site.
    """
    left = left or {}
    ranks = 1 if left else ranks
    with doubled(ranks):
        traced = trace(function, *data.args(), dynamic=dynamic)
    assert traced.report.fused == fused, str(traced.report)
    assert dict(traced.report.refusals) == left
    assert traced.report.all_reduces_after == sum(left.values())
    assert_exact(traced.output, function, data, ranks, slack)
    for name, value in expected.items():
        assert getattr(traced.report.sites[0], name) == value
    return traced


def assert_untouched(
    function: Callable[..., object],
    reason: str,
    data: inputs.Inputs,
    config: FusionConfig | None = None,
    count: int = 1,
) -> None:
    """``function(*tensors)`` is refused for ``reason``, and is then what it was."""
    eager = function(*data.args())
    traced = trace(function, *data.args(), config=config)
    assert traced.report.fused == 0, str(traced.report)
    assert dict(traced.report.refusals) == {reason: count}
    assert traced.before == traced.after
    assert traced.report.all_reduces_after == traced.report.all_reduces_before == count
    assert reason in str(traced.report)
    for got, want in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
