"""Laws of clients, lanes, groups and plays, after each fault and in the end.

The daemon under test notes each lease as it is applied (`tests.faults.daemon`), and once more when it reads its journal
again. So the lanes of every leased group are known in their order, and that a restart makes the same of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import agent
from tests.faults.notes import Reader
from tests.faults.player import GROUP, REPEAT, TASKS, TTL_S

SHARES = {"math": 0.4, "code": 0.3, "word": 0.2, agent.LANE: 0.1}
"""Plays have tasks in the same proportion; the last lane is the stranger's."""
LEAST, GROUPS = 2, 2
"""Episodes of the smallest group, and groups of a batch."""
GONE_WITHIN_S = TTL_S + 1.0
LATE_S = 300.0
"""The machine's own delay: so late a process may be that has nothing to wait for."""
Get = Callable[[str], Any]


@dataclass
class Lease:
    """A lease as the daemon noted it: the group keys of each group, with the numbers of episodes, and how many whole
    groups each lane had."""

    batch: str
    model: str
    episodes: list[str]
    groups: list[tuple[list[list[str]], int]]
    had: dict[str, int]
    dealt: dict[str, int]
    owed: dict[str, int]

    @property
    def lanes(self) -> list[str]:
        return [keys[0][0] for keys, _ in self.groups]


class Leases:
    """Reads the notes of all lives of the daemon. A later note stands for an earlier one of its number: that lease was
    never acknowledged to anybody, or is read from the journal again."""

    def __init__(self, path: Path) -> None:
        self._path, self._reader = path, Reader()
        self.found: dict[int, Lease] = {}
        self.again = 0
        """The number that was read again, and was the same."""

    def read(self) -> None:
        for note in self._reader.new(self._path):
            number, lease = note.pop("number"), Lease(**note)
            known = self.found.get(number)
            if known is not None and known.batch == lease.batch:
                assert known == lease, f"a restart makes another lease of {lease.batch}: {known}, {lease}"
                self.again += 1
            self.found[number] = lease

    def in_order(self) -> list[Lease]:
        assert sorted(self.found) == list(range(len(self.found)))
        return [self.found[number] for number in range(len(self.found))]


def check_groups(leases: Iterable[Lease]) -> None:
    """No group mixes group keys (a task, a lane, a revision), and none is too small or too large."""
    for lease in leases:
        for keys, size in lease.groups:
            assert len(keys) == 1, f"a group of batch {lease.batch} mixes {keys}"
            assert LEAST <= size <= GROUP, f"a group of batch {lease.batch} has {size} episodes"


def check_law(leases: Iterable[Lease], shares: Mapping[str, float]) -> tuple[int, int]:
    """The law of the mix over every prefix of the leased groups. Returns how many groups were leased before any lane
    had lent a turn, and after how many leases lanes owed turns."""
    taken, total, strict, owing, lent = Counter[str](), 0, 0, 0, False
    for lease in leases:
        dealt, owed = lease.dealt, lease.owed
        if taken + Counter(lease.lanes) != Counter(dealt):
            rich = all(lease.had.get(lane, 0) >= len(lease.lanes) for lane in shares)
            assert lent or not rich, f"a lane lent its turn though every lane had enough: {lease}, {dict(taken)}"
            lent = True
        for lane in lease.lanes:
            taken[lane] += 1
            total += 1
            far = max(abs(taken[one] - share * total) for one, share in shares.items())
            assert lent or far < 1, f"after {total} groups {dict(taken)} is {far} from the shares"
        strict += 0 if lent else len(lease.lanes)
        owing += bool(owed)
        assert sum(dealt.values()) == total, f"{dealt} turns were dealt for {total} groups"
        assert all(abs(dealt.get(one, 0) - share * total) < 1 for one, share in shares.items()), dealt
        assert not sum(owed.values()) and all(one <= GROUPS for one in owed.values()), owed
    return strict, owing


