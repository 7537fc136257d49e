"""A dialect: one protocol that agents speak, and what the proxy needs to know of it.

A `Dialect` is stateless and knows field names only. It makes an `Ask` of a request: what to ask the engine for on the
agent's behalf, and what the agent must not see of the answer. It also reads the history in a request, and outlines the
turn that continues one. A `Reader` holds what has been read of one answer, and `exchange.Exchange` drives it. A
protocol that is not the engine's own is translated on the way (`anthropic.messages`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ajet_proxy.core.continuity.memory import Outline
from ajet_proxy.core.conversation.history import PROBE, History, Kind, read
from ajet_proxy.core.protocol.json_edits import Spanned
from ajet_proxy.core.protocol.request import JsonBody, flag
from ajet_proxy.core.protocol.sse import SseEvent
from ajet_proxy.core.trajectory.call import Outcome

DONE = b"[DONE]"
COMMENT = b": waiting for the engine\n"
"""Sent to a waiting client while there is nothing to imitate. Readers of server-sent events skip it. No empty line
follows: for some readers that would end an event, an empty one."""
VERSIONS = "return_weight_versions"
"""Asks vLLM, from 0.33 on, which weights sampled each token."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The agent asked for its prompt before the answer. `texts` are what the engine leaves out of each choice when it
    is asked for ids; `prompt_logprobs` says that the agent asked for those too."""

    texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False


Skip = Literal["prompt_embeds", "beam_search", "multimodal", "echo", "background", "unaskable", "no_chat_route"]
"""The reason to send a request unchanged, and to lose its calls."""


class Ask(Struct, frozen=True):
    """The question in its new form: `fields` (name to JSON text) to set in the request, how many choices will come, and
    what the agent must not see. With `skip`, a reason, the request goes out unchanged and its calls are lost."""

    fields: Mapping[str, str] = {}
    choices: int = 1
    prompts: int = 1
    """Each has as many choices as the others; those of the first come first."""
    hide_ids: bool = False
    """Of the prompt, too, unless `show_prompt`."""
    hide_logprobs: bool = False
    hide_reasoning: bool = False
    hide_versions: bool = False
    show_prompt: bool = False
    echo: Echo | None = None
    skip: Skip | None = None


Questions = list[tuple[str, dict[str, Any]]]
"""Questions to an engine: routes and bodies."""


class Doubt(Struct, frozen=True):
    """Something that the engine decides by itself, and that changes what some requests mean. `questions` show it of a
    model. `settled` makes the dialect that holds of the answers, each decoded JSON, or None for a refusal; None if the
    engine said nothing of it."""

    questions: Callable[[str], Questions]
    settled: Callable[[Sequence[Any]], Dialect | None]


class Dialect(Protocol):
    """One protocol that agents speak. Stateless."""

    name: str
    path: str
    """The client's route."""
    target: str
    """The engine's route that answers it."""
    limits: tuple[str, ...]
    """The fields that may limit an answer's tokens on the engine's route; the first that is there counts."""
    words: tuple[str, ...]
    """The fields that hold what the client's request says."""
    entries: str = ""
    """The one of them that lists messages or items, if one does."""
    past: Kind
    """Reads the history in a (translated) request."""
    takes_ids: bool = False
    """True if the engine's route takes prompt ids, so that a turn can be continued."""
    ignores: tuple[str, ...] = ()
    """The fields that change how a chat is sampled and that the engine's route does not read."""
    gives_again: bool = False
    """True if the engine may keep its answers, and gives them out again by their ids."""

    def translate(self, request: JsonBody) -> JsonBody:
        """`request` as the engine's route takes it; `BadRequest` for what cannot be carried faithfully."""
        return request

    def doubt(self, request: Mapping[str, Any]) -> Doubt | None:
        """A question that the engine must be asked before the client's `request` can be translated for good."""
        return None

    def history(self, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> History | None:
        """The history in the (translated) `request`, at the level of text only if `exact`. It is keyed by `scope`."""
        return read(self.past, request, scope, exact=exact)

    def outline(
        self, request: Mapping[str, Any], history: History, *, episode: str, model: str, agent: str
    ) -> Outline | None:
        """The outline of a turn that may continue a call, if the engine `takes_ids`; None if it cannot."""
        return None

    def is_first(self, request: Mapping[str, Any]) -> bool:
        """Tell whether there is no answer in the client's `request`, so that a conversation begins with it."""
        said = request.get(self.entries)
        return not (isinstance(said, list) and any(isinstance(one, Mapping) and self.is_answer(one) for one in said))

    def is_answer(self, entry: Mapping[str, Any]) -> bool:
        """Tell whether `entry` is of the model."""
        return entry.get("role") == "assistant"

    def is_probe(self, request: Mapping[str, Any]) -> bool:
        """Tell whether the (translated) `request` may ask for something else before a task begins, as whether the model
        is there: it offers no tools and allows few tokens of an answer."""
        limit = next((limit for name in self.limits if isinstance(limit := request.get(name), int)), None)
        return limit is not None and limit <= PROBE and not request.get("tools")

    def choices(self, request: Mapping[str, Any]) -> int:
        """The number of answers that the (translated) `request` asks for."""
        return 1

    def sampled_as(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The (translated) `request` with its format and its tools where a chat has them."""
        return request

    def ask(self, request: Mapping[str, Any]) -> Ask:
        """The form in which the (translated) `request` makes the engine report ids and logprobs."""

    def reader(self, ask: Ask) -> Reader:
        """A fresh reader of one answer to `ask`."""

    def own_reader(self, ask: Ask) -> Reader:
        """A fresh reader of one answer that the engine gives on the client's own route."""
        return self.reader(ask)


class Reader(Protocol):
    """Reads one answer: what the client sees of it, and what became of the calls."""

    waiting: bytes = COMMENT
    """An event for a waiting client where there is nothing to imitate."""
    translates: bool = False
    """True if the client's protocol is another one than the engine's: then every event goes through `show`, also those
    that come after the last call, and neither `show` nor `document` may raise."""
    ended: bool = False
    """True if the engine has said its last about the calls, so that `outcomes` holds; unless it is `spoilt` later."""
    spoilt: str | None = None
    """The reason to lose all calls, whatever they were told to be: the engine failed, or contradicted itself. It may
    show behind the end."""
    response_id: Any = None
    """The id of the answer, as the client sees it."""
    tells_versions: bool = False
    """True if the engine has a place for the weights that sampled each token, so that it can be asked for them."""

    def spoil(self, reason: str) -> None:
        """Whatever else comes, all calls are lost; the first `reason` counts."""
        self.spoilt = self.spoilt or reason

    @property
    def sampled(self) -> tuple[int, ...]:
        """The number of tokens of each choice so far; never more than there are."""

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        """A fast way for the events at the start of `stream`: what the client sees of them, and how many bytes they
        are."""

    def show(self, event: SseEvent) -> bytes | None:
        """The client's form of one event of the engine's, if it sees any. It may raise where the answer is not of the
        dialect."""

    def leaving(self, event: bytes) -> bytes:
        """Gives what leaves in place of an `event` that `show` gave. It is asked as the event leaves, in order."""
        return event

    def keep_alive(self, *, held: bool) -> bytes:
        """An event that a waiting client may be sent: one of its dialect that changes nothing of what it accumulates.
        After the end it is nothing; with `held` the client does not have the end yet."""
        return b"" if self.ended and not held else self.waiting

    def document(self, body: bytes) -> bytes:
        """The client's form of an answer in one piece, with `translates` also of an error; may raise like `show`."""

    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of each choice."""

    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        """The words of each choice, as the engine's route takes them back as history: an assistant's message,
        ``{"text": …}``, or ``{"id": …, "output": …}``. None if the choice is not finished or this cannot be told."""


def with_versions(ask: Ask, request: Mapping[str, Any]) -> Ask:
    """`ask` for an engine that can tell which weights sampled each token."""
    if ask.skip is not None or flag(request, VERSIONS) is True:
        return ask
    return replace(ask, fields={**ask.fields, VERSIONS: "true"}, hide_versions=True)


class OpenAIDialect(Dialect, Protocol):
    """The names of a protocol whose answers are choices with ``token_ids`` and ``logprobs``; see `Reading`."""

    usual: re.Pattern[bytes]
    """The event that makes up most of a stream, blank line included: one token of one choice, and nothing else to
    report. Its groups are what stands before the logprobs, in that the choice's index and what was said (without it
    the event is a filler, see `is_filler`), the logprob, what stands before the ids, the id, and the rest."""

    silence: str
    """The words of a choice, as JSON text, in an event that says nothing."""

    def logprobs(self, value: Any) -> list[Any]:
        """One logprob for each token in the ``logprobs`` of a choice."""

    def said(self, choice: Spanned) -> Any:
        """The object in `choice` that holds its words."""

    def wordless(self, choice: Spanned) -> bool:
        """Tell whether `choice` opens the answer and says nothing yet. Then no ids belong to it."""
        return False

    def is_filler(self, choice: Spanned) -> bool:
        """Tell whether the engine sends this event only because ids or logprobs were asked for."""
        return False
