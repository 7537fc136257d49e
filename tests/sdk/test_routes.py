"""The table of routes, and the bodies: what is written is read back, and what does not fit names its field."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ajet_sdk import limits, routes
from ajet_sdk.bodies import check_episode, check_id, parse, to_json
from ajet_sdk.errors import BadRequest
from tests.kit.pages import bounds_table
from tests.kit.source import ROOT
from tests.kit.strategies import nested

NUMBER = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OF = {
    "float": NUMBER,
    "int": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "str": TEXT,
    "Mapping[str, Any]": st.dictionaries(TEXT, JSON, max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
    "Mapping[str, float]": st.dictionaries(TEXT, st.floats(0.0, 1.0), max_size=3),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
    "tuple[Mapping[str, Any], ...]": st.dictionaries(TEXT.filter(bool), st.floats(-1, 1), max_size=3).map(
        lambda values: tuple({"call": call[:200], "value": value} for call, value in values.items())
    ),
}
NAMES = st.text("abc", min_size=1, max_size=3)
BY_CHECK: dict[Any, st.SearchStrategy[Any]] = {
    check_id: NAMES, check_episode: NAMES, limits.check_name: NAMES,
    limits.check_agents: st.dictionaries(NAMES, NAMES, max_size=3),
    limits.check_shares: NAMES.map(lambda name: {name: 0.25, f"{name}-": 0.75}),
    limits.check_upstreams: st.lists(NAMES.map(lambda name: f"http://{name}:80"), max_size=3).map(tuple),
}
BODIES = sorted({route.body for route in routes.ROUTES if route.body is not None}, key=lambda kind: kind.__name__)


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(BODIES))
    values = {}
    for f in dataclasses.fields(kind):
        optional = str(f.type).endswith("| None")
        of = OF[str(f.type).removesuffix(" | None")]
        if "bounds" in f.metadata:
            least, most, above = f.metadata["bounds"]
            whole = "int" in str(f.type)
            of = st.integers(least, most) if whole else st.floats(least, most, exclude_min=above)
        elif "length" in f.metadata:
            least, most = f.metadata["length"]
            of = st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=min(most, 10))
        elif "words" in f.metadata:
            of = st.sampled_from(f.metadata["words"])
        elif "check" in f.metadata:
            of = BY_CHECK[f.metadata["check"]]
        values[f.name] = draw(st.none() | of if optional else of)
    try:
        return kind(**values)
    except BadRequest as error:  # of fields that do not go together
        assume(error.param not in ("state", "model", "teachers", "lane", "response", "value", "rewards"))
        raise


@given(bodies())
def test_what_is_written_is_read_back_through_json(body: Any) -> None:
    assert parse(type(body), json.loads(json.dumps(to_json(body)))) == body


@given(bodies())
def test_what_is_read_can_be_stored(body: Any) -> None:
    read = to_json(parse(type(body), to_json(body)))
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    msgpack.packb(read)


@pytest.mark.parametrize(
    ("kind", "body", "param", "says"),
    [
        (routes.Reward, {}, "value", "missing"),
        (routes.Reward, {"value": "1"}, "value", "finite number"),
        (routes.Reward, {"value": True}, "value", "finite number"),
        (routes.Reward, {"value": None}, "value", "finite number"),
        (routes.Reward, {"value": float("nan")}, "value", "finite number"),
        (routes.Reward, {"value": float("-inf")}, "value", "finite number"),
        (routes.Reward, {"value": 10**400}, "value", "finite number"),
        (routes.Reward, {"value": 1, "final": 1}, "final", "true or false"),
        (routes.Reward, {"value": 1, "finall": True}, "finall", "did you mean 'final'"),
        (routes.Reward, {"value": 1, "note": 7}, "note", "a string"),
        (routes.OpenEpisode, {"task": "\ud800"}, "task", "surrogates"),
        (routes.Reward, {"value": 1, "call": 7}, "call", "a string"),
        (routes.OpenEpisode, {"metadata": {"a": {"\udcff": 1}}}, "metadata", "surrogates"),
        (routes.OpenEpisode, {"metadata": {"a": [float("inf")]}}, "metadata", "finite"),
        (routes.OpenEpisode, {"metadata": {"a": 2**63}}, "metadata", "64 bits"),
        (routes.OpenEpisode, {"metadata": {"a": nested(100)}}, "metadata", "nested"),
        (routes.OpenEpisode, {"metadata": []}, "metadata", "an object"),
        (routes.OpenEpisode, {"metadata": {"a": [object()]}}, "metadata", "JSON can say, not a object"),
        (routes.OpenEpisode, {"members": {"a": 1}}, "members", "strings"),
        (routes.OpenEpisode, {"eval": "yes"}, "eval", "true or false"),
        (routes.Lease, {"groups": 1.5}, "groups", "an integer"),
        (routes.Lease, {"groups": 2**70}, "groups", "64 bits"),
        (routes.Policy, {"model": "m", "version": 1, "upstreams": ["a", 1]}, "upstreams", "a list of strings"),
        (routes.Empty, {"zzz": 1}, "zzz", "known: none"),
        (routes.Empty, {"z" * 100_000: 1}, "z" * 80, "known: none"),
        (routes.Ack, None, "policy_version", "missing"),
        (routes.OpenEpisode, {"id": "a/b"}, "id", "id must be 1 to 200"),
        (routes.OpenEpisode, {"members": {"": "m"}}, "members", "1 to 1000"),
        (routes.OpenEpisode, {"members": {"a": ""}}, "members", "1 to 1000"),
        (routes.OpenEpisode, {"members": {"a" * 1001: "m"}}, "members", "1 to 1000"),
        (routes.OpenEpisode, {"teachers": {"a": "m" * 1001}}, "teachers", "1 to 1000"),
        (routes.OpenEpisode, {"members": {"a": "m"}, "teachers": {"a": "n"}}, "teachers", "'a' is a member and a"),
        (routes.OpenEpisode, {"members": {"a": "m"}, "teachers": {"b": "m"}}, "teachers", "others learn as 'm'"),
        (routes.OpenEpisode, {"model": "m", "teachers": {"b": "m"}}, "teachers", "others learn as 'm'"),
        (routes.Reward, {"value": 1, "state": "s"}, "state", "name the call too"),
        (routes.Reward, {"value": 1, "call": "c", "model": "m"}, "model", "of one model already"),
        (routes.Abort, {"cause": "weather"}, "cause", "cause must be one of agent, infra, not 'weather'"),
        (routes.Lease, {"max_lead": 1}, "model", "max_lead is that of a model"),
        (routes.GateClose, {"model": "x" * 1001}, "model", "model must have 0 to 1000 characters"),
        (routes.SetMix, {"lane_wait_s": float("inf")}, "lane_wait_s", "finite"),
        (routes.Evaluate, {"model": "m", "episodes": 1, "id": "a b"}, "id", "id must be"),
        (routes.Play, {"name": "a/b", "episodes": 2}, "name", "name must be 1 to 200"),
    ],
)
def test_what_does_not_fit_names_its_field(kind: type[Any], body: Any, param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        parse(kind, body)
    assert caught.value.param == param
    assert len(caught.value.message) < 300
    if "missing" not in says and "known" not in says and "did you mean" not in says:
        with pytest.raises(BadRequest) as at_home:
            kind(**body)
        assert str(at_home.value) == str(caught.value), "a client hears what the route would say"


LANES = {str(number): 1 / (limits.MAX_LANES + 1) for number in range(limits.MAX_LANES + 1)}


@pytest.mark.parametrize("shares", [
    {}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 0.5, "b": 0.6}, {"a": float("nan"), "b": 0.5}, {"": 1.0}, LANES,
    {"a/b": 1.0}, {"a" * 1001: 1.0}, {"math": "much"}, {"math": True}, [1.0],
])  # fmt: skip
def test_shares_that_are_none(shares: Any) -> None:
    with pytest.raises(BadRequest, match="shares"):
        routes.SetMix(shares)


def test_shares_may_be_rounded() -> None:
    routes.SetMix({"a": 0.333333, "b": 0.333333, "c": 0.333333})
    routes.SetMix({str(number): 1 / limits.MAX_LANES for number in range(limits.MAX_LANES)})
    routes.SetMix({"a": 1.0, "b": 0.0})


@pytest.mark.parametrize(
    "url", ["http://", "http://[x", "http://[", "http://a b", "http://a?x=1", "http://a#b", "http://a:99999",
            "http://a\n", "", "http://a..b", "http://999.1.1.1", "http://me:sesame@a", "ftp://x", "localhost:8000"]
)  # fmt: skip
def test_an_engine_that_has_no_base_url(url: str) -> None:
    with pytest.raises(BadRequest, match="no http://HOST:PORT") as caught:
        routes.Policy("m", 1, ("http://good:8000", url))
    assert caught.value.param == "upstreams"
    assert "sesame" not in caught.value.message
    routes.Policy("m", 1, ("http://good:8000", "https://[::1]:8000/prefix"))


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [(routes.Abort, {}, "reason"), (routes.Reward, {"value": 0}, "note"), (routes.Score, {"value": 0}, "note")],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_words_never_cost_what_they_stand_beside(kind: type[Any], body: dict[str, Any], name: str) -> None:
    """They are a program's output or an exception's text, however long, in whatever encoding."""
    said = {"x" * 10_000: "x" * 10_000, "x" * 10_001: f"{'x' * 9_995}(cut)", "caf\udce9": "caf?", "": "", None: None}
    for words, kept in said.items():
        assert getattr(kind(**body, **{name: words}), name) == kept
        assert getattr(parse(kind, body | {name: words}), name) == kept


def test_a_reason_of_what_a_trainer_left_out_has_a_length() -> None:
    with pytest.raises(BadRequest) as caught:
        routes.Ack(1, {"ep": "x" * 10_001})
    assert caught.value.param == "filtered"


@pytest.mark.parametrize("body", [[], "text", 3])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        parse(routes.Empty, body)


def test_no_body_is_an_empty_one() -> None:
    assert parse(routes.Lease, None) == routes.Lease()


def test_the_table() -> None:
    assert len({route.name for route in routes.ROUTES}) == len(routes.ROUTES)
    assert len({(route.method, route.path) for route in routes.ROUTES}) == len(routes.ROUTES)
    assert {route.scope for route in routes.ROUTES} == {"any", "agent", "trainer", "operator", "admin", "judge"}
    for route in routes.ROUTES:
        assert routes.route(route.name) is route
        assert (route.method in ("POST", "PUT", "PATCH")) == (route.body is not None)
    with pytest.raises(KeyError):
        routes.route("no-such-route")


@pytest.mark.parametrize("name", ["a", "ep-1", "A.b_c:d@e-1", "x" * 200])
def test_names_that_an_episode_may_have(name: str) -> None:
    assert check_id(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a b", "a\n", "é", "x" * 201, "ajet-abc", "a%2fb", "a?b"])
def test_names_that_it_may_not(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_id(name)
    assert caught.value.param == "episode"


def each_field(*kinds: str) -> Any:
    """Parameters: each body with each of its fields of these kinds."""
    found = [(body, one) for body in BODIES for one in dataclasses.fields(body)
             if str(one.type).removesuffix(" | None") in kinds]  # fmt: skip
    return pytest.mark.parametrize(("body", "one"), found, ids=[f"{body.__name__}.{one.name}" for body, one in found])


def needed(body: type[Any]) -> dict[str, Any]:
    """Values of the fields that `body` needs, alone or with others."""
    of = {"str": "x", "float": 1.0, "int": 1, "Mapping[str, Any]": {}}
    return {
        one.name: (*one.metadata.get("words", ()), of[str(one.type).removesuffix(" | None")])[0]
        for one in dataclasses.fields(body) if one.default is one.default_factory or (body, one.name) in TOGETHER
    }  # fmt: skip


TOGETHER = [(routes.Lease, "model"), (routes.Feedback, "episode"), (routes.Feedback, "value")]
"""A lead is that of a model. Feedback is of something, and says something."""


@each_field("int", "float")
def test_every_number_of_a_body_has_bounds(body: type[Any], one: Any) -> None:
    """A number beyond them is refused by the field's name, whoever makes the body."""
    least, most, above = one.metadata["bounds"]
    whole = str(one.type).startswith("int")
    good = [most] if above else [least, most]
    bad = [least] if above else [least - 1]
    bad += [most + 1 if abs(most) < 2**53 else most * 2, -(2**62) if whole else -1e308, 2**62 if whole else 1e308]
    for value in good:
        assert getattr(parse(body, needed(body) | {one.name: value}), one.name) == value
    for value in bad:
        for make in (partial(parse, body), lambda given: body(**given)):
            with pytest.raises(BadRequest) as caught:
                make(needed(body) | {one.name: value})
            assert caught.value.param == one.name


