"""A conversation's history, recognized when a client says it again: its fingerprint, and the episode that it leads to.

Idea: messages one after another make a chain of digests. Each digest stands for everything said so far, and no words
are kept. A later request continues an earlier one if its own history begins with what that one left behind. A chat's
history is its messages. A text prompt's history is its text, and a token prompt's is its ids. Which of these a request
has, its dialect says (`ajet_proxy.core.protocol.dialect`), and a dialect may have one of its own.

Two levels differ in what they forgive, because they answer two questions.

``words``: which episode does a request without a name continue (contract §3.1)? Clients change things in passing that
must not open a new episode. So these do not count: space around a text, thoughts in ``<think>`` tags, reasoning, the
way a tool call's arguments are written, and the names of speakers. Nor does Claude Code's billing line in a system
prompt, which can differ from request to request. Ids of tool calls are digested separately, as ``firm``. Engines draw
them at random, so they tell twins apart whose words are equal. The digests are journaled as `Mark`, so their bytes
never change. There they are keyed by who asks (``scope``): equal histories of two clients have nothing in common.

``text``: may a call's own tokens stand for this history in a prompt (contract §4, docs/explain/continuity.md)? Only if
no template could tell the two apart. So all text and structure counts, including spaces, reasoning and ids. Only what
an engine reads alike is forgiven. A text equals a list with this one part. Null, empty and missing are equal, arguments
are compared as JSON, and reasoning may have either of its two names. The name that a client signs the model's messages
with is left out here and must be checked separately. These digests live in memory alone.

A level that cannot be told of a history is missing, whatever the other one says. Whether a timeline continues, and what
of it is trained, is decided by token ids and not here.
"""

from __future__ import annotations

import json
import re
import struct
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.msgpack import Encoder

from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.call import Captured

