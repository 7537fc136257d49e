"""The pages of the contract are held to the code: words, states, programs, routes, headers and errors.

A list that is one in the code is compared with it. Of error codes, which are written where they are raised, the words
are looked for in the text of the code.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any, get_args

import click
import pytest

import ajet_sdk
from ajet_proxy import cli as proxy_cli
from ajet_proxy.core.continuity.memory import FIELD
from ajet_proxy.core.control import episodes
from ajet_proxy.core.identity import ladder as identity
from ajet_proxy.core.identity.headers import _KNOWN, HARNESS_HEADERS
from ajet_proxy.core.ledger import attempts
from ajet_proxy.core.ledger.episode import NEXT, TAKES
from ajet_proxy.core.protocol.anthropic.errors import body_of
from ajet_proxy.core.protocol.dialect import Skip
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED, OPEN_ROUTES
from ajet_proxy.core.trajectory import call, drift
from ajet_sdk import cli as sdk_cli
from ajet_sdk import errors, headers, routes
from ajet_sdk.errors import AjetError
from ajet_sdk.settings import ConfigError
from ajet_trainer import cli as trainer_cli
from tests.kit.pages import contract, tables, words
from tests.kit.source import PACKAGES, ROOT, modules
from tests.kit.strategies import EVENT_KINDS

SECTIONS = contract()
ROUTES = ("5.1", "8.1", "11")
"""The sections that have the tables of the control routes and of what their bodies hold."""


def table(number: str, nth: int = 0) -> list[list[str]]:
    """A table of a section, as rows of cells."""
    return tables(SECTIONS[number])[nth]


def column(number: str, at: int = 0, nth: int = 0) -> list[str]:
    """The words in backquotes in a column of it."""
    return [word for row in table(number, nth) for word in words(row[at])]


def listed(number: str, after: str) -> list[str]:
    """The words in backquotes between some words and the end of their paragraph or item."""
    _, found, rest = " ".join(SECTIONS[number].split("\n")).partition(after)
    assert found, f"section {number} does not say {after!r}"
    return words(re.split(r"\.(?: |$)", rest)[0])


# -- words


def test_the_states_and_where_they_lead() -> None:
    shown = {words(state)[0]: set(words(after)) for state, after, _ in table("1.1")}
    assert tuple(shown) == routes.EPISODE_STATES
    assert shown == {state: set(after) for state, after in NEXT.items()}
    assert f"`opened = {' + '.join(routes.EPISODE_STATES)}`" in SECTIONS["1.1"]


def test_what_each_state_takes() -> None:
    names = [cell.strip() for cell in SECTIONS["1.2"].split("|")[2:7]]
    shown = {words(row[0])[0]: dict(zip(names, row[1:], strict=True)) for row in table("1.2")}
    assert shown == {state: {name: TAKES[name][state] for name in TAKES} for state in NEXT}


def test_the_reasons_to_discard() -> None:
    assert tuple(word for row in table("1.3") for word in words(row[0])) == routes.DISCARD_REASONS


def losses() -> Iterator[str]:
    """Every reason for which a call is lost."""
    yield from (value for name, value in vars(call).items()
                if name.isupper() and isinstance(value, str) and name != "SCORED")
    yield from get_args(Skip)


def test_the_reasons_to_lose_a_call() -> None:
    assert len(column("1.4")) == len(set(column("1.4")))
    assert set(column("1.4")) == set(losses())


def test_what_the_world_failed() -> None:
    """Each reason of the list, the statuses that are the agent's, and each reason to lose a call on one side."""
    own = (attempts.HELD, attempts.UNSERVED, attempts.AWAY, attempts.MORE)
    by_world = {reason for reason in losses() if attempts.fate(reason, status=500) == "world"}
    assert set(column("5.4")) == {*own, *by_world}
    (row,) = (row for row in table("5.4") if words(row[0]) == ["refused"])
    assert [int(status) for status in re.findall(r"\b4\d\d\b", row[1])] == list(errors.SENT_BADLY)


def test_the_ways_to_name_an_episode() -> None:
    assert tuple(column("3.1")) == get_args(identity.Way)
    described = " ".join((identity.__doc__ or "").split())
    assert f"one order: {', '.join(column('3.1'))};" in described


# -- programs


def test_the_commands() -> None:
    assert {number: set(column(number)) for number in ("2", "9", "10")} == {
        "2": set(sdk_cli.ajet.list_commands(None)),  # type: ignore[arg-type]
        "9": set(trainer_cli.cli.list_commands(None)),  # type: ignore[arg-type]
        "10": set(proxy_cli.cli.commands),
    }