@dataclass
class Swarm:
    """`get` asks the daemon, `now` is the time of this process."""

    get: Get
    leases: Leases
    counts: Counter[str]
    now: Callable[[], float] = time.monotonic
    watched: dict[str, float] = field(default_factory=dict)
    """The clients that were killed: until when each must be gone."""
    slowest: float = 0.0

    def killed(self, clients: Iterable[str]) -> None:
        """The process of these clients is dead, or was replaced."""
        self.watched |= dict.fromkeys(clients, self.now() + GONE_WITHIN_S)

    def restarted(self) -> None:
        """The daemon is there, again or after it could not write: each client has its time from now on."""
        self.killed(self.watched)

    def after_a_fault(self, *, wrote: bool) -> None:
        """`wrote` says that the daemon could write all the time."""
        self.leases.read()
        check_groups(self.leases.found.values())
        asked = self.now()
        overdue = {client for client, until in self.watched.items() if wrote and asked > until}
        clients = self._clients()
        while still := [one for one in overdue if one in clients and clients[one]["state"] == "joined"]:
            assert self.now() < asked + LATE_S, f"clients are there though they were killed long ago: {still}"
            time.sleep(0.1)
            clients = self._clients()
        for one in clients.values():
            if one["state"] == "gone":
                assert one["episodes"]["open"] == 0, f"a client is gone, and has episodes open: {one}"
                if one["reason"] == "silent":
                    silent = one["gone_at"] - one["heard_at"]
                    assert silent >= one["ttl_s"], f"taken for gone too early: {one}"
                    if wrote:
                        self.slowest = max(self.slowest, silent)
        joined = {name for name, one in clients.items() if one["state"] == "joined"}
        self.watched = {client: until for client, until in self.watched.items() if client in joined}

    def _clients(self) -> dict[str, dict[str, Any]]:
        return {one["client"]: one for one in self.get("/clients")["clients"]}
    def in_the_end(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        self.leases.read()
        leases = self.leases.in_order()
        check_groups(leases)
        laws = [check_law([lease for lease in leases if lease.model == model], SHARES) for model in agent.MODELS]
        strict, owing = map(sum, zip(*laws, strict=True))
        self._check_plays(records.values())
        reasons = Counter(record["reason"] for record in records.values() if record["state"] == "discarded")
        known = self.get("/clients")["clients"]
        groups = [size for lease in leases for _, size in lease.groups]
        self.counts |= Counter({
            "groups leased": len(groups), "… smaller than others, of tasks that had ended": sum(
                size < GROUP for size in groups),
            "… within one of its share for every lane, until one lent a turn": strict,
            "leases after which lanes owed turns": owing,
            "leases that were read from the journal again, and the same": self.leases.again,
            "revisions among the leased groups": len({keys[0][2] for lease in leases for keys, _ in lease.groups}),
            "clients that were taken for gone": sum(one.get("reason") == "silent" for one in known),
            "clients that were replaced": sum(one.get("reason") == "replaced" for one in known),
            "… slowest, in ms since its last sign of life": round(1000 * self.slowest),
        })  # fmt: skip
        self.counts |= Counter({f"episodes discarded as {reason}": number for reason, number in reasons.items()})

    def _check_plays(self, records: Iterable[Mapping[str, Any]]) -> None:
        """No place was had twice, and each place of a play that is whole was had."""
        kept: dict[str, list[int]] = {}
        for record in records:
            if record.get("play") is not None and (record["state"] != "discarded" or record["reason"] == "filtered"):
                kept.setdefault(record["play"], []).append(record["place"])
        for play, places in kept.items():
            told = self.get(f"/plays/{play}")
            assert len(places) == len(set(places)), f"a place of {play} was had twice: {sorted(places)}"
            assert told["opened"] == len(places) and told["done"] <= told["opened"], (told, sorted(places))
            lane = play.rpartition(":")[2]
            assert told["episodes"] == sum(task.startswith(f"{lane}/") for task in TASKS) * REPEAT
            if not told["missing"]:
                assert sorted(places) == list(range(told["episodes"]))
                self.counts["plays of a lane, each of whose places was had once"] += 1
            else:
                self.counts["plays of a lane that were not played to their end"] += 1
