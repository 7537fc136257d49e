"""The settings of a program: a frozen dataclass whose fields say what each is for, and the places that give them.

Later places win: defaults, a TOML file, the environment, the command line. A key that no field has is an error that
names the nearest one, because a misspelt limit must not silently be no limit. Every error is one line with the key as
it is written where it stands. Help and documentation are made of the same fields, so neither can drift from the code.

A secret never stands on a command line, which every user of the machine can read. Where it may not stand in the TOML
file either, ``NAME_file`` names a file that holds it, in any place.

The proxy's and the trainer's settings are both read here. Which values go together, each program knows for itself.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ajet_sdk.errors import BadRequest

FILE, ENVIRONMENT, COMMAND_LINE = "file", "environment", "command line"
ANYWHERE = (FILE, ENVIRONMENT, COMMAND_LINE)
PATHS = ("FILE", "DIR")
"""The words of help for a setting that is a path: ``~`` in one is a home directory."""
KINDS: dict[type, str] = {
    tuple: "a list of strings", bool: "true or false", int: "an integer", float: "a number", str: "a string",
}  # fmt: skip
OF_TYPES = {kind.__name__: kind for kind in KINDS}
TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


class ConfigError(BadRequest):
    """A configuration that cannot be used; the message is one line and names the key."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting: its documentation, and the values that it takes. A number must be above 0, or with `zero` at least
    0. `convert` reads a value of a kind that is not in `KINDS`, or raises `ValueError`. `Settings` takes name, kind and
    default from the field itself."""

    doc: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    zero: bool = False
    most: int = 1 << 53
    places: tuple[str, ...] = ANYWHERE
    secret: bool = False
    convert: Callable[[Any], Any] | None = None
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None

    @property
    def shown(self) -> str:
        """The default as help and documentation show it; "" where there is nothing to say."""
        if self.default is None or self.default is False:
            return ""
        return ", ".join(self.default) if self.kind is tuple else str(self.default)

    def read(self, given: Any, label: str) -> Any:
        """`given`, from TOML or as text, as a value of this setting; errors call it `label`."""
        try:
            value = self._typed(given) if self.convert is None else self.convert(given)
            fault = self._fault(value)
        except (ValueError, OverflowError) as error:
            shown = "" if self.secret else f", not {given!r}"
            fault = f"must be {KINDS[self.kind]}{shown}" if self.convert is None else str(error)
        if fault is not None:
            raise ConfigError(f"{label} {fault}", param=self.name)
        return value

    def _fault(self, value: Any) -> str | None:
        """The fault of a value of the right kind, in words."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        if self.metavar in PATHS and isinstance(value, str) and "\0" in value:
            return f"must be a path, not {value!r}"
        if type(value) in (int, float):
            if value < 0 or (value == 0 and not self.zero):
                return f"must be {'at least' if self.zero else 'above'} 0, not {value}"
            if value > self.most:
                return f"must be at most {self.most}, not {value}"
        return None

    def _typed(self, given: Any) -> Any:
        """`given` as a value of ``kind``; `ValueError` if it is none. Lists as text are separated by commas."""
        if self.kind is tuple:
            items = given.split(",") if isinstance(given, str) else given
            if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
                return tuple(item.strip() for item in items if item.strip())
        elif self.kind is bool:
            if isinstance(given, bool):
                return given
            if isinstance(given, str) and given.lower() in TRUTH:
                return TRUTH[given.lower()]
        elif self.kind is str:
            if isinstance(given, str):
                return os.path.expanduser(given) if self.metavar in PATHS else given
        elif self.optional and given in ("", "null", "None"):
            return None
        elif isinstance(given, (str, int, self.kind)) and not isinstance(given, bool):
            number = self.kind(given)
            if abs(number) < float("inf"):
                return number
        raise ValueError


def option(default: Any, doc: str, **more: Any) -> Any:
    """A field of a class of settings: its default, the sentence that documents it, and what else `Option` has."""
    return field(default=default, metadata={"option": Option(doc=doc, **more)})