SIZE, TEXT_SIZE = 12, 16
"""Bytes of a digest."""
TEXTS = ("text", "input_text", "output_text")
"""The types of a message's parts that are text."""
PROBE = 4
"""Tokens of an answer to a probe, which may ask whether the model is there."""
MOST_MARKS = 1000
"""So many marks are known of an episode that takes no more calls, the latest. A call leaves one or two."""
AGAIN = "again:"
"""So begin the marks of requests, by which one is known that is sent again."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, struct.error, RecursionError)
_BILLING = re.compile(r"^x-anthropic-billing-header[^\n]*\n*", re.MULTILINE)
_ROLES = {"developer": "system", "function": "tool"}
Arguments = Sequence[tuple[Any, ...]]
_in_order = json.JSONEncoder(sort_keys=True).encode
_packed, _packed_in_order = Encoder().encode, Encoder(order="sorted").encode
_NO_IDS = _packed([])


class Mark(NamedTuple):
    """Where a history ends. ``length`` is that of a text in bytes; 0 for messages, which need none to be found."""

    key: str
    length: int = 0
    firm: str = ""


class Marks(tuple[Mark, ...]):
    """The marks of what came before a request, as read in another process."""

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        return iter(self)


class ChatHistory:
    """The digests of the messages of a chat `request`, one after another, at both levels.

    ``messages`` are those at the level of text. ``answer`` is the place of the assistant's last one, and
    ``answer_text`` the digest of the text up to and including it. Text is digested only if `exact`, and as long as it
    can be told.
    """

    def __init__(self, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> None:
        self._begin(request, request["messages"], scope, exact)
        for place, message in enumerate(self.messages):
            arguments = _arguments(message)
            if place == len(self.messages) - 1 and self._words is not None:
                self._before_last = self._words.copy(), self._ids.copy()
            self._add_words(message, arguments)
            self._add_text(place, message, arguments)

    def _begin(
        self, request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], scope: bytes, exact: bool
    ) -> None:
        if not isinstance(messages, list):
            raise TypeError("no list of messages")
        self.request, self.messages, self.exact = request, messages, exact
        self.answer: int | None = None
        self.answer_text: bytes | None = None
        self._scope = scope
        self._words: blake2b | None = blake2b(digest_size=SIZE)
        self._ids = blake2b(digest_size=SIZE)
        self._before_last = self._words, self._ids
        self._text = blake2b(digest_size=TEXT_SIZE)
        self._ends: list[tuple[bytes, bytes]] = []
        self._said: list[bytes] = []

    @property
    def kind(self) -> str:
        """Histories of one kind can begin with one another."""
        return "messages"

    @property
    def prompt(self) -> str:
        """The digest of all words, which is the same for everybody; empty if it cannot be told."""
        return self._said[-1].hex() if self._said else ""

    def until(self, lengths: Iterable[int]) -> dict[int, str]:
        """The digests of the words of the first so many messages, as far as there are so many and they can be told."""
        there = (length for length in lengths if 0 < length <= len(self._said))
        return {length: keyed(self._said[length - 1], self._scope) for length in there}

    @property
    def length(self) -> int:
        """The number of messages whose words can be told."""
        return len(self._said)

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        """The marks that may stand at a beginning of this history, the longest first; `lengths` are those there are."""
        return (self._mark(words, ids) for words, ids in reversed(self._ends))

    def after(self, answer: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        """The marks after `answer`, as a message of its own, and as the end of one that the agent began. If its tokens
        are known, they are `captured`."""
        said = {**answer, "role": "assistant"}
        marks, last = self._marks_behind([said]), self.messages[-1] if self.messages else {}
        if marks and last.get("role") == "assistant" and isinstance(last.get("content"), str):
            whole = said | {"content": last["content"] + (answer.get("content") or "")}
            marks += self._marks_behind([whole], *self._before_last)
        return marks

    def text(self, form: Mapping[str, Any] | None = None) -> bytes:
        """The digest of the text so far, followed by one more message if `form` gives one, as `text_of` made it."""
        digest = self._text.copy()
        digest.update(b"" if form is None else packed(form))
        return digest.digest()

    def _add_words(self, message: Mapping[str, Any], arguments: Arguments | None = None) -> None:
        if self._words is None:
            return
        try:
            words, ids = words_of(message, arguments)
        except MALFORMED:
            self._words, self._ends, self._said = None, [], []  # it is the engine's to refuse
            return
        self._words.update(words)
        self._ids.update(ids)
        self._said.append(self._words.digest())
        if message["role"] == "assistant":
            self._ends.append((self._said[-1], self._ids.digest()))

    def _add_text(self, place: int, message: Mapping[str, Any], arguments: Arguments | None = None) -> None:
        if not self.exact:
            return
        try:
            self._text.update(packed(text_of(message, arguments)))
        except RecursionError:
            self.exact = False
            return
        if message.get("role") == "assistant":
            self.answer, self.answer_text = place, self._text.digest()

    def _marks_behind(self, messages: Iterable[Mapping[str, Any]], *past: blake2b) -> tuple[Mark, ...]:
        """The mark after `messages` behind all that was said, or behind the digests of a `past`."""
        if self._words is None:
            return ()
        words, ids = (one.copy() for one in past or (self._words, self._ids))
        for message in messages:
            for digest, said in zip((words, ids), words_of(message), strict=True):
                digest.update(said)
        return (self._mark(words.digest(), ids.digest()),)

    def _mark(self, words: bytes, ids: bytes) -> Mark:
        return Mark(f"chat:{keyed(words, self._scope)}", firm=keyed(ids, self._scope))


class PromptHistory(Struct, frozen=True):
    """A prompt that is one text, or one list of token ids."""

    kind: str
    said: bytes
    scope: bytes

    @classmethod
    def of(cls, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> PromptHistory:
        """The history of a `request` with a ``prompt``. Its text is not told apart from its words."""
        prompt = request["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            [prompt] = prompt
        is_text = isinstance(prompt, str)
        return cls("text" if is_text else "ids", utf8(prompt) if is_text else pack_tokens(prompt), scope)

    @property
    def prompt(self) -> str:
        return blake2b(self.said, digest_size=SIZE).hexdigest()

    def beginnings(self, lengths: Collection[int]) -> Iterator[Mark]:
        found = self.until(length for length in lengths if length > 0)
        return (Mark(f"{self.kind}:{digest}", length) for length, digest in reversed(found.items()))

    def until(self, lengths: Iterable[int]) -> dict[int, str]:
        """As of a chat: of the first so many bytes, the shortest first. All are read once, however many there are."""
        digest, at, found = blake2b(key=self.scope, digest_size=SIZE), 0, {}
        for length in sorted(length for length in lengths if length <= len(self.said)):
            digest.update(self.said[at:length])
            at, found[length] = length, digest.hexdigest()
        return found

    @property
    def length(self) -> int:
        return len(self.said)

    def after(self, answer: Mapping[str, Any], captured: Captured | None) -> tuple[Mark, ...]:
        """A prompt that was answered with nothing can only come again, so it leaves no mark."""
        ends = {}
        if captured is not None and captured.token_ids:
            ends["ids"] = pack_tokens(captured.prompt_token_ids) + pack_tokens(captured.token_ids)
        if self.kind == "text" and answer.get("text"):
            ends["text"] = self.said + utf8(answer["text"])
        return tuple(Mark(f"{kind}:{keyed(end, self.scope)}", len(end)) for kind, end in ends.items())


History = ChatHistory | PromptHistory
Beginnings = History | Marks
"""The past of a request."""


class Kind(Protocol):
    """Reads the history in a request. `scope` has at most 64 bytes. The level of text is left out unless `exact`."""

    def __call__(self, request: Mapping[str, Any], scope: bytes, *, exact: bool) -> History: ...


def read(kind: Kind, request: Mapping[str, Any], scope: bytes, *, exact: bool = True) -> History | None:
    """The history of this `kind` in a `request`; None if there is none that a later request could continue."""
    try:
        return kind(request, scope, exact=exact)
    except MALFORMED:
        return None  # it is the engine's to refuse


def marks_of(history: History | None, answer: Mapping[str, Any] | None, captured: Captured | None) -> tuple[Mark, ...]:
    """The marks after an answer, if the answer and the history before it can be told."""
    try:
        return () if history is None or answer is None else history.after(answer, captured)
    except MALFORMED:
        return ()


def keyed(raw: bytes, scope: bytes) -> str:
    return blake2b(raw, key=scope, digest_size=SIZE).hexdigest()


# --- what a message says, level by level


def words_of(message: Mapping[str, Any], arguments: Arguments | None = None) -> tuple[bytes, bytes]:
    """The words of `message`, and the ids in it."""
    role = _ROLES.get(message["role"], message["role"])
    if not isinstance(role, str):
        raise TypeError(f"no role: {role!r}")
    text = _joined(message.get("content"))
    if role == "assistant":
        text = text.rpartition("</think>")[2].partition("<think>")[0]
    elif role == "system":
        text = _BILLING.sub("", text)
    said = [role, text.strip()]
    if "content" in message and len(message) == 2:
        return packed(said), _NO_IDS
    calls = message.get("tool_calls") or ()
    for call, meant in zip(calls, _arguments(message) if arguments is None else arguments, strict=True):
        said += (call["function"]["name"], _written(call["function"], meant))
    if function := message.get("function_call"):
        said += (function["name"], _written(function, _meant(function)))
    ids = [*(call.get("id") for call in calls), message.get("tool_call_id")]
    return packed(said), packed([str(one) for one in ids if one])


def text_of(message: Mapping[str, Any], arguments: Arguments | None = None) -> dict[str, Any]:
    """`message` at the level of text: without everything that is neither text nor structure."""
    out = dict(message)
    if len(out) == 2 and out.get("role") and isinstance(out.get("content"), str) and out["content"]:
        return out
    if out.get("role") == "assistant":
        out.pop("name", None)
    other = out.pop("reasoning_content", None)
    out["reasoning"] = out.get("reasoning") or other
    if isinstance(content := out.get("content"), list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content
        ]
        out["content"] = texts[0] if len(texts) == 1 else texts
    if isinstance(calls := out.get("tool_calls"), list):
        meant = _arguments(message) if arguments is None else arguments
        out["tool_calls"] = [_call(call, one) for call, one in zip(calls, meant, strict=True)]
    return {
        name: kept for name, value in out.items()
        if (kept := (value or None) if type(value) is str else _pruned(value)) is not None
    }


def packed(value: Any) -> bytes:
    """`value` as bytes that no other value makes. The order of names in a dict does not count, except in dicts within a
    list."""
    in_order = type(value) is dict
    try:
        return (_packed_in_order if in_order else _packed)(value)
    except (UnicodeEncodeError, OverflowError):  # half a character, or a number of more than 64 bits
        return (_in_order if in_order else json.dumps)(value).encode()


def _arguments(message: Mapping[str, Any]) -> Arguments:
    """The meaning of each tool call's arguments as JSON: a tuple of the one value, empty where they are no JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return ()
    return [_meant(call.get("function") if isinstance(call, Mapping) else None) for call in calls]


