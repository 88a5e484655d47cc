"""The protocol has no stale read and no deadlock, and the model would have found them."""

from __future__ import annotations

import pytest
from exchange_model import Protocol, explore

KINDS = [(2, False, 4), (3, False, 4), (2, True, 4), (3, True, 3)]


@pytest.mark.parametrize(("world_size", "two_shot", "calls"), KINDS)
def test_no_interleaving_reads_stale_words_or_deadlocks(world_size, two_shot, calls):
    assert explore(Protocol(world_size, calls, two_shot=two_shot)) is None


@pytest.mark.parametrize(("world_size", "two_shot"), [kind[:2] for kind in KINDS])
def test_without_clearing_the_third_call_reads_the_first_ones_words(world_size, two_shot):
    fault = explore(Protocol(world_size, calls=3, two_shot=two_shot, clears=False))
    assert fault is not None
    assert "in call 2 read call 0" in fault


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_one_slot_a_late_clear_erases_what_a_peer_sent(world_size):
    """In two-shot a rank's sums tell that it has read, so there one would do."""
    assert explore(Protocol(world_size, calls=2, slots=1)) is not None
    assert explore(Protocol(2, calls=4, slots=1, two_shot=True)) is None


@pytest.mark.parametrize("calls_in_graph", [1, 3])
def test_with_the_hosts_epoch_replaying_a_graph_repeats_its_slots(calls_in_graph):
    """An even number of calls would do, as long as nothing else is called in between."""
    baked = Protocol(2, calls=5, slot_of=lambda call, slots: call % calls_in_graph % slots)
    assert explore(baked) is not None
