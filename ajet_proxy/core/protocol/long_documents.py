"""A document whose long lists, ids and logprobs, are read by their types and the rest as JSON: cheaper than JSON alone.

Most of a chat document is what only the proxy asked for. If it has the form in which vLLM writes it, it is found by its
names, checked and taken out. Null stands for it in what is left, and that is read as any JSON is. A name with its
quotes and the comma before it cannot stand inside a JSON string, where quotes are escaped. So it is found only where it
names a value. Invariant: what comes out is what reading the whole as JSON gives, except for the text, in which those
values are null. (A document may have one of the names twice, once written with escapes or with space before its colon.
That is not seen.) A document of any other form is read as JSON as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import MsgspecError, Struct
from msgspec.json import Decoder

from ajet_proxy.core.protocol.json_edits import Spanned, load, scan
from ajet_proxy.core.tokens import TokenId


class _Row(Struct, gc=False):
    """A chat answer's word on one token; the rest of it is checked and left unread."""

    logprob: float


_LOGPROBS, _SAMPLED, _PROMPT = b',"logprobs":{"content":[', b',"token_ids":[', b',"prompt_token_ids":['
_END = b']},"finish_reason":'
_NAMES = (b'"logprobs":', b'"token_ids":', b'"prompt_token_ids":')
_NULL = b"null"
_rows = Decoder(list[_Row]).decode
_ids = Decoder(tuple[TokenId, ...]).decode


class Document(NamedTuple):
    """`answer` as read from `text`. Where lists were taken out of the text, its ids are tuples, which are checked, and
    `logprobs` are those of its one choice."""

    text: str
    answer: Spanned
    logprobs: list[float]


def read(body: bytes, *, long: bool, spans: bool) -> Document:
    """The document `body`. If it is `long`, the lists are taken out of its text. Unless `spans` are asked for, the
    `answer` may lack them. Raises like `scan`, and for what is not UTF-8."""
    text = body.decode()
    if long and (taken := _taken(body)) is not None:
        rest, prompt, ids, logprobs = taken
        answer = (scan if spans else load)(rest, deep="choices")
        if _belongs(answer):
            answer.values["prompt_token_ids"] = prompt
            answer.values["choices"][0].values["token_ids"] = ids
            return Document(rest, answer, logprobs)
    return Document(text, scan(text, deep="choices"), [])


def _taken(body: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...], list[float]] | None:
    """The text without its lists, and the lists: the prompt's ids, the sampled ids and the logprobs. None unless each
    is there once, in vLLM's order."""
    start, end = body.find(_LOGPROBS), body.rfind(_END)
    sampled = body.find(_SAMPLED, end)
    asked = body.find(_PROMPT, sampled)
    if not 0 <= start < end < sampled < asked:
        return None
    rows, ids, prompt = start + len(_LOGPROBS) - 1, sampled + len(_SAMPLED) - 1, asked + len(_PROMPT) - 1
    ids_end, prompt_end = body.find(b"]", ids) + 1, body.find(b"]", prompt) + 1
    try:
        logprobs = [row.logprob for row in _rows(body[rows : end + 1])]
        values = _ids(body[prompt:prompt_end]), _ids(body[ids:ids_end])
    except MsgspecError:
        return None
    rest = _NULL.join((
        body[: start + len(_NAMES[0]) + 1], body[end + len(b"]}") : ids], body[ids_end:prompt], body[prompt_end:],
    ))  # fmt: skip
    if any(rest.count(name) > 1 for name in _NAMES):
        return None
    return rest.decode(), *values, logprobs


def _belongs(answer: Spanned) -> bool:
    """Tell whether the values that were taken out are those of `answer` and its one choice, and the choice has no
    others."""
    choices = answer.values.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return False
    left = (answer, "prompt_token_ids"), (choices[0], "token_ids"), (choices[0], "logprobs")
    taken = all(name in owner.values and owner.values[name] is None for owner, name in left)
    return taken and choices[0].values.get("prompt_token_ids") is None
