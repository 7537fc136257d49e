"""The loader of settings, over a program of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import COMMAND_LINE, ENVIRONMENT, FILE, ConfigError, Settings, option, read_toml, toml, toml_of
from tests.kit.pages import table_of


def even(given: Any) -> int:
    if given % 2:
        raise ValueError("must be even")
    return int(given)


@dataclass(frozen=True, kw_only=True)
class Config:
    names: tuple[str, ...] = option(("a", "b"), "Names.")
    folder: str = option("", "A folder.", metavar="DIR")
    loud: bool = option(False, "Whether to shout.")
    count: int = option(2, "How many.", most=9)
    share: float = option(0.5, "How much.", zero=True)
    at_most: int | None = option(None, "A limit, or none.", zero=True)
    way: str = option("up", "Where to.", choices=("up", "down"))
    even: int = option(0, "An even number.", places=(FILE,), convert=even)
    secret: str | None = option(None, "A secret.", secret=True, places=(ENVIRONMENT,))
    token: str = option("", "Another.", secret=True, places=(FILE, ENVIRONMENT))
    inner: int = 0


SETTINGS = Settings(Config, prefix="X_")


def told(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("names", "c, d,", ("c", "d")), ("loud", "YES", True), ("loud", "", False), ("count", "3", 3),
        ("share", "1e-3", 0.001), ("share", "0", 0.0), ("at_most", "null", None), ("at_most", "0", 0),
        ("way", "down", "down"),
    ],
)  # fmt: skip
def test_text_becomes_a_value(key: str, text: str, value: object) -> None:
    assert SETTINGS.in_environment({f"X_{key.upper()}": text, "Y": "z"}) == {key: value}
    assert SETTINGS.read({key: text}, COMMAND_LINE, "") == {key: value}


@pytest.mark.parametrize(
    ("key", "given", "words"),
    [
        ("names", [1], "must be a list of strings, not [1]"), ("folder", 1, "must be a string, not 1"),
        ("folder", "/a\0b", "must be a path, not '/a\\x00b'"), ("secret_file", "\0", "must be a path, not '\\x00'"),
        ("loud", "perhaps", "must be true or false, not 'perhaps'"), ("count", 1.5, "must be an integer, not 1.5"),
        ("count", True, "must be an integer, not True"), ("count", [], "must be an integer, not []"),
        ("count", "0", "must be above 0, not 0"), ("count", 10, "must be at most 9, not 10"),
        ("share", "nan", "must be a number, not 'nan'"), ("share", "inf", "must be a number, not 'inf'"),
        ("share", 10**400, f"must be a number, not {10**400}"), ("share", -1, "must be at least 0, not -1.0"),
        ("share", 1e308, f"must be at most {1 << 53}, not 1e+308"),
        ("at_most", 2**64, f"must be at most {1 << 53}, not {2**64}"),
        ("way", "left", "must be one of up, down, not 'left'"), ("even", 3, "must be even"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_named_with_its_place(key: str, given: object, words: str) -> None:
    assert told(lambda: SETTINGS.read({key: given}, FILE, "f.toml: ")) == f"f.toml: {key} {words}"


def test_unknown_keys_name_the_nearest_that_may_stand_there() -> None:
    assert told(lambda: SETTINGS.read({"cuont": 1}, FILE, "f: ")) == "f: unknown key 'cuont'; did you mean 'count'?"
    assert told(lambda: SETTINGS.in_environment({"X_CUONT": "1"})) == "unknown key 'X_CUONT'; did you mean 'X_COUNT'?"
    assert told(lambda: SETTINGS.in_environment({"X_HOE": ""}, ["X_HOME"])).endswith("did you mean 'X_HOME'?")
    assert "unknown key 'zzzz'; known are names, folder, loud" in told(lambda: SETTINGS.read({"zzzz": 1}, FILE, "f: "))
    assert "settings stand in no table" in told(lambda: SETTINGS.read({"zzzz": {"count": 1}}, FILE, "f: "))
    assert "unknown key 'inner'" in told(lambda: SETTINGS.read({"inner": "1"}, COMMAND_LINE, ""))
    assert "did you mean" not in told(lambda: SETTINGS.read({"evens": "1"}, COMMAND_LINE, "")), "it may not stand there"
    assert SETTINGS.in_environment({"X_HOME": "1"}, ["X_HOME"]) == {}


def test_each_place_takes_what_may_stand_there() -> None:
    even_as_flag = told(lambda: SETTINGS.read({"even": "2"}, COMMAND_LINE, "", "--{}".format))
    assert even_as_flag == "--even stands in the TOML file alone"
    advice = "can be read by others: set X_SECRET, or secret_file to a file that holds it"
    assert told(lambda: SETTINGS.read({"secret": "s"}, FILE, "f: ")) == f"f: secret is secret, and a file {advice}"
    assert told(lambda: SETTINGS.read({"token": "s"}, COMMAND_LINE, "words: ")) == (
        "words: token is secret, and a command line can be read by others: set X_TOKEN"
    )
    assert SETTINGS.read({"token": "s", "even": 4}, FILE, "f: ") == {"token": "s", "even": 4}
    not_repeated = told(lambda: SETTINGS.read({"token": ["s"]}, FILE, "f: "))
    assert not_repeated == "f: token must be a string"


def test_a_secret_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("open sesame\n")
    found = SETTINGS.read({"secret_file": str(tmp_path / "s")}, COMMAND_LINE, "")
    assert SETTINGS.with_secrets(found) == {"secret": "open sesame"}
    assert SETTINGS.with_secrets(found | {"secret": "given"}) == {"secret": "given"}
    assert SETTINGS.with_secrets({"secret_file": ""}) == {}
    missing = f"cannot read secret_file {tmp_path / 'none'}: No such file or directory"
    assert told(lambda: SETTINGS.with_secrets({"secret_file": str(tmp_path / "none")})) == missing


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "f.toml").write_text('folder = "~/a"')
    assert SETTINGS.read(read_toml("~/f.toml"), FILE, "f: ") == {"folder": f"{tmp_path}/a"}
    for data in (b"= =", b"\xff", b"x = " + b"[" * 5000):
        (tmp_path / "f.toml").write_bytes(data)
        assert told(lambda: read_toml("~/f.toml")).startswith("~/f.toml is not TOML: ")
    assert told(lambda: read_toml("~/none")) == "cannot read ~/none: No such file or directory"
    assert toml("x = 1e-5") == {"x": 1e-5}


def test_help_and_documentation_have_every_setting_with_its_default() -> None:
    assert "  names             Names. [a, b]" in [*SETTINGS.describe()]
    assert "| `count` | `2` | How many. |\n" in table_of(SETTINGS)
    assert "| `loud` |  | Whether to shout. |\n" in table_of(SETTINGS)
    assert "`inner`" not in table_of(SETTINGS)


def test_any_word_is_written_as_it_is(tmp_path: Path) -> None:
    words = {"a": "/srv/\U0001f600/m\x7f", "b": 'quote " and \\ and \n', "é": "€"}
    (tmp_path / "file.toml").write_text(toml_of({"table": words}))
    assert read_toml(str(tmp_path / "file.toml")) == {"table": words}
