"""The table of routes, and the bodies: what is written is read back, and what does not fit names its field."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk import routes
from ajet_sdk.errors import BadRequest
from tests.kit.pages import bounds_table
from tests.kit.source import ROOT

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
        values[f.name] = draw(st.none() | of if optional else of)
    return kind(**values)


@given(bodies())
def test_what_is_written_is_read_back_through_json(body: Any) -> None:
    assert routes.parse(type(body), json.loads(json.dumps(routes.to_json(body)))) == body


@given(bodies())
def test_what_is_read_can_be_stored(body: Any) -> None:
    read = routes.to_json(routes.parse(type(body), routes.to_json(body)))
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    msgpack.packb(read)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


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
        (routes.Reward, {"value": 1, "note": "\ud800"}, "note", "surrogates"),
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
        (routes.Ack, None, "policy_version", "missing"),
    ],
)
def test_what_does_not_fit_names_its_field(kind: type[Any], body: Any, param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        routes.parse(kind, body)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("body", [[], "text", 3])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        routes.parse(routes.Empty, body)


def test_no_body_is_an_empty_one() -> None:
    assert routes.parse(routes.Lease, None) == routes.Lease()


def test_the_table() -> None:
    assert len({route.name for route in routes.ROUTES}) == len(routes.ROUTES)
    assert len({(route.method, route.path) for route in routes.ROUTES}) == len(routes.ROUTES)
    assert {route.scope for route in routes.ROUTES} == {"any", "agent", "trainer", "operator", "admin"}
    for route in routes.ROUTES:
        assert routes.route(route.name) is route
        assert (route.method in ("POST", "PUT", "PATCH")) == (route.body is not None)
    with pytest.raises(KeyError):
        routes.route("no-such-route")


@pytest.mark.parametrize("name", ["a", "ep-1", "A.b_c:d@e-1", "x" * 200])
def test_names_that_an_episode_may_have(name: str) -> None:
    assert routes.check_id(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a b", "a\n", "é", "x" * 201, "ajet-abc", "a%2fb", "a?b"])
def test_names_that_it_may_not(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        routes.check_id(name)
    assert caught.value.param == "episode"


NUMBERS = [
    (route.body, one) for route in routes.ROUTES if route.body is not None for one in dataclasses.fields(route.body)
    if str(one.type).removesuffix(" | None") in ("int", "float")
]  # fmt: skip


@pytest.mark.parametrize(("body", "one"), NUMBERS, ids=[f"{body.__name__}.{one.name}" for body, one in NUMBERS])
def test_every_number_of_a_body_has_bounds(body: type[Any], one: Any) -> None:
    """What is beyond them is refused by the field's name, whoever makes the body."""
    least, most, above = one.metadata["bounds"]
    whole = str(one.type).startswith("int")
    needed: dict[str, Any] = {
        field.name: "x" for field in dataclasses.fields(body)
        if field.default is dataclasses.MISSING and field.type == "str"
    }
    good = [most] if above else [least, most]
    bad = [least] if above else [least - 1]
    bad += [most + 1 if abs(most) < 2**53 else most * 2, -(2**62) if whole else -1e308, 2**62 if whole else 1e308]
    for value in good:
        assert getattr(routes.parse(body, needed | {one.name: value}), one.name) == value
    for value in bad:
        for make in (partial(routes.parse, body), lambda given: body(**given)):
            with pytest.raises(BadRequest) as caught:
                make(needed | {one.name: value})
            assert caught.value.param == one.name


def test_the_page_of_limits_has_every_bound() -> None:
    page = (ROOT / "docs" / "reference" / "limits.md").read_text()
    assert bounds_table() in page
