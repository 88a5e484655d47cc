"""Dialects on real groups of two ranks whose inputs differ: fused as often, the same numbers."""

from __future__ import annotations

import torch
from dialect_ranks import (
    compiled_with_a_mutating_norm,
    compiled_with_registered_ops,
    compiled_with_the_group_itself,
)
from distributed import run_ranks


def assert_fused_alike(results):
    for fused, got, want in results:
        assert fused == 1
        for left, right in zip(got, want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    (_, first, _), (_, second, _) = results
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_the_group_itself_in_the_place_of_its_name():
    assert_fused_alike(run_ranks(2, compiled_with_the_group_itself))


def test_registered_ops():
    assert_fused_alike(run_ranks(2, compiled_with_registered_ops))


def test_a_norm_that_overwrites_its_arguments():
    assert_fused_alike(run_ranks(2, compiled_with_a_mutating_norm))
