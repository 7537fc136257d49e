"""The sampling of a call's tokens, in effect: what its request says, over what its engine does of itself.

vLLM fills in what a request leaves out with the defaults of the model's ``generation_config.json`` or of its own
options. Nobody sees these in a request, so the engine is asked, once for each model. With ``--enable-scale-out`` it has
render routes, which tell the parameters of a request without generating anything. They also tell whether a grammar is
made of strict tools, which depends on the parser of tool calls. Without them a response tells four defaults
(`questions`). Whether the others are off shows in what is drawn (`more_questions`). The logprobs of some tokens are
known, and biases make any distribution over these. If tokens are drawn that a ``top_k`` or ``min_p`` would have taken
away, there is none. If a token of the prompt wins and loses by a hair, it is not penalized for being there.

Whether logprobs are raw or processed shows in two tokens, each made certain in turn by its bias. Processed logprobs of
both are near 0. Raw ones cannot be: these are two tokens of one distribution, so they add up to less than twice -0.69.

What is told of a call has vLLM's names, and only what is not off (contract §6.1). A default that is not known is null.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.completions import COMPLETIONS
from ajet_proxy.core.protocol.dialect import Questions
from ajet_proxy.core.protocol.reading import UNREADABLE
from ajet_proxy.core.protocol.request import flag, integer, number
from ajet_proxy.core.protocol.rescoring import UNSHAPED
from ajet_proxy.core.protocol.responses.dialect import RESPONSES
from ajet_sdk.bodies import check_storable
from ajet_sdk.errors import BadRequest
from ajet_sdk.sample import Sampling, are_logprobs, canonical

Logprobs = Literal["raw", "processed", "unknown"]
OFF: Mapping[str, tuple[float, ...]] = {
    "temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,),
}
"""The parameters that have defaults at the engine, and what they are when they change nothing."""
_WHOLE = ("top_k", "min_tokens", "thinking_token_budget", "seed")
_FORMATS = ("response_format", "structured_outputs", "text", "tools")
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_AS_IT_IS: Mapping[str, type] = {"bad_words": list, "allowed_token_ids": list, "vllm_xargs": dict}
SHAPING = frozenset((*OFF, *_WHOLE, *_FORMATS, *_AS_IT_IS, "logit_bias"))
"""The fields of a request that may change how it is sampled. Calls that name none of them are all sampled alike."""
COLDEST = 0.01
"""vLLM samples at no lower temperature, but for 0."""
MOST_BIAS = 100.0
LONGEST = 256
"""Bytes of JSON; of a longer value a digest is told."""


class Known(Struct, frozen=True):
    """An engine's word on itself, for one model: its `defaults`, by name, as far as they are known. What its
    `logprobs` are, and whether it makes a grammar of `tools`, and of tools that are strict; None is not known. If it is
    not known of tools, none is made of those that are not strict: vLLM does that only if an option says so."""

    defaults: tuple[tuple[str, float], ...] = ()
    logprobs: Logprobs = "unknown"
    tools: bool | None = None
    strict_tools: bool | None = None


# --- what the request says


@lru_cache
def plain(ignored: tuple[str, ...], known: Known, scored: bool) -> str:
    """`effective` of a request that names nothing of `SHAPING`."""
    return effective(ignored, {}, known, scored)


def effective(ignored: tuple[str, ...], fields: Mapping[str, Any], known: Known, scored: bool) -> str:
    """Tell how a request was sampled whose `fields` are named as in a chat, as JSON text. What is `ignored` its route
    does not read. Its logprobs may have been `scored` afterwards, which gives those of the model itself."""
    fields = {name: value for name, value in fields.items() if name not in ignored}
    defaults = dict(known.defaults)
    told = {
        **_parameters(fields, {name: defaults.get(name) for name in OFF if name not in ignored}),
        **_limits(fields), **_structured(fields, known),
        **{name: value for name, kind in _AS_IT_IS.items() if (value := fields.get(name)) and isinstance(value, kind)},
    }
    short = {name: _short(name, value) for name, value in told.items()}
    return canonical({**short, "logprobs": "scored" if scored else known.logprobs})


def _parameters(fields: Mapping[str, Any], defaults: Mapping[str, float | None]) -> Sampling:
    """The parameters that have `defaults`, known or not. Greedy sampling leaves no choice to some of them."""
    told: dict[str, Any] = {}
    for name, default in defaults.items():
        asked = integer(fields, name) if name in _WHOLE else number(fields, name)
        value = default if asked is None else asked
        if value not in OFF[name]:
            told[name] = value
    if (temperature := told.get("temperature")) is not None:
        told["temperature"] = max(COLDEST, temperature) if temperature > 0 else 0
        if temperature == 0:
            told = {name: value for name, value in told.items() if name not in ("top_p", "top_k", "min_p")}
    return {name: _as_written(value) for name, value in told.items()}


def _limits(fields: Mapping[str, Any]) -> Sampling:
    """Biases, the seed, and how many tokens there must be, or may be of thinking."""
    budget, least, seed = (integer(fields, name) for name in ("thinking_token_budget", "min_tokens", "seed"))
    told: dict[str, Any] = {"seed": None if seed == -1 else seed, "min_tokens": least if least and least > 0 else None}
    told |= {"thinking_token_budget": None if budget is None or budget < 0 else budget}
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):
        values = {token: number(bias, token) or 0.0 for token in bias}
        bounded = {token: min(MOST_BIAS, max(-MOST_BIAS, value)) for token, value in values.items() if value}
        told["logit_bias"] = {token: _as_written(value) for token, value in bounded.items()} or None
    return {name: value for name, value in told.items() if value is not None}


def _structured(fields: Mapping[str, Any], known: Known) -> Sampling:
    """The kind of grammar that limits the text, if any does."""
    of_tools = _of_tools(fields, known)
    kind = "tools" if of_tools == "yes" else _format(fields)
    return {} if kind is None and of_tools != "unknown" else {"structured": kind}


def _of_tools(fields: Mapping[str, Any], known: Known) -> Literal["yes", "unknown"] | None:
    """Tell whether a grammar is made of the tools: of those that must be called, else if the engine does that."""
    tools, choice = fields.get("tools"), fields.get("tool_choice", "auto")
    if not tools or not isinstance(tools, list):
        return None
    if choice == "required" or (isinstance(choice, dict) and choice.get("type", "function") == "function"):
        return "yes"
    if choice != "auto":
        return None
    own = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    strict = any(isinstance(tool, dict) and flag(tool, "strict") for tool in own)
    if not strict:
        return "yes" if known.tools else None
    return "unknown" if known.strict_tools is None else "yes" if known.strict_tools else None


def _format(fields: Mapping[str, Any]) -> str | None:
    """The kind of format that the request asks for in words of its own."""
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_schema", "json_object", "structural_tag"):
        return str(form["type"])
    asked = fields.get("structured_outputs")
    named = [name for name in _KINDS if asked.get(name) is not None] if isinstance(asked, dict) else []
    return ("json_schema" if named[0] == "json" else named[0]) if named else None


def _as_written(value: Any) -> Any:
    """A number as JSON says it shortest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(name: str, value: Any) -> Any:
    """`value`, or a digest of it if it is long; None for what cannot be written down."""
    try:
        text = canonical(value).encode("utf-8", "surrogatepass")
        if len(text) > LONGEST:
            return f"sha256:{hashlib.sha256(text).hexdigest()[:24]}"
        check_storable(value, name)
    except (ValueError, RecursionError, BadRequest):
        return None
    return value