def _meant(function: Any) -> tuple[Any, ...]:
    written = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        return (json.loads(written),) if isinstance(written, str) else ()
    except (ValueError, RecursionError):
        return ()


def _written(function: Mapping[str, Any], meant: tuple[Any, ...]) -> str:
    """The arguments of a tool call in one form, however the client wrote them."""
    written = function.get("arguments")
    if not meant and isinstance(written, str):
        return written.strip()
    return _in_order(meant[0] if meant else written)


def _call(call: Any, meant: tuple[Any, ...]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function, kind = dict(call["function"]), call.get("type")
    if meant or not function.get("arguments"):  # arguments that are no JSON are compared as they are
        function["arguments"] = ["json", meant[0] if meant else {}]
    return {**call, "function": function, "index": None, "type": None if kind == "function" else kind}


def _pruned(value: Any) -> Any:
    """`value` without what is null or empty; None where nothing is left."""
    if isinstance(value, dict):
        value = {name: kept for name, item in value.items() if (kept := _pruned(item)) is not None}
    return value if value or (value is not None and value not in ("", {}, [])) else None


def _joined(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] if part.get("type") in TEXTS else _in_order(part) for part in content)


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- which episode a request without a name continues


class Lineage:
    """The marks of all open episodes: which one a request continues when nothing names one.

    Every call leaves the marks at which its client's history ends. A request continues the episode that has the longest
    mark among the beginnings of its own history. If several episodes have that mark, it is the one in which the ids of
    tool calls are the same too. If that leaves none or several, nobody can say whose run it is, and it is taken for a
    new one. So two runs are never mixed, but an episode may lack its first turns. A history that no call has ended in
    begins a new episode too; so do first prompts, however many are equal.

    A request with the ``Idempotency-Key`` of an earlier one continues that one's episode. One that only counts how
    often it was sent may be anybody's with that prompt. It takes the place of a first prompt that came to nothing.

    Marks are part of the journal's events and live as long as their episode is open, so a restart forgets none of them.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, dict[str, set[str]]] = {}
        """For each mark's key, the episodes that have it, each with its ``firm`` digests."""
        self._marks: dict[str, list[Mark]] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, episode: str, marks: Iterable[Mark]) -> None:
        """Calls of `episode` end in `marks`."""
        for mark in marks:
            self._episodes.setdefault(mark.key, {}).setdefault(episode, set()).add(mark.firm)
            self._marks.setdefault(episode, []).append(mark)
            self._lengths[mark.length] += 1

    def drop(self, episode: str) -> None:
        """`episode` takes no more calls."""
        for mark in self._marks.pop(episode, ()):
            episodes = self._episodes.get(mark.key, {})
            episodes.pop(episode, None)
            if not episodes:
                self._episodes.pop(mark.key, None)
            self._lengths[mark.length] -= 1
            if not self._lengths[mark.length]:
                del self._lengths[mark.length]

    def hand_over(self, episode: str, other: Lineage, most: int, name: str = "") -> None:
        """`episode` takes no more calls. `other` has its marks from now on, under another `name` if that is given, and
        those of the latest `most` episodes, of each the latest."""
        marks = dict.fromkeys(one for one in self._marks.get(episode, ()) if not one.key.startswith(AGAIN))
        name = name or episode
        known = [one for one in other._marks.get(name, ()) if one not in marks]
        other.drop(name)  # it is the latest of all
        other.add(name, [*known, *marks][-MOST_MARKS:])
        self.drop(episode)
        if len(other._marks) > most:
            other.drop(next(iter(other._marks)))

    def continued(self, history: Beginnings, *others: Lineage) -> tuple[str, ...]:
        """The episode that `history` continues, here or in `others`; none if it continues none, several if it may
        continue any of them."""
        lineages = (self, *others)
        for mark in history.beginnings(ChainMap(*(one._lengths for one in lineages))):
            found = [item for one in lineages for item in one._episodes.get(mark.key, {}).items()]
            if found:
                alike = [episode for episode, firm in found if mark.firm in firm]
                return tuple(alike if len(alike) == 1 else dict(found))
        return ()

    def add_request(self, episode: str, body_hash: str, idempotency_key: str | None) -> None:
        """A request in `episode` that nothing names."""
        self.add(episode, [Mark(_again(sent)) for sent in (body_hash, idempotency_key) if sent is not None])

    def repeated(
        self, body_hash: str | None, idempotency_key: str | None, all_lost: Callable[[str], bool]
    ) -> str | None:
        """The episode of an earlier attempt at a request, found by its idempotency key. Without a key, it is found by
        `body_hash`, if that is given, and only if `all_lost` says that all calls of the episode were lost."""
        if idempotency_key is not None:
            found = list(self._episodes.get(_again(idempotency_key), ()))
        else:
            found = [name for name in self._episodes.get(_again(body_hash or ""), ()) if all_lost(name)]
        return found[-1] if found else None


def _again(sent: str) -> str:
    return f"{AGAIN}{sent}"