UNBOUND = [(routes.Abort, "reason"), (routes.Reward, "note"), (routes.Supervise, "known")]
"""Texts that are cut, or only compared."""


@each_field("str")
def test_every_text_of_a_body_has_a_length_or_is_one_of_some_words_or_names_what_there_is(
    body: type[Any], one: Any
) -> None:
    if one.name in ("call", "client", "play") or (body, one.name) in UNBOUND:
        return
    least, most = one.metadata.get("length", (0, 200))
    for value in [" " * (most + 1), *[""] * (least > 0)]:
        with pytest.raises(BadRequest) as caught:
            body(**needed(body) | {one.name: value})
        assert caught.value.param == one.name
    more = {"call": "c"} if one.name == "state" else {}
    assert "length" not in one.metadata or body(**needed(body) | {one.name: "x" * most} | more)


HOLD: dict[Any, str] = {
    (0, 200): "OpenEpisode.revision",
    (1, 200): "Attend.instance Attend.run Join.lane Join.name Join.revision Policy.run Reward.id "
    "Reward.response Feedback.call Feedback.response Judgement.judge",
    (0, 1000): "Attend.host Flush.lane Flush.task GateClose.model GateOpen.model Lease.model OpenEpisode.agent "
    "OpenEpisode.model OpenEpisode.task Reward.agent SetMix.model",
    (1, 1000): "Attend.model Evaluate.model LeaseJudgements.lane LeaseJudgements.model Policy.candidate_of "
    "Policy.model Reward.model Reward.state Supervise.instance",
    (0, 10_000): "Attend.folder Feedback.better Feedback.text GateClose.reason",
    ("agent", "infra"): "Abort.cause",
    ("comes", "beats", "begins", "leaves"): "Attend.says",
    ("running", "stopped"): "ChangeRun.desired PutRun.desired",
    ("groups", "episodes"): "Lease.unit LeaseJudgements.unit",
    limits.check_name: "PutRun.supervisor Supervise.name",
    "an id": "Evaluate.id Feedback.episode Join.id OpenEpisode.id Play.name",
}
"""The lengths or the words of all texts, but for those that name what there is, or are cut."""


def test_texts_hold_what_they_are_said_to() -> None:
    found: dict[Any, str] = {}
    texts = ((body, one) for body in BODIES for one in dataclasses.fields(body))
    for kind, one in texts:
        if str(one.type).removesuffix(" | None") == "str" and one.metadata:
            (holds,) = one.metadata.values()
            holds = "an id" if holds in (check_id, check_episode) else holds
            found[holds] = " ".join(sorted([*found.get(holds, "").split(), f"{kind.__name__}.{one.name}"]))
    assert found == {holds: " ".join(sorted(names.split())) for holds, names in HOLD.items()}


def test_the_page_of_limits_has_every_bound() -> None:
    page = (ROOT / "docs" / "reference" / "limits.md").read_text()
    assert bounds_table() in page