# --- what the engine tells

_IDS = range(11, 139)
"""Tokens that every vocabulary has, as many as vLLM reports by name."""
_PROMPT, _OTHER = _IDS[0], _IDS[1]
"""The prompt, and a token that is not in it."""
_DRAWS = 256
RARE, STEP = 0.02, 0.01
"""The second likeliest token against the likeliest, and by how much the logprob of each falls below the one before it.
(Tokens of equal logits pass ``top_k`` together.)"""
ENOUGH = 64
"""If more tokens than this are drawn, there is no ``top_k`` of as many or less. Nor is there a ``min_p`` of more than
0.011, which is less likely than the last of them."""
_HIGH, _HAIR, _WIDEST = 60.0, 0.25, 34.0
"""A bias that leaves no other token a chance, and a lead that a ``repetition_penalty`` of 1.005 would turn. If logprobs
differ by more than the last one, biases would be too large."""
_TESTED = ("top_k", "min_p", "repetition_penalty")
RENDER = "/render"


def questions(model: str) -> Questions:
    """The first questions to the engine about `model`. `known` reads the answers."""
    named = _named(model)
    says = {**named, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    functions = ({"name": "f", "parameters": empty, **strict} for strict in ({}, {"strict": True}))
    return [
        (COMPLETIONS.path + RENDER, {**named, "prompt": [_PROMPT], "max_tokens": 1}),
        *((CHAT.path + RENDER, {**says, "tools": [{"type": "function", "function": one}]}) for one in functions),
        (RESPONSES.path, {**named, "input": "?", "max_output_tokens": 1, "store": False}),
        *(one_token(model, {token: MOST_BIAS}, **UNSHAPED) for token in (_PROMPT, _OTHER)),
        one_token(model, {}, **UNSHAPED, logprob_token_ids=[*_IDS], return_tokens_as_token_ids=True),
    ]


def known(answers: Sequence[Any]) -> Known:
    """Read the `answers` to `questions`; None is no answer."""
    *rendering, response, first, second, _ = answers
    rendered = [_rendered(answer) for answer in rendering]
    found = next((found for found in rendered if found is not None), None)
    defaults = _echoed(response) if found is None else _defaults(found)
    made = [None if found is None else bool(found.get("structured_outputs")) for found in rendered[1:]]
    return Known(defaults, _logprobs((first, second)), *made)


def more_questions(model: str, found: Known, answers: Sequence[Any]) -> Questions:
    """Further questions, about defaults that are not `found` in the `answers` to `questions`; see `with_draws`."""
    measured = _measured(answers[-1])
    if {*_TESTED} <= dict(found.defaults).keys() or measured is None:
        return []
    steps = {token: math.log(RARE) - STEP * place for place, token in enumerate(_IDS)} | {_OTHER: 0.0}
    drawn = {token: steps[token] - measured[token] for token in _IDS}
    ahead, behind = ({_PROMPT: lead - measured[_PROMPT], _OTHER: -measured[_OTHER]} for lead in (_HAIR, -_HAIR))
    neutral = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    return [
        one_token(model, _raised(drawn), **neutral, n=_DRAWS),
        *(one_token(model, _raised(biases), temperature=0) for biases in (ahead, behind)),
    ]


def with_draws(found: Known, answers: Sequence[Any]) -> Known:
    """`found`, with the defaults that the `answers` to `more_questions` show to be off."""
    if len(answers) != 3:
        return found
    draws, ahead, behind = (_tokens(answer) for answer in answers)
    off = {}
    if len({*draws}) > ENOUGH and {*draws} <= {*_IDS}:
        off = {"top_k": 0.0, "min_p": 0.0}
    if (ahead, behind) == ([_PROMPT], [_OTHER]):
        off["repetition_penalty"] = 1.0
    return replace(found, defaults=tuple({**off, **dict(found.defaults)}.items()))


def merged(before: Known, now: Known) -> Known:
    """Join what an engine told `before` and tells `now`, which counts more."""
    return Known(
        tuple({**dict(before.defaults), **dict(now.defaults)}.items()),
        before.logprobs if now.logprobs == "unknown" else now.logprobs,
        before.tools if now.tools is None else now.tools,
        before.strict_tools if now.strict_tools is None else now.strict_tools,
    )


def _named(model: str) -> dict[str, Any]:
    return {"model": model} if model else {}


def one_token(model: str, biases: Mapping[int, float], **more: Any) -> tuple[str, dict[str, Any]]:
    """A question for one token under these `biases`: a route and a body."""
    body = {**_named(model), "prompt": [_PROMPT], "max_tokens": 1, "logprobs": 0, "return_token_ids": True, **more}
    if biases:
        body["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    return COMPLETIONS.path, body


def _raised(biases: Mapping[int, float]) -> Mapping[int, float]:
    """`biases` that leave the same differences and are far above 0, so that nothing but their tokens is drawn."""
    by = _HIGH - sum(biases.values()) / len(biases)
    return {token: bias + by for token, bias in biases.items()}


def _rendered(answer: Any) -> Mapping[str, Any] | None:
    """The parameters that a render route tells. It leaves out those that are vLLM's own defaults."""
    one = answer[0] if isinstance(answer, list) and answer else answer
    found = one.get("sampling_params") if isinstance(one, dict) else None
    return found if isinstance(found, dict) else None


def _defaults(found: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The defaults that are `found`. vLLM drops what narrows the choice if the default is greedy, so that is not
    known."""
    told = {name: off[0] if found.get(name) is None else number(found, name) for name, off in OFF.items()}
    greedy = told["temperature"] == 0
    hidden = ("top_p", "top_k", "min_p") if greedy else ()
    return tuple((name, value) for name, value in told.items() if value is not None and name not in hidden)


def _echoed(response: Any) -> tuple[tuple[str, float], ...]:
    """The defaults that a response tells."""
    told = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    if not isinstance(response, dict) or any(number(response, name) is None for name in told):
        return ()
    return tuple((name, value) for name, value in _defaults(response) if name in told)


def _logprobs(answers: Sequence[Any]) -> Logprobs:
    """Tell what logprobs are, by those of two tokens that were certain. What is above 0 is a logit."""
    try:
        values = [answer["choices"][0]["logprobs"]["token_logprobs"][0] for answer in answers]
        if [_tokens(answer) for answer in answers] != [[_PROMPT], [_OTHER]] or not are_logprobs(values):
            return "unknown"
    except (*UNREADABLE, OverflowError):
        return "unknown"
    both = sum(values)
    return "processed" if both > -0.5 else "raw" if both < -1.3 else "unknown"


def _tokens(answer: Any) -> list[Any]:
    """The one token of each choice; none if the answer is not of the dialect."""
    try:
        return [token for choice in answer["choices"] for token in choice["token_ids"]]
    except UNREADABLE:
        return []


def _measured(answer: Any) -> Mapping[int, float] | None:
    """The logprobs of `_IDS` after the prompt; None if they are not told, or too far apart for a bias to make up."""
    try:
        told = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        found = {token: float(told[f"token_id:{token}"]) for token in _IDS}
    except UNREADABLE:
        return None
    spread = max(found.values()) - min(found.values())
    return found if math.isfinite(spread) and spread < _WIDEST else None
