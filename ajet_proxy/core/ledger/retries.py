"""The request that a retry repeats: an earlier one of its episode, or one that the ledger knows nothing of.

A retry takes the calls of the request that it repeats out of training. If the client only counts its retries, the
earlier request may be one that came to nothing here. Then the retry takes no answered call out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.transcript import CallEntry, Transcript

MOST_NOTED = 100_000
"""So many refused requests are remembered; some 20 MB."""


def repeats(
    transcript: Transcript, body_hash: str, key: str | None, retries: int, *, agent: str = "", unseen: bool = False
) -> tuple[str, ...]:
    """The calls of the earlier request that a new one of `agent` repeats.

    With a `key`: the latest request with that key, if possible one that was lost, else one in flight, else one that is
    complete. The key, which takes the body in, is the request's own name. No request with another key is repeated.

    With nothing but a count of `retries`: the latest request of the same body and agent that was lost. One that is or
    may still be answered is repeated only if it can be no other. It must be the only one of that body that was asked
    with fewer retries and whose answer no later call continues. If a request of that body may be `unseen`, it must also
    be doubtful whether this one's client got the answer.
    """
    entries = [entry for entry in transcript.calls.values() if entry.reason != "retried"]
    if key is not None:
        earlier = [entry for entry in entries if entry.asked.idempotency_key == key]
    else:
        same = [entry for entry in entries if (entry.asked.body_hash, entry.asked.agent) == (body_hash, agent)]
        before = [entry for entry in same if entry.asked.retries < retries and (entry.doubtful or not unseen)]
        earlier = [entry for entry in same if entry.state == "lost"] or _only(transcript, before)
    order = ("complete", "running", "lost")
    latest = max(earlier, key=lambda entry: (order.index(entry.state), entry.asked.started_at), default=None)
    return tuple(name for name, entry in transcript.calls.items() if latest is not None and entry.asked is latest.asked)


def _only(transcript: Transcript, entries: Sequence[CallEntry]) -> list[CallEntry]:
    """The `entries` of requests whose answers may not have been received; none if those are several requests."""
    reached = transcript.texts.reached(
        (entry.text, entry.turn.start) for entry in transcript.calls.values()
        if entry.turn is not None and entry.text is not None
    ) if entries else {}
    received = {
        entry.asked for entry in entries
        if entry.turn is not None and entry.text is not None and entry.turn.sampled
        and reached[transcript.texts.holder(entry.text, entry.turn.end)] >= entry.turn.end
    }  # the prompt of another request begins with this call, so that its client must have had the answer
    open_ones = [entry for entry in entries if entry.asked not in received]
    return open_ones if len({entry.asked for entry in open_ones}) == 1 else []


class UnseenRequests:
    """Requests that the ledger knows nothing of, and that a retry may repeat. Those that were not let in are known by
    name. Before the time `since` there may have been any others."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._since: dict[str, float] = {}
        """For single tenants."""
        self.noted: Counter[tuple[str, str]] = Counter()

    def refused(self, name: tuple[str, str], at: float) -> None:
        """The request `name`, which is no retry, was not let in."""
        self.noted[name] += 1
        if len(self.noted) > MOST_NOTED:
            self.unread(at)

    def let_in(self, name: tuple[str, str]) -> None:
        """A retry of a refused request `name` is let in."""
        if self.noted[name] <= 1:
            del self.noted[name]
        else:
            self.noted[name] -= 1

    def unread(self, at: float, tenant: str | None = None) -> None:
        """Until `at` there may have been requests that nobody has read: of `tenant`, or of any if it is None."""
        if tenant is not None:
            self._since[tenant] = at
        else:
            self.since = at
            self.noted.clear()
            self._since.clear()

    def explains(self, name: tuple[str, str], episode: Episode | None) -> bool:
        """Tell whether the retry `name` may repeat an unseen request, in `episode` if that is known."""
        if name in self.noted or episode is None:
            return name in self.noted
        return episode.opening.at <= max(self.since, self._since.get(episode.opening.tenant, self.since))
