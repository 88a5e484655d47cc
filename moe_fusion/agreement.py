"""The vote: ranks fuse only if all of them can and all of them would do the same.

A rank that fuses while its peer does not is a hang. So each rank posts a ballot in the group's
store, which lives on the CPU side of any backend, and one decision is written there with
compare-and-set: the first rank that has seen enough proposes, and every rank obeys what was
written, also a rank that comes late or that had given up waiting.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_fusion.limits import BALLOT_POLL_INTERVAL_S

_log = logging.getLogger(__name__)
_votes_held: Counter[tuple[str, tuple[int, ...]]] = Counter()


@dataclass(frozen=True)
class Ballot:
    """What one rank brings to a vote.

    Attributes:
        problem: why this rank cannot go on, one sentence, or None.
        facts: what must be the same on all ranks, by name; JSON values.
    """

    problem: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def difference(one: tuple[int, dict[str, Any]], two: tuple[int, dict[str, Any]]) -> str | None:
    """The first fact that two ranks do not share, one sentence; each is its rank and its facts."""
    (first_rank, first), (rank, facts) = one, two
    for name in sorted(first.keys() | facts.keys()):
        if first.get(name) != facts.get(name):
            return (
                f"{name}: expected the same on every rank, got {first.get(name)!r} on rank "
                f"{first_rank} and {facts.get(name)!r} on rank {rank}"
            )
    return None


def _objection(ballots: dict[int, Ballot]) -> str | None:
    """The first reason against in these ballots: problems by rank, then facts that differ."""
    for rank, ballot in sorted(ballots.items()):
        if ballot.problem is not None:
            return f"rank {rank}: {ballot.problem}"
    first_rank, *others = sorted(ballots)
    for rank in others:
        reason = difference((first_rank, ballots[first_rank].facts), (rank, ballots[rank].facts))
        if reason is not None:
            return reason
    return None


class _Poll:
    """One vote in one store."""

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int) -> None:
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.missing = set(range(world_size))
        self.ballots: dict[int, Ballot] = {}

    def key(self, rank: int) -> str:
        return f"{self.prefix}/rank{rank}"

    def post(self, ballot: Ballot) -> None:
        text = json.dumps({"problem": ballot.problem, "facts": ballot.facts}, sort_keys=True)
        self.store.set(self.key(self.rank), text)

    def collect(self) -> None:
        """Read the ballots that have arrived since the last time."""
        for rank in sorted(self.missing):
            if self.store.check([self.key(rank)]):
                self.ballots[rank] = Ballot(**json.loads(self.store.get(self.key(rank))))
                self.missing.discard(rank)

    def decided(self) -> bool:
        return bool(self.store.check([f"{self.prefix}/decision"]))

    def decide(self, proposal: str | None) -> str | None:
        """Propose, and return what holds: the first proposal that was written."""
        text = json.dumps({"reason": proposal})
        written = self.store.compare_set(f"{self.prefix}/decision", "", text)
        reason: str | None = json.loads(written)["reason"]
        return reason

    def run(self, ballot: Ballot, timeout_s: float) -> str | None:
        self.post(ballot)
        deadline = time.monotonic() + timeout_s
        while True:
            self.collect()
            objection = _objection(self.ballots) if self.ballots else None
            if objection is not None or not self.missing:
                return self.decide(objection)
            if time.monotonic() >= deadline:
                names = ", ".join(str(rank) for rank in sorted(self.missing))
                late = f"rank {names}: expected a vote within {timeout_s:g} s, got none"
                return self.decide(late)
            if self.decided():
                return self.decide(None)
            time.sleep(BALLOT_POLL_INTERVAL_S)


def vote(group: dist.ProcessGroup, ballot: Ballot, timeout_s: float) -> str | None:
    """Hold one vote over ``group``; every rank must call it, in the same order. It never raises.

    Args:
        group: the group; its store carries the vote.
        ballot: this rank's.
        timeout_s: how long to wait for the other ranks' ballots, in seconds.

    Returns:
        None if all agree, else the reason against, which is the same on every rank.
    """
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
        number = _votes_held[group.group_name, ranks]
        _votes_held[group.group_name, ranks] += 1
        store = dist.distributed_c10d._get_process_group_store(group)
        prefix = f"moe_fusion/{'.'.join(map(str, ranks))}/{number}"
        return _Poll(store, prefix, group.rank(), group.size()).run(ballot, timeout_s)
    except Exception as error:  # noqa: BLE001 - a lost store must not stop the composite path
        _log.debug("moe-fusion: no vote", exc_info=True)
        return f"the group's store: expected a vote, got {type(error).__name__}: {error}"
