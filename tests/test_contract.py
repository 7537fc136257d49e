"""The pages of the contract are held to the code: words, states, programs, routes, headers and errors.

A list that is one in the code is compared with it. What is written in many places of the code is collected from there.
"""

from __future__ import annotations

import ast
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

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
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import Request
from ajet_proxy.core.protocol.routes import CAPTURED, OPEN_ROUTES
from ajet_proxy.core.trajectory import call, drift
from ajet_proxy.io.storage.journal import JournalDamaged
from ajet_sdk import cli as sdk_cli
from ajet_sdk import errors, routes
from ajet_sdk.errors import AjetError
from ajet_sdk.frame import FrameError
from ajet_sdk.settings import ConfigError
from ajet_trainer import cli as trainer_cli
from ajet_trainer.link import WireVersion
from tests.kit.pages import contract, tables, words
from tests.kit.source import PACKAGES, modules, name_of, tree
from tests.kit.strategies import EVENT_KINDS

ELSEWHERE = (FrameError, JournalDamaged, WireVersion)
"""Errors of the tree that stand in modules of their own."""
SECTIONS = contract()
ROUTES = ("5.1", "8.1", "11")
"""The sections that have the tables of the control routes and of what their bodies hold."""
IN_CODE = modules(*PACKAGES)


def table(number: str, nth: int = 0) -> list[list[str]]:
    """A table of a section, as rows of cells."""
    return tables(SECTIONS[number])[nth]


def column(number: str, at: int = 0, nth: int = 0) -> list[str]:
    """What stands in backquotes in a column of it."""
    return [word for row in table(number, nth) for word in words(row[at])]


def listed(number: str, after: str) -> list[str]:
    """What stands in backquotes between some words and the end of their paragraph or item."""
    _, found, rest = " ".join(SECTIONS[number].split("\n")).partition(after)
    assert found, f"section {number} does not say {after!r}"
    return words(re.split(r"\.(?: |$)", rest)[0])


