"""Several daemons as one: what is ready anywhere is leased, all gates close and open together, one may go and return.

A lease belongs to the daemon that gave it: it is extended, acknowledged and given back there and nowhere else. Of
several daemons each is asked for one group at a time, in turn. So a batch takes what is ready anywhere, and a busy
daemon starves no other. Gates are closed and opened side by side, and no daemon's agents wait for another's.

A daemon that does not answer within `PATIENCE_S` is *away*: it is asked again with growing pauses, and training goes on
with the rest. It loses nothing by that. Its leases run out by themselves, and its acknowledgements are kept (`Away`
says so). When it is back, it hears the policy before anything is leased from it. Its gate is opened, or closed if the
others' are. A daemon may come back between two questions, with an empty data directory, and was never missed. So the
policy is told with every gate that opens, and whenever nobody has a batch.

A lone daemon has nobody to stand in for it. It is waited for as long as the first connection was, and then its failure
ends the run. So does the absence of all.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ajet_sdk.errors import AjetError, NotFound, NotReady, ProxyUnreachable
from ajet_sdk.operations import PASSING
from ajet_sdk.routes import Attend, Lease, SetMix
from ajet_sdk.sample import Batch
from ajet_trainer.config import Config
from ajet_trainer.link import ANSWER_S as LONE_ANSWER_S
from ajet_trainer.link import Link, TlsRefused, tls_context
from ajet_trainer.trained_batches import ANY

LEASE_S = 300.0
"""How long a lease lasts that is not extended."""
CONNECT_S = 120.0
"""How long a daemon that is alone is waited for, and one of several that has to be there."""
PATIENCE_S = 5.0
"""How long one of several daemons may be out of reach before the others go on without it; a restart takes less."""
ANSWER_S = 10.0
"""How long one of several daemons may take over an answer."""
DRAIN_SLICE_S = 5.0
"""One of several daemons is asked again and again whether it has drained, so that one that froze is noticed."""
PAUSES_S = (1.0, 30.0)
"""The first and the longest pause before a daemon that is away is asked again."""


class Away(ProxyUnreachable):
    """This daemon cannot be asked now; others can."""


@dataclass(frozen=True, slots=True)
class Leased:
    """A batch and the daemon that gave it."""

    daemon: str
    batch: Batch


@dataclass(slots=True)
class Member:
    """One daemon. `away` says why it is away, if it is; `due` is when it is asked again. It is `met` once it has let us
    in as the trainer of our model."""

    link: Link
    met: bool = False
    away: str = ""
    since: float = 0.0
    due: float = 0.0
    pause: float = 0.0
    groups: int = 0

    @property
    def url(self) -> str:
        return self.link.url


class Daemons:
    """What a run asks of its daemons; usually there is one. Every method raises an `AjetError` when it fails."""

    def __init__(
        self,
        links: Sequence[Link],
        *,
        deadline_s: float = CONNECT_S,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._members = [Member(link) for link in links]
        self._deadline_s, self._say, self._clock, self._sleep = deadline_s, say, clock, sleep
        self._policy: tuple[str, int, Sequence[str] | None] | None = None
        self._mix: SetMix | None = None
        self._shut = self._attends = False
        self._turn = 0
        self.gone = Counter[str]()
        """What went of other runs when ours began: figures for `metrics.jsonl`."""

    @classmethod
    def of(
        cls, config: Config, say: Callable[[str], None], *, trainer: Attend | None = None,
        deadline_s: float = CONNECT_S,
    ) -> Daemons:
        """The daemons that `config` names; `trainer` is who we are."""
        alone = len(config.proxy_url) == 1
        secured = tls_context(config)
        keys = config.key if len(config.key) > 1 else (config.key or ("",)) * len(config.proxy_url)
        links = [
            Link(
                url,
                model=config.model_name,
                key=key,
                trainer=trainer,
                tls=secured,
                certified=bool(config.tls_cert),
                deadline_s=deadline_s if alone else PATIENCE_S,
                answer_s=LONE_ANSWER_S if alone else ANSWER_S,
            )
            for url, key in zip(config.proxy_url, keys, strict=True)
        ]
        return cls(links, deadline_s=deadline_s, say=say)

    @property
    def alone(self) -> bool:
        return len(self._members) == 1

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(member.url for member in self._members)

    def account(self) -> dict[str, Any]:
        """How many groups each daemon gave, and why it is away, if it is."""
        return {member.url: {"groups": member.groups, "away": member.away or None} for member in self._members}

    def meet(self) -> None:
        """Checks that every daemon that answers takes our key as a trainer's, and lets us in as that of our model;
        otherwise an error names it. Of several, those that do not answer in the time of a first connection are away.
        One must be there."""
        self._attends = True
        failures = _side_by_side(self._members, lambda link: self._come(link.within(self._deadline_s)))
        for member, error in failures:
            if isinstance(error, TlsRefused):
                raise error
            if isinstance(error, ProxyUnreachable) and len(failures) == len(self._members):
                raise ProxyUnreachable(f"{error.message}. Is ajet-proxy running, and is proxy_url its address?")
            if self.alone or not gone(error):
                raise type(error)(f"{member.url}: {error.message}", code=error.code) from error
        for member, error in failures:
            self._lose(member, error)

    def _come(self, link: Link) -> None:
        link.meet()
        link.says("comes")
        self._member(link.url).met = True

    def begin(self) -> None:
        """Our run has the model everywhere from now on, before the engines have any of its weights. What waited for
        another run is discarded; says how much."""
        if self._attends:
            self._each(lambda link: self._note(link, link.says("begins")))

    def beat(self) -> None:
        """Says once to every daemon that has let us in that we are at work. Another thread may call this."""
        met = [member for member in self._members if member.met]
        _side_by_side(met, lambda link: link.within(0.0).says("beats"))

    def check(self) -> None:
        """Raises `Conflict` if another trainer has taken our place: then nothing of ours may reach the engines."""
        if self._attends:
            self._each(lambda link: link.says("beats"))

    def leave(self) -> None:
        """Nobody need wait for us any more."""
        met = [member for member in self._members if member.met]
        _side_by_side(met, lambda link: link.within(0.0).says("leaves"))

    def _note(self, link: Link, told: Mapping[str, Any] | None) -> None:
        """Says what went of another run at a daemon."""
        found = {name: (told or {}).get(name, 0) for name in ("discarded", "void")}
        if any(found.values()):
            self.gone.update({"other_run_episodes": found["discarded"], "other_run_leases": found["void"]})
            self._say(f"{link.url}: another run had this model: {found['discarded']} of its episodes are discarded, "
                      f"and {found['void']} of its leases are void")  # fmt: skip

    def lease(self, ask: Lease) -> Leased | None:
        """The next batch from anyone, or None when nobody had one within ``ask.wait_s``.

        A lone daemon is asked for all that `ask` wants; of several, each is asked for one group in its turn.
        """
        here = self._here()
        if not here:
            latest, limit_s = max(self._members, key=lambda member: member.since), self._deadline_s
            if self._clock() - latest.since > limit_s:
                raise ProxyUnreachable(f"no daemon has answered for {limit_s:g} s; the last said: {latest.away}")
            self._sleep(ask.wait_s)
            return None
        for wait_s in (ask.wait_s,) if self.alone else (0.0, ask.wait_s / len(here)):
            one = replace(ask, groups=ask.groups if self.alone else 1, wait_s=wait_s)
            for member in [*self._members[self._turn :], *self._members[: self._turn]]:
                if member.away:
                    continue
                with suppress(Away), self._asking(member):
                    if (batch := member.link.lease(one)) is not None:
                        self._turn = (self._members.index(member) + 1) % len(self._members)
                        member.groups += len(batch.groups)
                        return Leased(member.url, batch)
        self._each(self._tell)
        return None

    def busy(self) -> dict[str, float]:
        """How long requests were under way at each daemon since its start. A figure is worth no waiting: who does not
        answer at once is left out."""
        out = {}
        for member in self._here():
            with suppress(AjetError):
                if (seconds := member.link.busy_s()) is not None:
                    out[member.url] = seconds
        return out

    def waits_for(self) -> tuple[str, int] | None:
        """The model that ours waits for at a daemon, and how many updates that is behind. Who does not answer at once
        is left out."""
        for member in self._here():
            with suppress(AjetError):
                if (found := member.link.waits_for()) is not None:
                    return found
        return None

    def ack(
        self, daemon: str, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None, *,
        last: bool = False,
    ) -> None:
        """`batch` of `daemon` is trained and saved, but for its episodes `filtered`. Raises `NotFound` or `Conflict`
        when the lease is gone, and `Away` when this must be said later. The `last` time there is no later, and it is
        tried for long."""
        if daemon == ANY:
            self._ack_somewhere(batch, policy_version, filtered, last)
            return
        member = self._member(daemon)
        if member.away and not last:
            raise Away(f"{member.url} is away: {member.away}")
        with self._asking(member):
            (member.link.within(self._deadline_s) if last else member.link).ack(batch, policy_version, filtered)

    def nack(self, daemon: str, batch: str) -> None:
        """Gives `batch` of `daemon` back untrained."""
        self._once(daemon).nack(batch)

    def extend(self, daemon: str, batch: str, lease_s: float) -> None:
        """The lease of `batch` of `daemon` now ends `lease_s` seconds from now. Another thread may call this. One of
        several daemons is tried only once, so that it holds up no other's leases."""
        self._once(daemon).extend(batch, lease_s)

    def evaluate(self, model: str, episodes: int, name: str) -> dict[str, int]:
        """Wants evaluation episodes of `model` of all daemons together, as the evaluation `name`: how many of each."""
        here, out = self._here(), dict[str, int]()
        for place, member in enumerate(here):
            part = episodes // len(here) + (place < episodes % len(here))
            if part:
                try:
                    with suppress(Away), self._asking(member):
                        member.link.evaluate(model, part, name)
                        out[member.url] = part
                except NotFound:
                    self._say(f"the daemon at {member.url} knows no evaluations: upgrade it")
        return out

    def evaluation(self, daemon: str, name: str) -> dict[str, Any]:
        """How the part of `daemon` in an evaluation stands. Raises `NotFound` if it knows of none, and `Away`."""
        member = self._member(daemon)
        if member.away:
            raise Away(f"{member.url} is away: {member.away}")
        with self._asking(member):
            return member.link.evaluation(name)

    def direct(self, mix: SetMix) -> None:
        """Which share of the groups each lane has everywhere from now on, and how far ahead agents may play. What `mix`
        leaves out stays as it is, and a daemon that comes back hears all of it."""
        given = {one.name: value for one in fields(mix) if (value := getattr(mix, one.name)) is not None}
        self._mix = replace(self._mix or SetMix(), **given)
        self.look()
        self._each(lambda link: self._direct(link, mix))

    def let_go(self, ahead: int) -> None:
        """Nobody is held any more for the `ahead` that this trainer has set."""
        self._mix = replace(self._mix or SetMix(), ahead=0)
        self.look()
        self._each(lambda link: link.let_go(ahead))

    def announce(self, model: str, version: int, upstreams: Sequence[str] | None = None) -> None:
        """`model` is at `version` everywhere; `upstreams`, if given, are its engines from now on."""
        self._policy = (model, version, upstreams)
        self.look()
        self._each(lambda link: self._note(link, link.announce(model, version, upstreams)))

    def close_gate(self, reason: str, wait_s: float) -> None:
        """Returns once every daemon that is not away holds new requests and has no call in flight. Called again while
        closed, it closes the gates of those that have come back since."""
        self._shut = True
        self.look()

        def close(link: Link) -> None:
            if self.alone:
                return link.close_gate(reason, wait_s)
            until = self._clock() + wait_s
            while True:
                try:
                    return link.close_gate(reason, max(0.0, min(DRAIN_SLICE_S, until - self._clock())))
                except NotReady as error:
                    if gone(error) or self._clock() >= until:
                        raise

        self._each(close)

    def open_gate(self, policy_version: int) -> None:
        """Lets requests through everywhere, served by `policy_version`."""
        self._shut = False
        if self._policy is not None:
            self._policy = (self._policy[0], policy_version, self._policy[2])
        self._each(self._tell if self._policy else lambda link: link.open_gate(policy_version))
        self.look()

    def look(self) -> None:
        """Asks the daemons that are away and whose pause is over. One that answers is told what it missed."""
        for member in self._members:
            if not member.away or self._clock() < member.due:
                continue
            with suppress(Away), self._asking(member):
                if self._attends and not member.met:
                    self._come(member.link.within(0.0))
                    self._note(member.link, member.link.within(0.0).says("begins"))
                self._tell(member.link.within(0.0))
                self._direct(member.link.within(0.0), self._mix)
                member.away, member.pause = "", 0.0
                self._say(f"the daemon at {member.url} is back")

    def hurry(self, deadline_s: float) -> None:
        """Prepares for the end: nobody is waited for longer than `deadline_s`; all that are away are tried again."""
        for member in self._members:
            member.link.deadline_s = min(member.link.deadline_s, deadline_s)
            member.due = 0.0

    def close(self) -> None:
        """Ends the connections."""
        for member in self._members:
            member.link.close()

    def _tell(self, link: Link) -> None:
        """Tells a daemon what it must know, whatever it knows already."""
        if self._policy is not None:
            self._note(link, link.announce(*self._policy))
            if not self._shut:
                link.open_gate(self._policy[1])

    def _direct(self, link: Link, mix: SetMix | None) -> None:
        """Tells a daemon the mix. An older one leases what was complete first, and holds nobody back."""
        with suppress(NotFound):
            if mix is not None:
                link.direct(mix)

    def _here(self) -> list[Member]:
        return [member for member in self._members if not member.away]

    def _member(self, daemon: str) -> Member:
        return next(member for member in self._members if member.url == daemon)

    def _once(self, daemon: str) -> Link:
        member = self._member(daemon)
        return member.link if self.alone else member.link.within(0.0)

    @contextmanager
    def _asking(self, member: Member) -> Iterator[None]:
        """Raises `Away` when `member` cannot be asked now and others can."""
        try:
            yield
        except AjetError as error:
            if self.alone or not gone(error):
                raise
            self._lose(member, error)
            raise Away(f"{member.url} is away: {error.message}") from error

    def _ack_somewhere(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None, last: bool) -> None:
        """Acknowledges a batch whose daemon has another URL by now; ids of batches are unique everywhere."""
        away: Away | None = None
        for member in self._members:
            try:
                return self.ack(member.url, batch, policy_version, filtered, last=last)
            except NotFound:
                continue
            except Away as error:
                away = error
        raise away or NotFound(f"no daemon knows batch {batch}")

    def _each(self, action: Callable[[Link], object]) -> None:
        """Does `action` on all that are not away, at once. When all have ended, raises the first error that is not an
        absence."""
        refusals = []
        for member, error in _side_by_side(self._here(), action):
            if self.alone or not gone(error):
                refusals.append(error)
            else:
                self._lose(member, error)
        if refusals:
            raise refusals[0]

    def _lose(self, member: Member, error: AjetError) -> None:
        now = self._clock()
        first, longest = PAUSES_S
        if not member.away:
            member.since = now
            rest = len(self._here()) - 1
            word = f"training continues with {rest} of {len(self._members)}" if rest else "no other is left"
            self._say(f"the daemon at {member.url} is away, {word}: {error.message}")
        member.away = error.message
        member.pause = min(max(first, 2 * member.pause), longest)
        member.due = now + member.pause


