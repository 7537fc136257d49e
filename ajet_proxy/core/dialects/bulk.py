"""A document whose bulk, ids and logprobs, is read by patterns and the rest as JSON: cheaper than JSON alone.

Most of a chat document is what only the proxy asked for. In the form in which vLLM writes it, it is found by its names,
checked and taken out, and stands for null in what is left; that is read as any JSON is. A name with its quotes cannot
stand inside a JSON string, where quotes are escaped, so its bytes are found nowhere but where it names a value.
Invariant: what comes out is what reading the whole as JSON gives, but for the text, in which those values are null. A
document of any other form is read as JSON as a whole.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ajet_proxy.core.dialects.patterns import IDS
from ajet_proxy.core.dialects.spans import Spanned, load, scan

_PROMPT = re.compile(rb'"prompt_token_ids":(' + IDS + rb")")
_SAMPLED = re.compile(rb'"token_ids":(' + IDS + rb")")
_LOGPROBS = b'"logprobs":{"content":['
_END = b']},"finish_reason":'
_NAMES = (b'"logprobs":', b'"token_ids":', b'"prompt_token_ids":')
_NULL = b"null"


class Document(NamedTuple):
    """`answer` as read from `text`. `logprobs` are those of its one choice where they were taken out of the text."""

    text: str
    answer: Spanned
    logprobs: list[float]


class _Bulk(NamedTuple):
    rest: bytes
    prompt: bytes
    ids: bytes
    logprobs: list[float]


def read(body: bytes, row: re.Pattern[bytes] | None, *, spans: bool) -> Document:
    """The document `body`. `row` is what it has for each token, with the logprob as its one group; None to read it as
    JSON. The `answer` may be without `spans` where none are asked for. Raises like `scan`, and for what is not UTF-8.
    """
    text = body.decode()
    if row is not None and (bulk := _taken(body, row)) is not None:
        rest = bulk.rest.decode()
        answer = (scan if spans else load)(rest, deep="choices")
        if _belongs(answer):
            answer.values["prompt_token_ids"] = json.loads(bulk.prompt)
            answer.values["choices"][0].values["token_ids"] = json.loads(bulk.ids)
            return Document(rest, answer, bulk.logprobs)
    return Document(text, scan(text, deep="choices"), [])


def _taken(body: bytes, row: re.Pattern[bytes]) -> _Bulk | None:
    """The bulk of `body`, each of its values being there once, in vLLM's order."""
    start, end = body.find(_LOGPROBS), body.rfind(_END)
    ids, prompt = _SAMPLED.search(body, max(0, end)), _PROMPT.search(body, max(0, end))
    if start < 0 or end < start or ids is None or prompt is None or ids.end() > prompt.start():
        return None
    between = row.split(body[start + len(_LOGPROBS) : end])
    if between[0] or between[-1] or set(between[2:-1:2]) - {b","}:
        return None
    rest = _NULL.join((
        body[: start + len(_NAMES[0])], body[end + len(b"]}") : ids.start(1)], body[ids.end(1) : prompt.start(1)],
        body[prompt.end(1) :],
    ))  # fmt: skip
    if any(rest.count(name) > 1 for name in _NAMES):
        return None
    return _Bulk(rest, prompt[1], ids[1], list(map(float, between[1::2])))


def _belongs(answer: Spanned) -> bool:
    """Whether the values that were taken out are those of `answer` and its one choice, which has no other to hide."""
    choices = answer.values.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return False
    left = (answer, "prompt_token_ids"), (choices[0], "token_ids"), (choices[0], "logprobs")
    taken = all(name in owner.values and owner.values[name] is None for owner, name in left)
    return taken and choices[0].values.get("prompt_token_ids") is None
