"""The exchange protocol, small enough to try every interleaving.

W ranks make ``calls`` calls. A call of one rank is one phase, or two where it is two-shot:

    push     a word to every rank, itself included: each store is in flight until it is delivered
    read     the word of each rank in the slot of this call, once it is not empty
    clear    each word after it was read

When all words of a phase are clear the next phase starts, or the call ends: the device-side epoch
moves on and the next call may start. The words of a phase have places of their own, so that in
two-shot a rank pushes a part of its row to each owner, and then its sum to every rank.

A store may stay in flight however long, also after its kernel has finished, and overtakes all
others but those to its own word. Each delivery, read and clear is one step, and :func:`explore`
takes the steps in every order. A word holds the number of the call that wrote it, so a read that
finds another call's number is a stale read.

One reduction keeps three ranks small and loses no fault. A rank in call c holds every peer back at
call c + 1 at most. So no store but those in flight, and those of call c + 1, can still come to one
of its words; a read or clear of a word that none of these touches gives the same whenever it
happens, and is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

EMPTY = -1
WAITING, READ, CLEAR = 0, 1, 2


@dataclass(frozen=True)
class Protocol:
    """What may be varied: the real protocol is the default."""

    world_size: int
    calls: int
    two_shot: bool = False
    slots: int = 2
    clears: bool = True
    slot_of: Callable[[int, int], int] = lambda call, slots: call % slots

    @property
    def phases(self) -> int:
        return 2 if self.two_shot else 1


@dataclass(frozen=True)
class Rank:
    """Where one rank is: its call and phase, and how far it is with the word of each peer."""

    call: int
    phase: int
    pushed: bool
    words: tuple[int, ...]


# A word's place is (rank, slot, phase, source).
Place = tuple[int, int, int, int]


@dataclass(frozen=True)
class State:
    """Ranks, words that are not empty, and stores in flight as (place, call)."""

    ranks: tuple[Rank, ...]
    words: frozenset[tuple[Place, int]]
    in_flight: frozenset[tuple[Place, int]]

    def word(self, place: Place) -> int:
        return next((call for at, call in self.words if at == place), EMPTY)

    def with_word(self, place: Place, call: int) -> State:
        others = frozenset(word for word in self.words if word[0] != place)
        return replace(self, words=others if call == EMPTY else others | {(place, call)})

    def with_rank(self, me: int, rank: Rank) -> State:
        return replace(self, ranks=(*self.ranks[:me], rank, *self.ranks[me + 1 :]))


def _fresh(protocol: Protocol, call: int, phase: int = 0) -> Rank:
    return Rank(call, phase, False, (WAITING,) * protocol.world_size)


def initial(protocol: Protocol) -> State:
    """No call has begun and every word is empty."""
    return State((_fresh(protocol, 0),) * protocol.world_size, frozenset(), frozenset())


def _deliveries(state: State) -> Iterator[State]:
    for store in state.in_flight:
        place, call = store
        if not any(at == place and other < call for at, other in state.in_flight):
            after = state.with_word(place, call)
            yield replace(after, in_flight=state.in_flight - {store})


def _places(protocol: Protocol, state: State, me: int) -> list[Place]:
    rank = state.ranks[me]
    slot = protocol.slot_of(rank.call, protocol.slots)
    return [(me, slot, rank.phase, source) for source in range(protocol.world_size)]


def _push(protocol: Protocol, state: State, me: int) -> State:
    rank = state.ranks[me]
    slot = protocol.slot_of(rank.call, protocol.slots)
    peers = range(protocol.world_size)
    stores = {((peer, slot, rank.phase, me), rank.call) for peer in peers}
    after = state.with_rank(me, replace(rank, pushed=True))
    return replace(after, in_flight=state.in_flight | stores)


def _with_progress(state: State, me: int, source: int, progress: int) -> State:
    rank = state.ranks[me]
    words = (*rank.words[:source], progress, *rank.words[source + 1 :])
    return state.with_rank(me, replace(rank, words=words))


def _read_or_clear(protocol: Protocol, state: State, me: int, source: int) -> State | str | None:
    """The next step with the word of one peer; None if there is none yet."""
    rank, place = state.ranks[me], _places(protocol, state, me)[source]
    if rank.words[source] == READ:
        after = _with_progress(state, me, source, CLEAR)
        return after.with_word(place, EMPTY) if protocol.clears else after
    word = state.word(place)
    if rank.words[source] == CLEAR or word == EMPTY:
        return None
    if word != rank.call:
        return f"stale read: rank {me} in call {rank.call} read call {word} of rank {source}"
    return _with_progress(state, me, source, READ)


def _advanced(protocol: Protocol, state: State, me: int) -> State:
    """The rank's next phase or call, if it is done with this one."""
    rank = state.ranks[me]
    if not rank.pushed or any(word != CLEAR for word in rank.words):
        return state
    last = rank.phase == protocol.phases - 1
    fresh = _fresh(protocol, rank.call + last, 0 if last else rank.phase + 1)
    return state.with_rank(me, fresh)


def _steps_of(protocol: Protocol, state: State, me: int) -> Iterator[State | str]:
    rank = state.ranks[me]
    if rank.call == protocol.calls:
        return
    if not rank.pushed:
        yield _push(protocol, state, me)
        return
    for source in range(protocol.world_size):
        step = _read_or_clear(protocol, state, me, source)
        if step is not None:
            yield step if isinstance(step, str) else _advanced(protocol, step, me)


def _untouched(protocol: Protocol, state: State, me: int, place: Place) -> bool:
    """Whether no store can come to this word before rank ``me`` has finished its call."""
    coming = protocol.slot_of(state.ranks[me].call + 1, protocol.slots)
    return coming != place[1] and not any(at == place for at, _ in state.in_flight)


def _settled(protocol: Protocol, state: State) -> State:
    """Take the steps that give the same whenever they happen, one after the other."""
    for me in range(protocol.world_size):
        moved = True
        while moved:
            moved = False
            rank = state.ranks[me]
            if rank.call == protocol.calls or not rank.pushed:
                break
            for source, place in enumerate(_places(protocol, state, me)):
                if _untouched(protocol, state, me, place):
                    step = _read_or_clear(protocol, state, me, source)
                    if isinstance(step, State):
                        state, moved = step, True
            after = _advanced(protocol, state, me)
            moved, state = moved or after is not state, after
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