class Settings:
    """The settings that the dataclass `config` has. In the environment they begin with `prefix`."""

    def __init__(self, config: type, *, prefix: str) -> None:
        self.prefix = prefix
        self.options: dict[str, Option] = {}
        for made in fields(config):
            if (found := made.metadata.get("option")) is not None:
                written = str(made.type)
                kind = OF_TYPES[written.removesuffix(" | None").partition("[")[0]]
                found = replace(
                    found, name=made.name, kind=kind, optional=written.endswith("None"), default=made.default
                )
                self.options[made.name] = found
                if found.secret and FILE not in found.places:
                    named, doc = f"{made.name}_file", f"File that holds {made.name}, instead of the environment."
                    self.options[named] = Option(name=named, doc=doc, metavar="FILE")

    def in_environment(self, environ: Mapping[str, str], others: Iterable[str] = ()) -> dict[str, Any]:
        """The values in variables that begin with the prefix; `others` are variables that mean something else."""
        own = [name for name in environ if name.startswith(self.prefix) and name not in others]
        given = {name.removeprefix(self.prefix).lower(): environ[name] for name in own}
        return self.read(given, ENVIRONMENT, "", self.variable, others)

    def with_secrets(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` with the secrets that stand in files; one that was given itself wins."""
        found = dict(values)
        for name in self.options:
            file = found.pop(f"{name}_file", None) if f"{name}_file" in self.options else None
            if file and found.get(name) is None:
                try:
                    found[name] = Path(file).read_text().strip()
                except (OSError, UnicodeDecodeError) as error:
                    reason = error.strerror if isinstance(error, OSError) else "it is not text"
                    raise ConfigError(f"cannot read {name}_file {file}: {reason}", param=f"{name}_file") from None
        return found

    def variable(self, name: str) -> str:
        return self.prefix + name.upper()

    def read(
        self, given: Mapping[str, Any], place: str, prefix: str, written: Callable[[str], str] = str,
        others: Iterable[str] = (),
    ) -> dict[str, Any]:
        """The values that were `given` in a place. Errors show a key as it is `written` there, after `prefix`; `others`
        may have been meant, too."""
        values = {}
        for name, value in given.items():
            label = prefix + written(name)
            if (found := self.options.get(name)) is None:
                names = [written(known.name) for known in self.options.values() if place in known.places]
                advice = nearest(written(name), [*names, *others]) or f"; known are {', '.join(names)}"
                advice = ": settings stand in no table of their own" if isinstance(value, Mapping) else advice
                raise ConfigError(f"{prefix}unknown key {written(name)!r}{advice}", param=name)
            if place not in found.places:
                raise ConfigError(f"{label} {self._misplaced(found, place)}", param=name)
            values[name] = found.read(value, label)
        return values

    def _misplaced(self, found: Option, place: str) -> str:
        if not found.secret:
            return "stands in the TOML file alone"
        named = f"{found.name}_file"
        other = f", or {named} to a file that holds it" if named in self.options else ""
        return f"is secret, and a {place} can be read by others: set {self.variable(found.name)}{other}"

    def describe(self) -> Iterator[str]:
        """Every setting with its default and meaning, as lines of help."""
        for name, found in self.options.items():
            yield f"  {name:18}{found.doc}" + (f" [{found.shown}]" if found.shown else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing if no name is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_toml(path: str) -> dict[str, Any]:
    """The TOML file at `path`. Raises `ConfigError`."""
    try:
        return toml(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def toml(text: str) -> dict[str, Any]:
    """Reads a TOML document; `ValueError` if it is none."""
    if sys.version_info >= (3, 11):
        from tomllib import loads
    else:
        from tomli import loads
    found: dict[str, Any] = loads(text)
    return found


def toml_of(document: Mapping[str, Mapping[str, Any]]) -> str:
    """`document` as the text of a TOML file."""
    lines = []
    for table, content in document.items():
        lines += [f"[{table}]", *(f"{_toml(name)} = {_toml(value)}" for name, value in content.items())]
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    """As JSON, in the form that TOML takes too: no character in two halves, and DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
