"""The protocol has no stale read and no deadlock, and the model would have found them."""

from __future__ import annotations

import pytest
from exchange_model import Protocol, explore


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_interleaving_of_four_calls_reads_stale_words_or_deadlocks(world_size):
    assert explore(Protocol(world_size, calls=4)) is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_clearing_the_fourth_call_reads_the_first_ones_words(world_size):
    fault = explore(Protocol(world_size, calls=4, clears=False))
    assert fault is not None
    assert "in call 3 read call 0" in fault


def test_with_two_slots_a_late_clear_erases_what_a_peer_sent():
    fault = explore(Protocol(2, calls=4, slots=2))
    assert fault is not None
    assert fault.startswith("deadlock")


@pytest.mark.parametrize("calls_in_graph", [1, 2])
def test_with_the_hosts_epoch_replaying_a_graph_repeats_its_slots(calls_in_graph):
    baked = Protocol(2, calls=4, slot_of=lambda call, _: max(call, 0) % calls_in_graph)
    assert explore(baked) is not None