def calls_of(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function or class with this name."""
    for module in IN_CODE:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                yield module, node


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
    said = {
        node.value for module in modules("ajet_proxy/core") for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    reserved = [words(reason)[0] for reason, when in table("1.3") if when.startswith("reserved")]
    assert reserved == [reason for reason in routes.DISCARD_REASONS if reason not in said]


def test_no_other_reason_is_given() -> None:
    given = {node.args[2] for _, node in calls_of("EpisodeDiscarded")} | {
        node.args[2] for module, node in calls_of("_dropped") if name_of(module) == "ajet_proxy.core.ledger.leases"
    }
    constant = {node.value for node in given if isinstance(node, ast.Constant)}
    assert constant == {
        "aborted", "wall_timeout", "idle_timeout", "stale", "no_reward", "filtered", "client_gone", "older_revision",
        "incomplete_group", "other_run",
    }
    assert {ast.unparse(node) for node in given} - {repr(word) for word in constant} == {"reason"}


def losses() -> Iterator[str]:
    """Every reason for which the code loses a call."""
    yield from (
        value for name, value in vars(call).items()
        if name.isupper() and isinstance(value, str) and name != "SCORED"
    )
    for module in modules("ajet_proxy/core/protocol"):
        for node in tree(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SEVERAL_GENERATIONS":
                yield ast.literal_eval(node.value)
    for _, node in calls_of("Ask"):
        yield from (str(word.value.value) for word in node.keywords
                    if word.arg == "skip" and isinstance(word.value, ast.Constant))
    for _, node in calls_of("CallLost"):
        yield from (str(part.value) for part in node.args[3:4] if isinstance(part, ast.Constant))


def test_the_reasons_to_lose_a_call() -> None:
    assert len(column("1.4")) == len(set(column("1.4")))
    assert set(column("1.4")) == set(losses())


def test_what_the_world_failed() -> None:
    """Each reason of the list, the statuses that are the agent's, and each reason to lose a call on one side."""
    own = (attempts.HELD, attempts.UNSERVED, attempts.AWAY, attempts.MORE)
    by_world = {reason for reason in losses() if attempts.fate(reason, status=500) == "world"}
    assert set(column("5.4")) == {*own, *by_world}
    (row,) = (row for row in table("5.4") if words(row[0]) == ["refused"])
    assert [int(status) for status in re.findall(r"\b4\d\d\b", row[1])] == list(attempts.SENT_BADLY)


def test_a_call_is_lost_for_no_reason_that_is_not_collected() -> None:
    for module, node in (*calls_of("Lost"), *calls_of("Gone"), *calls_of("lose")):
        for part in node.args:
            assert not isinstance(part, ast.Constant) or not isinstance(part.value, str), f"{module}:{node.lineno}"


def test_the_ways_to_name_an_episode() -> None:
    assigned = [
        node for node in ast.walk(tree(Path("ajet_proxy/core/identity/ladder.py"))) if isinstance(node, ast.Assign)
        and "way" in [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
    ]
    second = [node.value.elts[1] for node in assigned if isinstance(node.value, ast.Tuple)]
    said = {part.value for node in second for part in ast.walk(node) if isinstance(part, ast.Constant)} - {None}
    assert len(assigned) == len(second) > 4
    assert set(column("3.1")) == said
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
        value for name, value in vars(routes).items() if name.startswith("HEADER_") and name != "HEADER_PREFIX"
    }
    assert column("3.3") == [routes.HEADER_EPISODE, routes.HEADER_CALL]
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


def _request(body: dict[str, Any]) -> Request:
    return Request(json.dumps({"model": "m", "messages": []} | body).encode())


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
    kinds = (*errors._KINDS, errors.AjetError)
    shown = [(int(status), words(kind)[0], words(theirs)[0]) for status, kind, theirs, _ in table("5.8")]
    assert shown == sorted((kind.status, kind.type, body_of(kind(""))["error"]["type"]) for kind in kinds)


OTHER_STATUS = {"method_not_allowed": 405, "proxy_authentication_required": 407, "no_websockets": 426}
"""Errors that are answered with another status than their class's."""
NO_ANSWER = {
    "unreachable", "no_episode", "frame_too_large", "wire_version", "data_dir_locked", "journal_damaged",
    "journal_missing", "journal_gone",
    "archive_missing",
}  # fmt: skip
"""Codes of errors that are raised where no request is answered; one of them is an answer too."""
MADE = {
    "episode_{state}": [f"episode_{state}" for state in NEXT if "refuse" in {row[state] for row in TAKES.values()}],
    "batch_{known.state}": ["batch_trained", "batch_returned"],
    "{name}_quota": [f"{name}_quota" for name in ("episodes", "requests", "tokens", "bytes")],
    "{name}_limit": ["disk_limit", "memory_limit"],
    "engine_{kind}": ["engine_connect", "engine_broken"],
}
"""Codes that are put together, and what comes of it."""


def raised() -> Iterator[tuple[int, str]]:
    """The status and the code of every error that has one."""
    found: list[type[errors.AjetError]] = [errors.AjetError]
    for kind in found:
        found += kind.__subclasses__()
    assert {*ELSEWHERE} <= {*found}
    kinds = {kind.__name__: kind for kind in found}
    for module in IN_CODE:
        constants = {
            ast.unparse(node.targets[0]): node.value for node in tree(module).body if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.Call) or (name := ast.unparse(node.func)) not in kinds:
                continue
            for value in [word.value for word in node.keywords if word.arg == "code"]:
                said = constants.get(ast.unparse(value), value)
                written = ast.literal_eval(said) if isinstance(said, ast.Constant) else ast.unparse(said)[2:-1]
                for code in MADE[written] if "{" in written else [written]:
                    yield OTHER_STATUS.get(code, kinds[name].status), code


def test_the_codes_of_errors() -> None:
    shown = [(int(status), code) for status, codes, _ in table("5.9") for code in words(codes)]
    assert len(shown) == len(set(shown))
    assert [status for status, _ in shown] == sorted(status for status, _ in shown)
    aside = {(status, code) for status, code in raised() if code in NO_ANSWER and (status, code) not in shown}
    assert set(shown) | aside == set(raised())
    assert {code for _, code in aside} | {"wire_version"} == NO_ANSWER
    assert set(listed("5.9", "raise these without a request:")) == NO_ANSWER


def test_the_statuses_that_are_put_in_place_of_a_class_s() -> None:
    put = {
        part.value for _, node in calls_of("set_status") for part in node.args
        if isinstance(part, ast.Constant) and isinstance(part.value, int)
    }
    assert put == set(OTHER_STATUS.values())


def test_the_names_of_the_sdk() -> None:
    assert listed("5.7", "The public names of `ajet_sdk` are") == list(ajet_sdk.__all__)


def test_what_broke_a_timeline() -> None:
    names = re.findall(r"^`(\w+)`", drift.__doc__ or "", re.MULTILINE)
    assert set(listed("6.5", "The closed list:")) == set(names)