class Keeper:
    """Keeps the leases of the batches in hand alive, from `hold` to `release`, while they are trained or wait for their
    checkpoint. Use as a context manager; leaving it stops the thread.

    The thread extends every held lease three times per lease length. A refusal is not raised: the batch may
    be in the weights already, and `TrainedBatches` knows what to do when its acknowledgement is refused too.
    """

    def __init__(self, daemons: Daemons, lease_s: float = LEASE_S) -> None:
        self._daemons, self.lease_s = daemons, lease_s
        self._held: dict[tuple[str, str], None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def hold(self, daemon: str, batch: str) -> None:
        with self._lock:
            self._held[daemon, batch] = None

    def release(self, daemon: str, batch: str) -> None:
        with self._lock:
            self._held.pop((daemon, batch), None)

    @property
    def held(self) -> tuple[tuple[str, str], ...]:
        """Daemon and id of the batches in hand, oldest first."""
        with self._lock:
            return tuple(self._held)

    def extend_all(self) -> None:
        """One round over everything held; a failure leaves the rest untouched. A daemon that does not answer is asked
        only once, since waiting for it batch after batch would let the leases of the others run out."""
        silent: set[str] = set()
        for daemon, batch in self.held:
            if daemon in silent:
                continue
            try:
                self._daemons.extend(daemon, batch, self.lease_s)
            except ProxyUnreachable:
                silent.add(daemon)
            except AjetError:
                continue

    def _run(self) -> None:
        while not self._stop.wait(self.lease_s / 3):
            self.extend_all()


def gone(error: AjetError) -> bool:
    """Whether `error` speaks of the daemon's condition, which may pass, and not of what was asked."""
    return error.status in PASSING and error.code != "gate_closing"


def _side_by_side(members: Sequence[Member], action: Callable[[Link], object]) -> list[tuple[Member, AjetError]]:
    """Does `action` on all `members` at once; returns those where it failed, and how."""

    def outcome(member: Member) -> AjetError | None:
        try:
            action(member.link)
        except AjetError as error:
            return error
        return None

    if len(members) < 2:
        outcomes = [outcome(member) for member in members]
    else:
        with ThreadPoolExecutor(len(members)) as pool:
            outcomes = list(pool.map(outcome, members))
    return [(member, error) for member, error in zip(members, outcomes, strict=True) if error is not None]
