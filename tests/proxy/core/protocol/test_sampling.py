"""The sampling of a call in effect: the request over what the engine told of itself, in the words of vLLM."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.anthropic.messages import MESSAGES
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.completions import COMPLETIONS
from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.responses.dialect import RESPONSES
from ajet_proxy.core.protocol.sampling import (
    ENOUGH,
    MOST_BIAS,
    OFF,
    SHAPING,
    Known,
    effective,
    known,
    merged,
    more_questions,
    plain,
    questions,
    with_draws,
)

NEUTRAL = tuple((name, off[0]) for name, off in OFF.items())
PLAIN = Known(NEUTRAL, "processed", False, False)
DIALECTS: list[Dialect] = [CHAT, COMPLETIONS, RESPONSES]
TOOL = {"type": "function", "function": {"name": "f"}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


def told(fields: Any, *, dialect: Dialect = CHAT, by: Known = PLAIN, scored: bool = False) -> Any:
    """Tell of a request what is told besides the kind of its logprobs."""
    found = json.loads(effective(dialect.ignores, dialect.sampled_as(fields), by, scored))
    assert found.pop("logprobs") == ("scored" if scored else by.logprobs)
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_plain_case_has_nothing_to_tell(dialect: Dialect) -> None:
    off = {name: values[-1] for name, values in OFF.items()}
    for fields in ({}, off, dict.fromkeys(OFF), {"max_tokens": 5, "stop": ["x"], "logprobs": True}):
        assert told(fields, dialect=dialect) == {}


@pytest.mark.parametrize(("fields", "expected"), [
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}, None),
    ({"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}, None),
    ({"temperature": 2.0, "top_k": "3", "top_p": "0.5"}, {"temperature": 2, "top_k": 3, "top_p": 0.5}),
    ({"temperature": 0}, None),
    ({"temperature": -0.0, "top_p": 0.5, "top_k": 2, "min_p": 0.5, "presence_penalty": 1},
     {"temperature": 0, "presence_penalty": 1}),
    ({"temperature": 1e-9, "top_p": 0.5}, {"temperature": 0.01, "top_p": 0.5}),
    ({"temperature": "x", "top_k": 1.5}, {}),
    ({"seed": 7}, None), ({"seed": 0}, None), ({"seed": -1}, {}),
    ({"min_tokens": 3}, None), ({"min_tokens": 0}, {}),
    ({"thinking_token_budget": 0}, None), ({"thinking_token_budget": -1}, {}),
    ({"bad_words": ["a"], "allowed_token_ids": [1, 2], "vllm_xargs": {"a": "b"}}, None),
    ({"bad_words": [], "allowed_token_ids": None, "vllm_xargs": {}}, {}),
    ({"bad_words": "a"}, {}),
    ({"logit_bias": {"5": 2.0, "6": 1000, "7": -1000, "8": 0, "9": "x"}},
     {"logit_bias": {"5": 2, "6": 100, "7": -100}}),
    ({"logit_bias": {"5": 0}}, {}), ({"logit_bias": {}}, {}), ({"logit_bias": 7}, {}),
])  # fmt: skip
def test_what_shapes_the_distribution_is_told(fields: Any, expected: Any) -> None:
    assert told(fields) == (fields if expected is None else expected)


def test_a_long_value_is_told_by_a_digest_and_one_that_nothing_can_hold_not_at_all() -> None:
    bias, other = ({str(token): value for token in range(60)} for value in (1, 2))
    biases = (bias, dict(reversed(bias.items())), other)
    one, same, two = (told({"logit_bias": value})["logit_bias"] for value in biases)
    assert one == same != two and one.startswith("sha256:") and len(one) == len("sha256:") + 24
    assert told({"vllm_xargs": {"x": float("nan")}}) == told({"vllm_xargs": {"x": 2**70}}) == {"vllm_xargs": None}
    assert told({"bad_words": ["\ud800"]}) == {"bad_words": None}


def test_what_a_route_does_not_read_is_not_told() -> None:
    fields = {"min_p": 0.5, "min_tokens": 2, "thinking_token_budget": 2, "bad_words": ["a"], "allowed_token_ids": [1]}
    assert told(fields, dialect=RESPONSES, by=Known((("min_p", 0.5),), "raw", False, False)).keys() == {
        name for name in OFF if name != "min_p"
    }
    assert told(fields, dialect=COMPLETIONS) == fields
    assert told({"tools": [STRICT], "tool_choice": "required"}, dialect=COMPLETIONS) == {}


@pytest.mark.parametrize(("fields", "kind"), [
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema"),
    ({"response_format": {"type": "json_object"}}, "json_object"),
    ({"response_format": {"type": "structural_tag"}}, "structural_tag"),
    ({"response_format": {"type": "text"}}, None), ({"response_format": None}, None), ({"response_format": 7}, None),
    ({"structured_outputs": {"json": {}}}, "json_schema"), ({"structured_outputs": {"regex": "a"}}, "regex"),
    ({"structured_outputs": {"choice": ["a"], "json": None}}, "choice"),
    ({"structured_outputs": {"grammar": "a"}}, "grammar"),
    ({"structured_outputs": {"json_object": True}}, "json_object"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
    ({"structured_outputs": {}}, None), ({"structured_outputs": None}, None), ({"structured_outputs": 7}, None),
    ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
    ({"tools": [TOOL], "tool_choice": "none"}, None), ({"tools": [TOOL], "tool_choice": None}, None),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, None),
    ({"tools": [TOOL]}, None), ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "json_object"),
    ({"tools": []}, None), ({"tools": 7}, None), ({"tools": [7, {}], "tool_choice": "auto"}, None),
])  # fmt: skip
def test_the_kind_of_grammar(fields: Any, kind: str | None) -> None:
    assert told(fields) == ({} if kind is None else {"structured": kind})


def test_the_format_of_a_response() -> None:
    for form in ("json_schema", "json_object"):
        assert told({"text": {"format": {"type": form}}}, dialect=RESPONSES) == {"structured": form}
    for text in ({"format": {"type": "text"}}, {"format": None}, {}, None, 7):
        assert told({"text": text, "response_format": {"type": "json_object"}}, dialect=RESPONSES) == {}
    assert told({"structured_outputs": {"regex": "a"}}, dialect=RESPONSES) == {"structured": "regex"}


@pytest.mark.parametrize(("tools", "strict", "of_plain", "of_strict"), [
    (False, False, {}, {}), (False, True, {}, {"structured": "tools"}),
    (True, True, {"structured": "tools"}, {"structured": "tools"}),
    (None, None, {}, {"structured": None}),
])  # fmt: skip
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_whether_an_engine_makes_a_grammar_of_tools(
    dialect: Dialect, tools: bool | None, strict: bool | None, of_plain: Any, of_strict: Any
) -> None:
    by = Known(NEUTRAL, "raw", tools, strict)
    plain_tool, strict_tool = (TOOL, STRICT) if dialect == CHAT else ({"name": "f"}, {"name": "f", "strict": True})
    assert told({"tools": [plain_tool]}, by=by, dialect=dialect) == of_plain
    assert told({"tools": [plain_tool, strict_tool], "tool_choice": "auto"}, by=by, dialect=dialect) == of_strict
    named = {"tools": [strict_tool], "structured_outputs": {"regex": "a"}}
    assert told(named, by=by, dialect=dialect)["structured"] == ("tools" if strict else "regex")


def test_defaults_that_are_not_known() -> None:
    assert told({}, by=Known()) == dict.fromkeys(OFF)
    assert told({"top_p": 1, "temperature": 0.5}, by=Known()) == {
        **{name: None for name in OFF if name != "top_p"}, "temperature": 0.5,
    }
    assert told({"temperature": 0}, by=Known()).keys() == {
        "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty",
    }


numbers = st.sampled_from([0.5, 1, 0.25, 2])
requests = st.dictionaries(st.sampled_from(sorted(OFF)), st.one_of(st.none(), numbers))


@given(requests, st.dictionaries(st.sampled_from(sorted(OFF)), numbers), st.sampled_from(DIALECTS), st.booleans())
def test_in_effect_is_the_request_over_the_defaults(fields: Any, own: Any, dialect: Dialect, scored: bool) -> None:
    defaults = {**dict(NEUTRAL), **own}
    by = Known(tuple(defaults.items()), "processed", False, False)
    fields = {name: 2 if name == "top_k" and value is not None else value for name, value in fields.items()}
    both = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
    expected = {name: value for name, value in both.items() if value not in OFF[name]}
    if dialect == RESPONSES:
        expected.pop("min_p", None)
    assert told(fields, dialect=dialect, by=by, scored=scored) == expected
    turned = dict(reversed(fields.items()))
    text = effective(dialect.ignores, dialect.sampled_as(fields), by, scored)
    assert text == effective(dialect.ignores, dialect.sampled_as(turned), by, scored), "equal ones give equal texts"
    if SHAPING.isdisjoint(fields):
        assert plain(dialect.ignores, by, scored) == text


def test_a_request_that_names_nothing_is_worked_out_once() -> None:
    assert plain(CHAT.ignores, PLAIN, False) is plain(CHAT.ignores, PLAIN, False)
    assert json.loads(plain(CHAT.ignores, PLAIN, True)) == {"logprobs": "scored"}


def test_messages_are_told_as_the_chat_that_is_made_of_them() -> None:
    asked = JsonBody(json.dumps({
        "model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "a"}],
        "temperature": 0.5, "top_k": 3, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "any"}, "tools": [{"name": "f", "input_schema": {}}],
    }).encode())  # fmt: skip
    assert told(MESSAGES.translate(asked).fields) == {
        "temperature": 0.5, "top_k": 3, "thinking_token_budget": 1024, "structured": "tools",
    }


# --- what the engine tells


def biased(token: int, logprob: Any) -> Any:
    return {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}]}


def answers(
    first: Any = None, second: Any = None, *rendered: Any, response: Any = None, all: Any = None
) -> list[Any]:
    return [*(rendered or (None, None, None)), response, first, second, all]


def test_the_questions_name_no_parameter_but_for_the_logprobs() -> None:
    asked = questions("m")
    assert [path for path, _ in asked] == [
        "/v1/completions/render", *["/v1/chat/completions/render"] * 2, "/v1/responses", *["/v1/completions"] * 3,
    ]
    limits = [body.get("max_tokens", body.get("max_output_tokens")) for _, body in asked]
    assert set(limits) == {1} and all(body["model"] == "m" for _, body in asked)
    assert [SHAPING & body.keys() for _, body in asked[:4]] == [set(), {"tools"}, {"tools"}, set()]
    assert [body.get("logit_bias") for _, body in asked[4:]] == [{"11": 100}, {"12": 100}, None]
    assert all("model" not in body for _, body in questions("")), "the engine's only model"


@pytest.mark.parametrize(("values", "expected"), [
    ((0.0, 0.0), "processed"), ((-1e-6, 1e-7), "processed"), ((-0.001, -0.2), "processed"),
    ((-5.0, -9.0), "raw"), ((0.0, -9.0), "raw"), ((-0.7, -0.7), "raw"), ((-0.5, -0.5), "unknown"),
    ((12.5, 9.0), "unknown"), ((float("nan"), 0.0), "unknown"), ((None, 0.0), "unknown"), ((10**400, 0.0), "unknown"),
])  # fmt: skip
def test_what_logprobs_are(values: Any, expected: str) -> None:
    assert known(answers(biased(11, values[0]), biased(12, values[1]))).logprobs == expected


@pytest.mark.parametrize("first", [None, {}, {"choices": []}, biased(12, 0.0), {"choices": [{"logprobs": None}]}, 7])
def test_logprobs_of_an_engine_that_does_not_take_a_bias(first: Any) -> None:
    assert known(answers(first, biased(12, 0.0))).logprobs == "unknown"


def test_the_defaults_that_an_engine_tells() -> None:
    """vLLM leaves out what is as it is in a new `SamplingParams`."""
    rendered = [{"sampling_params": {"temperature": 0.7, "top_k": 20, "max_tokens": 1}}]
    found = known(answers(None, None, rendered, {}, {}))
    assert found == Known(tuple({**dict(NEUTRAL), "temperature": 0.7, "top_k": 20}.items()))
    assert told({"top_k": None}, by=found) == {"temperature": 0.7, "top_k": 20}
    assert known(answers()) == Known()
    assert known(answers(None, None, [], {"sampling_params": 7}, 7)) == Known()


def test_an_engine_without_a_render_route_for_completions_tells_them_by_chats() -> None:
    tag = {"sampling_params": {"top_p": 0.5, "structured_outputs": {"structural_tag": "{}"}}}
    found = known(answers(None, None, None, {"sampling_params": {"top_p": 0.5}}, tag))
    assert dict(found.defaults) == {**dict(NEUTRAL), "top_p": 0.5}
    assert (found.tools, found.strict_tools) == (False, True)


def test_a_greedy_default_hides_what_narrows_the_choice() -> None:
    rendered = [{"sampling_params": {"temperature": 0.0, "repetition_penalty": 1.5}}]
    found = known(answers(None, None, rendered, None, None))
    assert told({}, by=found) == {"temperature": 0, "repetition_penalty": 1.5}
    assert told({"temperature": 1, "min_p": 0}, by=found) == {"top_p": None, "top_k": None, "repetition_penalty": 1.5}


RESPONSE = {"temperature": 0.7, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def measured(**change: Any) -> Any:
    """The logprobs of the tokens that biases are about."""
    top = {f"token_id:{token}": -5.0 - token % 7 for token in range(11, 139)}
    return {"choices": [{"logprobs": {"top_logprobs": [{**top, **change}]}}]}


def drawn(*tokens: int) -> Any:
    return {"choices": [{"token_ids": [token]} for token in tokens]}


def test_a_response_tells_four_defaults() -> None:
    found = known(answers(response=RESPONSE))
    assert dict(found.defaults) == RESPONSE
    assert told({}, by=found) == {"temperature": 0.7, "top_k": None, "min_p": None, "repetition_penalty": None}
    greedy = known(answers(response=RESPONSE | {"temperature": 0.0}))
    assert "top_p" not in dict(greedy.defaults)
    for response in (7, {}, RESPONSE | {"top_p": None}):
        assert known(answers(response=response)) == Known()


def test_what_is_asked_of_the_others() -> None:
    first = answers(response=RESPONSE, all=measured())
    draws, ahead, behind = (body for _, body in more_questions("m", known(first), first))
    assert not {"top_k", "min_p"} & draws.keys() and draws["n"] == 256 and draws["repetition_penalty"] == 1
    for body in (ahead, behind):
        assert body["temperature"] == 0 and "repetition_penalty" not in body
        assert body["logit_bias"].keys() == {"11", "12"}
    raw = {token: -5.0 - token % 7 for token in range(11, 139)}
    for body, lead in ((ahead, 0.25), (behind, -0.25)):
        logits = {token: raw[token] + body["logit_bias"][str(token)] for token in (11, 12)}
        assert logits[11] - logits[12] == pytest.approx(lead)
    logits = sorted((raw[token] + draws["logit_bias"][str(token)] for token in raw), reverse=True)
    assert all(before - after > 0.009 for before, after in pairwise(logits)), "no two pass together"
    assert all(abs(bias) <= MOST_BIAS for body in (draws, ahead, behind) for bias in body["logit_bias"].values())


@pytest.mark.parametrize("all", [
    None, 7, {}, measured(**{"token_id:11": None}), measured(**{"token_id:11": -9999.0}),
    measured(**{"token_id:11": float("-inf")}),
])  # fmt: skip
def test_nothing_more_is_asked_where_logprobs_are_not_known(all: Any) -> None:
    first = answers(response=RESPONSE, all=all)
    assert more_questions("m", known(first), first) == []
    assert with_draws(known(first), []) == known(first)


def test_nothing_more_is_asked_where_all_is_told() -> None:
    first = answers(None, None, [{"sampling_params": {}}], None, None, all=measured())
    assert more_questions("m", known(first), first) == []


MANY, FEW = range(11, 12 + ENOUGH), range(11, 11 + ENOUGH)


@pytest.mark.parametrize(("more", "off"), [
    ((drawn(*MANY), drawn(11), drawn(12)), {"top_k", "min_p", "repetition_penalty"}),
    ((drawn(*FEW), drawn(11), drawn(12)), {"repetition_penalty"}),
    ((drawn(*MANY), drawn(12), drawn(12)), {"top_k", "min_p"}),
    ((drawn(*MANY), drawn(11), drawn(11)), {"top_k", "min_p"}),
    ((drawn(*MANY, 500), None, {}), set()), ((None, None, None), set()),
])  # fmt: skip
def test_defaults_that_are_shown_to_be_off(more: Any, off: set[str]) -> None:
    found = with_draws(Known((("temperature", 0.7),), "raw"), more)
    assert dict(found.defaults) == {"temperature": 0.7, **{name: OFF[name][0] for name in off}}
    assert found.logprobs == "raw"


SOME = st.builds(
    Known, st.dictionaries(st.sampled_from(sorted(OFF)), st.floats(0, 2)).map(lambda some: tuple(some.items())),
    st.sampled_from(["raw", "processed", "unknown"]), st.none() | st.booleans(), st.none() | st.booleans(),
)  # fmt: skip


@given(before=SOME, now=SOME)
def test_what_was_told_once_stays_until_something_else_is_told(before: Known, now: Known) -> None:
    found = merged(before, now)
    assert dict(found.defaults) == dict(before.defaults) | dict(now.defaults)
    assert found.logprobs == (before.logprobs if now.logprobs == "unknown" else now.logprobs)
    for made, old, new in ((found.tools, before.tools, now.tools),
                           (found.strict_tools, before.strict_tools, now.strict_tools)):  # fmt: skip
        assert made == (old if new is None else new)
    assert merged(now, Known()) == merged(Known(), now) == now
