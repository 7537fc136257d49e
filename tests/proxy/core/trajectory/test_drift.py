"""Every name of `broken_by`, from the situation that it stands for.

The history is one conversation of three turns: a head of 20 tokens (system text and tools) and a question, then answers
of 12 tokens that end in the stop token, with results of tools between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.continuity.memory import Outcome
from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory import drift
from ajet_proxy.core.trajectory.drift import behind, broken_by
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.sample import Call
from tests.kit.strategies import conversations, make_call, tangled_calls

STOP = 2
HEAD = list(range(100, 120))
QUESTION = list(range(120, 130))
ANSWERS = [[*range(base, base + 11), STOP] for base in (200, 220, 240)]
RESULTS = [list(range(base, base + 6)) for base in (300, 320, 340)]

FIRST = HEAD + QUESTION
SECOND = FIRST + ANSWERS[0] + RESULTS[0]
THIRD = SECOND + ANSWERS[1] + RESULTS[1]
HISTORY = THIRD + ANSWERS[2]
SPANS = [(len(text), len(text) + 12) for text in (FIRST, SECOND, THIRD)]


def swap(text: list[int], at: int, new: list[int], old: int = 1) -> list[int]:
    return text[:at] + new + text[at + old :]


FOURTH = HISTORY + RESULTS[2]
CASES = {
    "the same prompt again": ("parallel", FIRST),
    "a fork from the middle of the history": ("parallel", SECOND[:-3]),
    "another result of the same tool call": ("parallel", FIRST + ANSWERS[0] + RESULTS[0][:2] + [900, 901, 902]),
    "nothing shared": ("new_chain", [900, *FIRST]),
    "a title call: only the template's opening is shared": ("new_chain", HEAD[:2] + list(range(900, 940))),
    "another question under the same head": ("new_chain", HEAD + list(range(900, 990))),
    "the template leaves out the stop token": ("template", THIRD + ANSWERS[2][:-1] + RESULTS[2]),
    "the template opens the answer otherwise": ("template", swap(FOURTH, SPANS[0][0], [900, 901])),
    "the reasoning is taken out of an answer": ("template", FIRST + ANSWERS[0][3:] + RESULTS[0]),
    "the reasoning and its opening are taken out": ("template", FIRST[:-1] + ANSWERS[0][4:] + RESULTS[0]),
    "two tokens became three": ("retokenized", swap(FOURTH, SPANS[1][0] + 4, [900, 901, 902], 2)),
    "other tokens up to the stop token": ("retokenized", FIRST + ANSWERS[0][:8] + [900, 901, 902, STOP] + RESULTS[0]),
    "the answer was cut": ("history_edited", FIRST + ANSWERS[0][:5] + [STOP] + RESULTS[0]),
    "the answer was replaced": ("history_edited", FIRST + list(range(900, 910)) + [STOP] + RESULTS[0]),
    "the answer goes on otherwise": ("history_edited", FIRST + ANSWERS[0][:5] + list(range(900, 950))),
    "a result was shortened": ("history_edited", swap(FOURTH, SPANS[0][1] + 1, [900], 4)),
    "the question was reworded": ("history_edited", swap(FOURTH, 25, [900, 901])),
    "a tool was added": ("tools_changed", swap(FOURTH, 5, [900, 901, 902])),
    "a summary took the place of history": ("compacted", HEAD + list(range(900, 905))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_situation_has_its_name(case: str) -> None:
    name, prompt = CASES[case]
    assert broken_by(pack_tokens(prompt), pack_tokens(HISTORY), SPANS) == name


END = [STOP, 3, 4, 5]
"""The end of a message, and the opening of an answer."""
TOLD = [[*HEAD, *range(120, 126), *END], list(range(200, 206))]
"""A first message, and its answer without a stop token."""
LEAD = [700, 701, 702, 703, 704]
QUOTED = {
    "the message grew by a quote": [*HEAD, *range(120, 126), *LEAD, *TOLD[1], 710, *END],
    "right behind what was there": [*HEAD, *range(120, 126), *TOLD[1], 710, *END],
    "at its end": [*HEAD, *range(120, 126), *LEAD, *TOLD[1], *END],
    "the observation changed, too": [*HEAD, *range(120, 123), *LEAD, *TOLD[1], 710, *END],
    "only the end of it": [*HEAD, *range(120, 126), 700, *TOLD[1][-3:], *END],
}


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("case", QUOTED)
def test_a_message_that_quotes_an_answer_is_a_new_prompt_and_no_drift(case: str, stops: bool) -> None:
    """As an environment tells a game: one message repeats all turns so far."""
    if case == "right behind what was there" and not stops:
        pytest.skip("without a stop token nothing tells where the message ended")
    prompt, answer = TOLD[0], [*TOLD[1], *([STOP] if stops else [])]
    span = (len(prompt), len(prompt) + len(answer))
    assert broken_by(pack_tokens(QUOTED[case]), pack_tokens(prompt + answer), [span]) == "new_chain"


SHORT = {
    "two tokens became one": ("retokenized", [900]),
    "only its end is left": ("template", [202, 203]),
    "as many tokens as before": ("history_edited", [900, 901, 902, 903]),
    "nothing is left": ("history_edited", []),
    "it did not stop": ("history_edited", [*range(900, 930)]),
}


@pytest.mark.parametrize("case", SHORT)
def test_a_short_answer_that_is_another_from_its_first_token(case: str) -> None:
    name, instead = SHORT[case]
    history = [*FIRST, 200, 201, 202, 203, STOP]
    assert broken_by(pack_tokens([*FIRST, *instead, STOP, *RESULTS[0]]), pack_tokens(history), [(30, 35)]) == name


def test_one_token_alone_shows_no_template() -> None:
    """Nothing of the answer is left to say whether the prompt comes back to it."""
    for answer in ([200], [STOP], [200, STOP]):
        history, span = FIRST + answer, (30, 30 + len(answer))
        prompt = [*FIRST, 900, STOP, *RESULTS[0]]
        assert broken_by(pack_tokens(prompt), pack_tokens(history), [span]) == "history_edited"


MORE = [400, 401, 402]
"""What a user says next."""
CLOSED = [*FIRST, 900, 901]
"""A prompt that opens a thought."""
GOES_ON = {
    "word for word": (FIRST, ANSWERS[0], [*FIRST, *ANSWERS[0], *MORE]),
    "without a stop token": (FIRST, ANSWERS[0][:-1], [*FIRST, *ANSWERS[0], *MORE], [STOP, *MORE]),
    "its reasoning is left out": (FIRST, ANSWERS[0], [*FIRST, *ANSWERS[0][9:], *MORE]),
    "and so is its opening": (CLOSED, ANSWERS[0], [*FIRST, *ANSWERS[0][10:], *MORE]),
    "other tokens": (FIRST, ANSWERS[0], [*FIRST, *ANSWERS[0][:4], 900, *ANSWERS[0][5:], *MORE]),
    "other tokens to its end": (FIRST, ANSWERS[0], [*FIRST, *ANSWERS[0][:8], 900, 901, STOP, *MORE]),
    "an answer that was cut and is another now": (FIRST, [200, 201], [*FIRST, 200, 900, *MORE], [900, *MORE]),
    "under another system prompt": (FIRST, ANSWERS[0], [*swap(FIRST, 3, [900, 901]), *ANSWERS[0], *MORE]),
    "another first question": (FIRST, ANSWERS[0], [*swap(FIRST, 25, [900]), *ANSWERS[0], *MORE]),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_what_came_behind_an_answer_is_found_however_it_is_written(case: str) -> None:
    asked, answer, prompt, *came = GOES_ON[case]
    at = behind(pack_tokens(prompt), pack_tokens(asked + answer), len(asked))
    assert at is not None and prompt[at:] == (came[0] if came else MORE)


GOES_ON_NOT = {
    "the same question again": (FIRST, ANSWERS[0], FIRST),
    "an earlier one": (FIRST, ANSWERS[0], FIRST[:-4]),
    "another one": (FIRST, ANSWERS[0], [*FIRST[:-8], *range(900, 920)]),
    "another one that differs at its end": (FIRST, ANSWERS[0], [*FIRST[:-2], 900, 901, *ANSWERS[1], *MORE]),
    "another one that stops alike": (TOLD[0], [*TOLD[1], STOP], [*HEAD, *range(120, 126), 900, *END, 7, *END]),
    "nothing was answered": (FIRST, [], [*FIRST, *MORE]),
    "a title that quotes it": (FIRST, ANSWERS[0], [900, 901, *FIRST[4:], 902, *ANSWERS[0], 903]),
}


@pytest.mark.parametrize("case", GOES_ON_NOT)
def test_nothing_came_behind_an_answer_that_a_prompt_does_not_go_on_from(case: str) -> None:
    asked, answer, prompt = GOES_ON_NOT[case]
    assert behind(pack_tokens(prompt), pack_tokens(asked + answer), len(asked)) is None


@given(st.one_of(tangled_calls(), conversations()))
def test_the_first_timeline_of_its_kind_is_not_broken_and_every_other_is(calls: list[Call]) -> None:
    first = set()
    for timeline in merge(calls):
        kind = (timeline.model, timeline.agent)
        assert (timeline.broken_by is None) == (kind not in first)
        first.add(kind)


def test_the_nearest_timeline_is_the_one_compared() -> None:
    calls = [
        make_call("a", FIRST, ANSWERS[0], at=0),
        make_call("b", [900, 901], [902, STOP], at=1),
        make_call("c", swap(SECOND, SPANS[0][0] + 4, [910, 911], 1), [1, STOP], at=2),
    ]
    assert [line.broken_by for line in merge(calls)] == [None, "new_chain", "retokenized"]


def test_only_earlier_calls_are_compared() -> None:
    """At the time of the second call the first timeline had one turn; that it went on later changes nothing."""
    calls = [
        make_call("a", FIRST, ANSWERS[0], at=0),
        make_call("b", HEAD + list(range(900, 903)), [1, STOP], at=1),
        make_call("c", SECOND, ANSWERS[1], at=2),
    ]
    assert [line.broken_by for line in merge(calls)] == [None, "new_chain"]
    assert [line.broken_by for line in merge([*calls[:1], *calls[2:], make_call("b", [*HEAD, 900], [STOP], at=3)])] == [
        None, "compacted",
    ]


def test_forks_of_forks_know_what_was_sampled_before_they_parted() -> None:
    """The nearest timeline of all but the first fork is another fork, in whose prompt the shared answers stand. A call
    that said nothing, at the end of the first answer, has sampled none of it."""
    shared = SECOND + ANSWERS[1]
    forks = [make_call(f"fork{place}", [*shared, 400 + place], [1, STOP], at=3 + place) for place in range(4)]
    calls = [
        make_call("a", FIRST, ANSWERS[0], at=0),
        make_call("silent", FIRST + ANSWERS[0], [], at=1),
        make_call("b", SECOND, ANSWERS[1], at=2),
        *forks,
        make_call("drifted", [*swap(SECOND, SPANS[0][0] + 4, [910, 911], 1), 500], [1, STOP], at=9),
        make_call("later", [*swap(shared, SPANS[1][0] + 4, [910], 1), 500], [1, STOP], at=10),
    ]
    assert [line.broken_by for line in merge(calls)] == [None, *["parallel"] * 3, "retokenized", "retokenized"]


DRIFTS = [swap(SECOND, SPANS[0][0] + 4, [token], 2) for token in (910, 911, 912)]
"""Three ways of reading the first answer, none of them the one in which it was sampled."""


def test_what_drifts_for_a_second_time_at_one_place_has_drifted() -> None:
    """The nearest timeline of the third call is the second, whose prompt holds no sampled token: the difference is one
    between two readings, and neither is what the first call sampled."""
    calls = [
        make_call("a", FIRST, ANSWERS[0], at=0),
        *(make_call(f"drift{place}", prompt, ANSWERS[1], at=1 + place) for place, prompt in enumerate(DRIFTS)),
        make_call("again", DRIFTS[0], ANSWERS[1], at=7),
        make_call("other", [*DRIFTS[0][:-3], 920, 921], ANSWERS[1], at=8),
    ]
    told = ["retokenized"] * 3 + ["parallel", "retokenized"]
    assert [line.broken_by for line in merge(calls)] == [None, *told]
    later = [replace(calls[0], started_at=20.0), *calls[1:3]]
    assert [line.broken_by for line in merge(later)] == [None, "new_chain", "parallel"], "only earlier calls count"


def test_a_fork_of_two_drifted_turns_is_told_from_the_answer_that_should_stand_there() -> None:
    """Without the second answer the two readings of it would be forks behind the first."""
    behind = SECOND + ANSWERS[1] + RESULTS[1]
    forks = [make_call(f"b{token}", swap(behind, SPANS[1][0] + 4, [token], 2), [1, STOP], at=token) for token in (5, 6)]
    both = [make_call("a", FIRST, ANSWERS[0], at=0), make_call("c", SECOND, ANSWERS[1], at=1)]
    assert [line.broken_by for line in merge([*both, *forks])] == [None, "retokenized", "retokenized"]
    assert [line.broken_by for line in merge([*both[:1], *forks])] == [None, "parallel"]


def test_of_several_answers_to_one_prompt_the_one_that_is_like_it_is_compared() -> None:
    """Its neighbours in the order of their texts, on either side, said something else, or less."""
    others = [[*range(base, base + 11), STOP] for base in (150, 190, 210, 250)]
    answers = [make_call(f"n{place}", FIRST, answer, at=0) for place, answer in enumerate([*others, ANSWERS[0]])]
    silent = make_call("silent", FIRST, [], at=0.5)
    drifts = [make_call(f"d{place}", prompt, [1, STOP], at=1 + place) for place, prompt in enumerate(DRIFTS[:2])]
    named = {line.turns[0].call: line.broken_by for line in merge([*answers, silent, *drifts])}
    assert (named["d0"], named["d1"]) == ("retokenized", "retokenized")


def test_what_the_agent_is_known_to_have_left_out_is_its_own_edit() -> None:
    """By its tokens alone it is what a template does that takes reasoning out."""
    assert set(drift.EDITED) <= set(get_args(Outcome))
    first = make_call("a", FIRST, ANSWERS[0], at=0)
    second = make_call("b", FIRST + ANSWERS[0][3:] + RESULTS[0], [1, STOP], at=1)
    edited = [(word, "history_edited") for word in drift.EDITED]
    for word, name in ((None, "template"), ("unknown_history", "template"), *edited):
        assert [line.broken_by for line in merge([first, replace(second, continuity=word)])] == [None, name]
    fork = replace(make_call("b", [*FIRST, *ANSWERS[0][:5], 900], [1, STOP], at=1), continuity="words_left_out")
    assert [line.broken_by for line in merge([first, fork])] == [None, "history_edited"]
    new = replace(make_call("b", [900], [1, STOP], at=1), continuity="words_left_out")
    assert [line.broken_by for line in merge([first, new])] == [None, "new_chain"], "no more than what looks like drift"


def test_what_does_not_come_back_to_an_answer_keeps_its_vague_name() -> None:
    edits = [make_call(f"e{token}", [*FIRST, token, *range(920, 980)], [1, STOP], at=token) for token in (900, 901)]
    calls = [make_call("a", FIRST, ANSWERS[0], at=0), *edits]
    assert [line.broken_by for line in merge(calls)] == [None, "history_edited", "new_chain"]


def test_a_history_whose_last_calls_said_nothing() -> None:
    """The difference lies in the prompt of a call that sampled no token: nothing was generated behind it."""
    history = FIRST + ANSWERS[0] + RESULTS[0]
    spans = [SPANS[0], (len(history), len(history))]
    assert broken_by(pack_tokens(swap(history, -2, [900, 901], 2)), pack_tokens(history), spans) == "parallel"
    assert broken_by(pack_tokens([*FIRST[:-2], 900]), pack_tokens(FIRST), [(30, 30)]) == "new_chain"


def test_reasoning_that_is_taken_out_with_its_opening_is_the_templates() -> None:
    """However long the answer behind it is: an empty block stands in place of both."""
    thought, answer = [*range(900, 920)], [*range(200, 220), STOP]
    history = [*FIRST, 950, *thought, *answer]
    span = (len(FIRST) + 1, len(history))
    prompt = [*FIRST, 951, 952, *answer, *RESULTS[0]]
    assert broken_by(pack_tokens(prompt), pack_tokens(history), [span]) == "template"
    behind = [*FIRST, *range(700, 706), *answer, *RESULTS[0]]
    assert broken_by(pack_tokens(behind), pack_tokens(history), [span]) == "new_chain"