@pytest.mark.parametrize(
    ("number", "module", "group"),
    [("2", sdk_cli, sdk_cli.ajet), ("9", trainer_cli, trainer_cli.cli), ("10", proxy_cli, proxy_cli.cli)],
)
def test_the_exit_codes(number: str, module: ModuleType, group: click.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {int(row[0]) for row in table(number, 1)}
    ways: list[BaseException | None] = [
        None, AjetError("failed"), ConfigError("cannot be used"), click.UsageError("bad"), KeyboardInterrupt(),
    ]

    def end(*_: Any, **__: Any) -> None:
        if (way := ways.pop()) is not None:
            raise way

    monkeypatch.setattr(group, "main", end)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ended = set()
    while ways:
        with pytest.raises(SystemExit) as caught:
            module.main()
        ended.add(caught.value.code)
    assert ended == shown


# -- reaching the proxy


def test_the_headers() -> None:
    ours = [name for name in (*column("3.2"), *column("3.3")) if name.startswith("X-AJet")]
    assert set(ours) == set(_KNOWN.values()) == {
        value for name, value in vars(headers).items() if name.startswith("HEADER_") and name != "HEADER_PREFIX"
    }
    assert column("3.3") == [headers.HEADER_EPISODE, headers.HEADER_CALL]
    harness = next(row for row in table("3.1") if "harness" in row[0])
    assert tuple(words(harness[1])) == HARNESS_HEADERS


def test_the_environment_of_a_program() -> None:
    assert words(SECTIONS["3.5"].partition("give:")[2]) == list(episodes.environment("", "", "", ""))


def test_the_routes_of_llms() -> None:
    assert set(listed("4", "to these routes is captured:")) == set(CAPTURED)
    assert set(listed("4", "every other request under `/v1/`;")) - {"allow_route"} == OPEN_ROUTES


ASKED: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": ({}, {"include_reasoning": False}, {"logprobs": True, "top_logprobs": None}),
    "/v1/completions": ({"prompt": "a"}, {"prompt": "a", "echo": True}),
    "/v1/responses": ({"input": "a"}, {"input": "a", "top_logprobs": 3}),
    "/v1/messages": ({},),
}
"""Requests with which each route asks the engine for all that it can ask for."""


def test_what_the_engine_sees_otherwise() -> None:
    found = {FIELD, call.SCORED}
    assert set(ASKED) == set(CAPTURED)
    for path, requests in ASKED.items():
        for body in requests:
            exchange = Exchange(CAPTURED[path], _request(body), model="other", versions=True)
            exchange.under(1, 1.0)
            found |= set(exchange.altered)
    assert set(column("4.2")) == found


def _request(body: dict[str, Any]) -> JsonBody:
    return JsonBody(json.dumps({"model": "m", "messages": []} | body).encode())


# -- control routes


def required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def test_the_control_routes_and_their_bodies() -> None:
    shown = [(words(route)[0], scope, words(body)) for number in ROUTES for route, scope, body, _ in table(number)]
    assert sorted(shown) == sorted(
        (f"{route.method} {route.path}", route.scope, [_body(route.body)] if route.body is not None else [])
        for route in routes.ROUTES
    )


def _body(kind: Any) -> str:
    return "{" + ", ".join(f.name + ("" if required(f) else "?") for f in fields(kind)) + "}"


def test_the_fields_of_bodies() -> None:
    shown = {
        (name, kind.strip("`"), default.strip("`"))
        for number in ROUTES for kind, default, names in table(number, 1) for name in words(names)
    }
    kinds = {route.body for route in routes.ROUTES if route.body is not None}
    assert shown == {(f.name, str(f.type), _default(f)) for kind in kinds for f in fields(kind)}


def _default(field: Any) -> str:
    if required(field):
        return ""
    return str(field.default if field.default is not MISSING else field.default_factory())


def test_the_events() -> None:
    assert set(words(SECTIONS["11.3"])) >= {kind.__name__ for kind in EVENT_KINDS}
    names = {word for word in words(SECTIONS["11.3"]) if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+", word)}
    assert names == {kind.__name__ for kind in EVENT_KINDS}


def test_the_scopes_and_what_each_error_says() -> None:
    assert {route.scope for route in routes.ROUTES} <= set(words(SECTIONS["11.4"]))
    kinds: tuple[type[errors.AjetError], ...] = (*errors._KINDS, errors.AjetError)
    shown = [(int(status), words(kind)[0], words(theirs)[0]) for status, kind, theirs, _ in table("5.8")]
    assert shown == sorted((kind.status, kind.type, body_of(kind(""))["error"]["type"]) for kind in kinds)


OTHER_STATUS = {405, 407, 426}
"""Statuses that no class of errors has: they take the place of its own."""
NO_ANSWER = {
    "unreachable", "no_episode", "frame_too_large", "wire_version", "data_dir_locked", "journal_damaged",
    "journal_missing", "journal_gone",
    "archive_missing",
}  # fmt: skip
"""Codes of errors that are raised where no request is answered; one of them is an answer too."""
MADE = {
    *(f"episode_{state}" for state in NEXT if "refuse" in {row[state] for row in TAKES.values()}),
    "batch_trained", "batch_returned", "engine_connect", "engine_broken", "disk_limit", "memory_limit",
    *(f"{name}_quota" for name in ("episodes", "requests", "tokens", "bytes")),
}
"""Codes that are put together."""


def test_the_codes_of_errors() -> None:
    """Each code that stands in the code is on the page with one status, or raised without a request; and no other."""
    source = "\n".join((ROOT / module).read_text() for module in modules(*PACKAGES))
    in_code = {*re.findall(r'\bcode="(\w+)"', source)} | MADE
    shown = [(int(status), code) for status, codes, _ in table("5.9") for code in words(codes)]
    assert len(shown) == len(set(shown))
    assert [status for status, _ in shown] == sorted(status for status, _ in shown)
    assert {status for status, _ in shown} <= {kind.status for kind in errors._KINDS} | {500} | OTHER_STATUS
    codes = {code for _, code in shown}
    assert in_code <= codes | NO_ANSWER
    assert [code for code in codes | NO_ANSWER if code not in in_code and f'"{code}"' not in source] == []
    assert set(listed("5.9", "raise these without a request:")) == NO_ANSWER


def test_the_names_of_the_sdk() -> None:
    assert listed("5.7", "The public names of `ajet_sdk` are") == list(ajet_sdk.__all__)


def test_what_broke_a_timeline() -> None:
    names = re.findall(r"^`(\w+)`", drift.__doc__ or "", re.MULTILINE)
    assert set(listed("6.5", "The closed list:")) == set(names)
