"""Agreement that needs no common moment: each rank answers when it gets there, and few wait.

A compile is not a collective. One rank compiles while its peer is served from a compile cache, and
the ranks of another pipeline stage get there later or never. So a rank answers with what must be
the same on all ranks (its *facts*) in the group's store and goes on; only a rank that has to decide
waits. Ranks agree on facts, by their hash, once all of them have answered with these. One verdict
for a hash is written with compare-and-set, and every rank obeys it: ranks that agreed cannot part
later, and a rank that comes late obeys those that gave up waiting for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_fusion.agreement import difference
from moe_fusion.limits import BALLOT_POLL_INTERVAL_S

Facts = dict[str, Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What holds for one group and one set of facts, on every rank, for good.

    Attributes:
        reason: why the ranks do not agree, one sentence, or None when they do.
    """

    reason: str | None = None


class RollCall:
    """One group's answers to one set of facts.

    Args:
        store: what all ranks of the group reach.
        life: which of the groups that were created one after the other on this store it is.
        ranks: the group's ranks in the world.
        rank: this one's, in the world.
        facts: JSON values by name.
    """

    def __init__(
        self, store: Store, life: int, ranks: tuple[int, ...], rank: int, facts: Facts
    ) -> None:
        self.store = store
        self.ranks = ranks
        self.rank = rank
        text = json.dumps(facts, sort_keys=True)
        self.facts: Facts = json.loads(text)  # as the peers read them: no tuples
        self.root = f"{_root(ranks)}/{life}"
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._answered = False

    def answer(self) -> None:
        """Say that this rank has these facts; nobody waits."""
        if not self._answered:
            text = json.dumps({"hash": self.hash, "facts": self.facts})
            self.store.set(f"{self.root}/last/{self.rank}", text)
            self.store.set(self._answer_key(self.hash, self.rank), "here")
            self._answered = True

    def look(self) -> Verdict | None:
        """The verdict, as far as it can be known now; nobody waits."""
        self.answer()
        if self.store.check([self._verdict_key(self.hash)]):
            return self._decide(None)
        if self.store.check([self._answer_key(self.hash, rank) for rank in self.ranks]):
            return self._decide(None)
        return None

    def wait(self, timeout_s: float) -> Verdict:
        """The verdict, for which ranks that are missing are waited for."""
        deadline = time.monotonic() + timeout_s
        verdict = self.look()
        if verdict is not None:
            return verdict
        waiting = f"{self.root}/waiting/{self.rank}"
        self.store.set(waiting, self.hash)
        try:
            while verdict is None:
                if time.monotonic() >= deadline:
                    return self._decide(self._absence(timeout_s))
                time.sleep(BALLOT_POLL_INTERVAL_S)
                verdict = self.look() or self._deadlock()
            return verdict
        finally:
            self.store.set(waiting, "")

    def _answer_key(self, facts_hash: str, rank: int) -> str:
        return f"{self.root}/{facts_hash}/{rank}"

    def _verdict_key(self, facts_hash: str) -> str:
        return f"{self.root}/{facts_hash}/verdict"

    def _decide(self, proposal: str | None, facts_hash: str | None = None) -> Verdict:
        """Propose, and return what holds: the first proposal that was written."""
        key = self._verdict_key(facts_hash or self.hash)
        written = self.store.compare_set(key, "", json.dumps({"reason": proposal}))
        return Verdict(**json.loads(written))

    def _missing(self) -> list[int]:
        return [r for r in self.ranks if not self.store.check([self._answer_key(self.hash, r)])]

    def _deadlock(self) -> Verdict | None:
        """A verdict where a peer waits for this rank, with other facts, as this one waits for it.

        Neither can answer as the other before its own wait is over, so both are decided here.
        """
        for rank in self._missing():
            waiting = f"{self.root}/waiting/{rank}"
            theirs = self.store.get(waiting).decode() if self.store.check([waiting]) else ""
            if theirs and not self.store.check([self._answer_key(theirs, self.rank)]):
                reason = self._differs(rank)
                if reason is not None:
                    self._decide(reason, theirs)
                    return self._decide(reason)
        return None

    def _differs(self, rank: int) -> str | None:
        """How the last answer of ``rank`` differs from this rank's facts, if it does."""
        last = f"{self.root}/last/{rank}"
        if not self.store.check([last]):
            return None
        facts = json.loads(self.store.get(last))["facts"]
        return difference(*sorted([(self.rank, self.facts), (rank, facts)]))

    def _absence(self, timeout_s: float) -> str:
        missing = self._missing()
        for rank in missing:
            reason = self._differs(rank)
            if reason is not None:
                return reason
        names = ", ".join(map(str, missing))
        return f"rank {names}: expected an answer within {timeout_s:g} s, got none"


def _root(ranks: tuple[int, ...]) -> str:
    return f"moe_fusion/roll_call/{'.'.join(map(str, ranks))}"


@dataclass
class _Group:
    """What this process knows of one group: a verdict or an open call, by facts."""

    life: int | None = None
    calls: dict[str, Verdict | RollCall] = field(default_factory=dict)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether this process stands for all ranks of ``group``."""
    return bool(dist.get_backend(group) == "fake")


def look(group: dist.ProcessGroup, facts: Facts) -> Verdict | None:
    """Answer for this rank, and the verdict of ``group`` on ``facts`` if it is known by now.

    It never waits and never raises.
    """
    return _ask(group, facts, None)


def wait(group: dist.ProcessGroup, facts: Facts, timeout_s: float) -> Verdict:
    """The verdict of ``group`` on ``facts``: those that are missing are waited for.

    It never raises: without a store there is a reason.

    Args:
        group: the group; its store carries the answers.
        facts: what must be the same on all ranks, by name; JSON values.
        timeout_s: how long to wait for the other ranks, in seconds.
    """
    verdict = _ask(group, facts, timeout_s)
    assert verdict is not None
    return verdict


def _ask(group: dist.ProcessGroup, facts: Facts, timeout_s: float | None) -> Verdict | None:
    known = _groups.setdefault(group, _Group()).calls
    key = json.dumps(facts, sort_keys=True)
    call = known.get(key)
    if isinstance(call, Verdict):
        return call
    try:
        if is_fake(group):
            return Verdict()
        if call is None:
            call = known[key] = _open(group, facts)
        verdict = call.look() if timeout_s is None else call.wait(timeout_s)
    except Exception as error:  # noqa: BLE001 - a lost store must not stop a compile
        _log.debug("moe-fusion: no roll call", exc_info=True)
        verdict = Verdict(f"the group's store: expected answers, got {type(error).__name__}")
    if verdict is not None:
        known[key] = verdict
        if verdict.reason is not None:
            name = group.group_name
            _log.warning("group %r stays unfused: the ranks disagree: %s", name, verdict.reason)
    return verdict


def _open(group: dist.ProcessGroup, facts: Facts) -> RollCall:
    store = dist.distributed_c10d._get_process_group_store(group)
    ranks, rank, known = tuple(dist.get_process_group_ranks(group)), dist.get_rank(), _groups[group]
    if known.life is None:  # a store may outlive a group, and what its ranks once answered
        known.life = store.add(f"{_root(ranks)}/lives/{rank}", 1)
    return RollCall(store, known.life, ranks, rank, facts)
