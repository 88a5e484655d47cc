"""The exchange protocol, small enough to try every interleaving.

W ranks make ``calls`` calls of one row of one word. A call of one rank is:

    push     its word to every rank, itself included: each store is in flight until it is delivered
    clear    each word of the slot that the call before used
    read     each rank's word of the slot of this call, once it is not empty
    finish   when all of these are done: the device-side epoch moves on, the next call may start

Pushes come before reads; clears come in any order with both. A store may stay in flight however
long, also after its kernel has finished, and overtakes all others but those to its own word. Each
delivery, clear and read is one step, and :func:`explore` takes the steps in every order. A word
holds the number of the call that wrote it, so a read that finds another call's number is a stale
read.

One reduction keeps three ranks small and loses no fault. A rank that has pushed call c and not
finished it holds every peer back at call c + 1 at most. So no store but those in flight, and those
of call c + 1, can still come to one of its words; a read or clear of a word that none of these
touches gives the same whenever it happens, and is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

EMPTY = -1


@dataclass(frozen=True)
class Protocol:
    """What may be varied: the real protocol is the default."""

    world_size: int
    calls: int
    slots: int = 3
    clears: bool = True
    slot_of: Callable[[int, int], int] = lambda call, slots: call % slots


@dataclass(frozen=True)
class Rank:
    """Where one rank is: its call, and which steps of it are done, by peer."""

    call: int
    pushed: bool
    cleared: tuple[bool, ...]
    read: tuple[bool, ...]


@dataclass(frozen=True)
class State:
    """Ranks, words by (rank, slot, source) and stores in flight as (rank, slot, source, call)."""

    ranks: tuple[Rank, ...]
    words: tuple[tuple[tuple[int, ...], ...], ...]
    in_flight: frozenset[tuple[int, int, int, int]]


def _fresh_call(protocol: Protocol, call: int) -> Rank:
    nothing_to_clear = call == 0 or not protocol.clears
    return Rank(
        call, False, (nothing_to_clear,) * protocol.world_size, (False,) * protocol.world_size
    )


def initial(protocol: Protocol) -> State:
    """No call has begun and every word is empty."""
    row = (EMPTY,) * protocol.world_size
    return State(
        (_fresh_call(protocol, 0),) * protocol.world_size,
        ((row,) * protocol.slots,) * protocol.world_size,
        frozenset(),
    )


def _set(values: tuple, index: int, value) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _with_word(words: tuple, rank: int, slot: int, source: int, value: int) -> tuple:
    slots = words[rank]
    return _set(words, rank, _set(slots, slot, _set(slots[slot], source, value)))


def _deliveries(state: State) -> Iterator[State]:
    for store in state.in_flight:
        rank, slot, source, call = store
        earlier = any(s[:3] == store[:3] and s[3] < call for s in state.in_flight)
        if not earlier:
            words = _with_word(state.words, rank, slot, source, call)
            yield State(state.ranks, words, state.in_flight - {store})


def _moved(state: State, me: int, rank: Rank, words=None) -> State:
    words = state.words if words is None else words
    return State(_set(state.ranks, me, rank), words, state.in_flight)


def _push(protocol: Protocol, state: State, me: int) -> State:
    rank = state.ranks[me]
    slot = protocol.slot_of(rank.call, protocol.slots)
    stores = {(peer, slot, me, rank.call) for peer in range(protocol.world_size)}
    after = _moved(state, me, Rank(rank.call, True, rank.cleared, rank.read))
    return State(after.ranks, after.words, state.in_flight | stores)


def _clears(protocol: Protocol, state: State, me: int) -> Iterator[State]:
    rank = state.ranks[me]
    previous = protocol.slot_of(rank.call - 1, protocol.slots)
    for source, done in enumerate(rank.cleared):
        if not done:
            words = _with_word(state.words, me, previous, source, EMPTY)
            cleared = _set(rank.cleared, source, True)
            yield _moved(state, me, Rank(rank.call, rank.pushed, cleared, rank.read), words)


def _reads(protocol: Protocol, state: State, me: int) -> Iterator[State | str]:
    rank = state.ranks[me]
    slot = protocol.slot_of(rank.call, protocol.slots)
    for source, done in enumerate(rank.read):
        word = state.words[me][slot][source]
        if done or word == EMPTY:
            continue
        if word != rank.call:
            yield f"stale read: rank {me} in call {rank.call} read call {word} of rank {source}"
        read = _set(rank.read, source, True)
        yield _moved(state, me, Rank(rank.call, True, rank.cleared, read))


def _steps_of(protocol: Protocol, state: State, me: int) -> Iterator[State | str]:
    rank = state.ranks[me]
    if rank.call == protocol.calls:
        return
    yield from _clears(protocol, state, me)
    if not rank.pushed:
        yield _push(protocol, state, me)
        return
    yield from _reads(protocol, state, me)
    if all(rank.cleared) and all(rank.read):
        yield _moved(state, me, _fresh_call(protocol, rank.call + 1))


def _untouched(protocol: Protocol, state: State, me: int, slot: int, source: int) -> bool:
    """Whether no store can come to this word before rank ``me`` has finished its call."""
    coming = protocol.slot_of(state.ranks[me].call + 1, protocol.slots)
    flying = any(store[:3] == (me, slot, source) for store in state.in_flight)
    return coming != slot and not flying


def _settled(protocol: Protocol, state: State) -> State:
    """Take the steps that give the same whenever they happen, one after the other."""
    for me, rank in enumerate(state.ranks):
        if rank.call == protocol.calls or not rank.pushed:
            continue
        slot = protocol.slot_of(rank.call, protocol.slots)
        previous = protocol.slot_of(rank.call - 1, protocol.slots)
        cleared, read, words = rank.cleared, rank.read, state.words
        for source in range(protocol.world_size):
            if not cleared[source] and _untouched(protocol, state, me, previous, source):
                cleared = _set(cleared, source, True)
                words = _with_word(words, me, previous, source, EMPTY)
            current = words[me][slot][source] == rank.call
            if current and not read[source] and _untouched(protocol, state, me, slot, source):
                read = _set(read, source, True)
        moved = Rank(rank.call, True, cleared, read)
        if all(cleared) and all(read):
            moved = _fresh_call(protocol, rank.call + 1)
        state = State(_set(state.ranks, me, moved), words, state.in_flight)
    return state


def explore(protocol: Protocol) -> str | None:
    """Try every interleaving.

    Returns:
        The first fault that was found, a stale read or a deadlock, or None when there is none.
    """
    seen = {initial(protocol)}
    stack = list(seen)
    while stack:
        state = stack.pop()
        following = [_settled(protocol, after) for after in _deliveries(state)]
        for me in range(protocol.world_size):
            for step in _steps_of(protocol, state, me):
                if isinstance(step, str):
                    return step
                following.append(_settled(protocol, step))
        if not following and any(rank.call < protocol.calls for rank in state.ranks):
            return f"deadlock: {state.ranks}"
        new = set(following) - seen
        seen |= new
        stack.extend(new)
    return None
