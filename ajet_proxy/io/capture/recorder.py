"""The calls of one exchange in the ledger: begun, then ended exactly once.

Ending is durable: `record` returns when the journal has it, and only then may the client see the end of its answer.
Tokens that came without logprobs are scored before that, and only under the weights that sampled them. Losing does not
wait, because there is nobody left to wait for it. An episode that was discarded in the meantime takes no more calls.

Invariant: a call stays complete only if its client was `sent` the end of its answer, and if the engine did not
contradict it afterwards (`take_back`). The relay reports both.

Next: ajet_proxy/io/capture/continuity.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from aiohttp import ClientResponse
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import History, marks_of
from ajet_proxy.core.protocol.ending import IN_DOUBT
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.call import (
    DISCONNECTED,
    REFUSED,
    WEIGHTS_CHANGED,
    Captured,
    Change,
    Lost,
    Origin,
    Outcome,
    Unscored,
    to_packed,
)
from ajet_proxy.core.trajectory.repair import Found
from ajet_proxy.io.engines.questions import Questions, Sampled
from ajet_proxy.io.ledger_port.port import Ending, Gone, LedgerPort, Whole, taken_back, unsent

HELD_S = 0.25
"""A client that breaks off by itself does so at once, upon what it was sent. One that leaves after the end was held
back for so long gave up on it."""


class Recorder:
    """Ends the calls of `origin`, which a `CallStarted` has announced. `exchange` tells what became of them."""

    def __init__(
        self, origin: Origin, exchange: Exchange, questions: Questions, *, ledger_port: LedgerPort,
        history: History | None = None, begins: tuple[str, ...] = (),
    ) -> None:
        """`questions` ask the engine more about a choice. `history` is the client's before any doubt is settled,
        because the next request is looked up by such a one. `begins` has what unanswered requests said and this one
        begins with."""
        self.origin = origin
        self.exchange = exchange
        self.engine = ""
        """Who answered: the address of the engine's route."""
        self.finished: Callable[[Origin, Captured], Origin] = lambda origin, _captured: origin
        """Is told of each whole choice, and has the last word on where it came from."""
        self.came_at = 0.0
        """When a piece of a streamed answer came last, by the monotonic clock; 0 if none has."""
        self.lost: set[int] = set()
        """The places of the choices that ended in no whole call."""
        self._status = 0
        self._held_since: float | None = None
        """From when on the end of the engine's answer is held back, by the monotonic clock; None if it is not."""
        self._ended = False
        self._sent = False
        """True if the client's connection has taken the bytes that complete the answer."""
        self._questions = questions
        self._ledger_port = ledger_port
        self._history, self._begins = history, begins
        self._sampled: Sampled = lambda scored: None
        self._version = origin.policy_version
        self._updates = -1
        self._changes: list[Change] = []
        self._same_text: dict[int, Found | None] = {}
        self._repeats: dict[bytes, Found | None] = {}
        """For each prompt, the earlier text that it repeats."""
        self._endings: list[Ending] = []

    def answered(self, answer: ClientResponse) -> None:
        """The engine's `answer` begins."""
        self.engine, self._status = str(answer.url).partition("?")[0], answer.status
        self.exchange.on_headers(answer.status, answer.headers.get("Content-Type", ""))

    def note_version(self) -> None:
        """Note whether other weights serve the model by now. A stream may have been frozen while they changed: what
        comes from now on counts as sampled by them. An answer in one piece counts as sampled by the first ones. Either
        way the call is uncertain, unless the engine says which token came from which weights (see
        `call.versions_of`)."""
        serving = self._ledger_port.serving
        if serving.policy_updates == self._updates:
            return
        self._updates = serving.policy_updates
        version = serving.policy_version(self.origin.model)
        if version != self._version:
            self._version = version
            self._changes.append(Change(version, self.exchange.reader.sampled))

    async def record(self) -> None:
        """Record the outcomes of the exchange; returns when they are on disk."""
        if self._ended:
            return
        self._held_since, outcomes = monotonic(), self.exchange.outcomes
        whole = [await self._scored(outcome) if isinstance(outcome, Unscored) else outcome for outcome in outcomes]
        whole = [await self._told_end(outcome) for outcome in whole]
        if self._ledger_port.serving.merge_policy == "repair":
            for outcome in whole:
                self._same_text[outcome.index] = await self._repeated(outcome)
        if any(isinstance(outcome, Captured) for outcome in whole):
            self._sampled = await self._questions.sampling()
        self._ended = True
        self._endings = [self._ending(outcome) for outcome in whole]
        await self._ledger_port.end(self._endings)
        self._held_since = None

    def holds_back(self) -> bool:
        """Tell whether a client that leaves now gave up on the end that it was not sent yet: for a disk that takes
        nothing, or for a question of ours to the engine."""
        return self._held_since is not None and monotonic() - self._held_since >= HELD_S

    def sent(self) -> None:
        """The client's connection has taken the bytes that complete the answer."""
        if not self._sent:
            self._sent = True
            self._ledger_port.sent([end.call.turn.call for end in self._endings if isinstance(end, Whole)])

    def lose(self, reason: str = DISCONNECTED) -> None:
        """Record that all calls are lost, unless the client was sent the end."""
        if not self._ended:
            self._ended = True
            self._ledger_port.lose([self._ending(Lost(index, reason)) for index in range(len(self.origin.calls))])
        elif not self._sent:
            self._end_again(unsent(self._endings, reason))

    def take_back(self, reason: str) -> None:
        """The calls that were recorded as complete are lost after all, unless their episode has settled with them."""
        self._end_again(taken_back(self._endings, reason))

    def _end_again(self, lost: Sequence[Ending]) -> None:
        if lost:
            self._endings = []
            self._ledger_port.lose(lost)

    async def _scored(self, choice: Unscored) -> Captured | Lost:
        outcome = await self._questions.score(choice) if self._same_weights() else None
        return outcome if outcome is not None and self._same_weights() else Lost(choice.index, WEIGHTS_CHANGED)

    async def _told_end(self, outcome: Captured | Lost) -> Captured | Lost:
        """`outcome` with the finish reason that tells whether it was cut. Its client keeps the engine's word."""
        if isinstance(outcome, Lost) or not outcome.token_ids:
            return outcome
        if outcome.finish_reason == "stop":
            self._questions.stopped(outcome)
        cut = outcome.finish_reason == IN_DOUBT and await self._questions.is_cut(outcome)
        return replace(outcome, finish_reason="length") if cut else outcome

    async def _repeated(self, outcome: Outcome) -> Found | None:
        """The earlier call whose text the prompt of `outcome` repeats in other tokens."""
        if not isinstance(outcome, Captured):
            return None
        model = self.origin.model or outcome.model
        prompt = pack_tokens(outcome.prompt_token_ids)
        if prompt not in self._repeats:
            calls = await self._ledger_port.nearest(self.origin.episode, model, self.origin.agent, prompt)
            self._repeats[prompt] = await self._questions.same_text(prompt, calls, model) if calls else None
        return self._repeats[prompt]

    def _same_weights(self) -> bool:
        """Tell whether the weights that the call began with have served it all along."""
        version = self._ledger_port.serving.policy_version(self.origin.model)
        return not self._changes and version == self.origin.policy_version

    def _ending(self, outcome: Captured | Lost) -> Ending:
        """The record of one choice, with where its history ends."""
        origin, exchange, captured = self.origin, self.exchange, outcome if isinstance(outcome, Captured) else None
        if exchange.kept_as is not None:
            self._ledger_port.keep(exchange.kept_as, exchange.ask)
        marks = marks_of(self._history, exchange.answers[outcome.index], captured)
        if isinstance(outcome, Lost):
            self.lost.add(outcome.index)
            return Gone(
                origin.episode, origin.calls[outcome.index], outcome.reason, marks, self.engine, begins=self._begins,
                status=self._status if outcome.reason == REFUSED else 0,
            )
        origin = self.finished(origin, outcome)
        same_text, sampling = self._same_text.get(outcome.index), self._sampled(outcome.scored)
        call = to_packed(outcome, origin, self._changes, same_text, sampling, exchange.response_id)
        return Whole(origin.episode, call, marks, self.engine, self._begins)
