"""One configuration object for the trainer: defaults, then the TOML file, then ``AJET_TRAINER_*``, then KEY=VALUE.

The file has two tables. ``[trainer]`` holds the fields of `Config`. ``[verl]`` holds verl's own keys, passed through
untouched, so that verl's estimators, losses and engines are reached by the names that verl gives them::

    [trainer]
    model = "models/smollm2"
    [verl]
    algorithm.adv_estimator = "rloo"
    actor_rollout_ref.actor.optim.lr = 1e-5

On the command line a key with a dot is verl's (``trainer.n_gpus_per_node=8``), a key without one is ours.
An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ajet_sdk.address import server
from ajet_sdk.errors import BadRequest

ENV_PREFIX = "AJET_TRAINER_"


class ConfigError(BadRequest):
    """A configuration that cannot be used; the message is one line for its author."""


def option(default: Any, doc: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A field of `Config` with the text that documents it everywhere."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that ajet itself decides about a training run. Times are in seconds."""

    model: str = option("", "folder (or hub name) of the model to train, in Hugging Face format; required")
    model_name: str = option("policy", "the name under which agents ask for the model")
    proxy_url: tuple[str, ...] = option(
        ("http://127.0.0.1:8484",), "where ajet-proxy listens; several daemons feed one trainer, separated by commas"
    )
    key: tuple[str, ...] = option(
        (),
        "key of scope 'trainer' for the proxy, or one a daemon in their order; none is needed for a loopback proxy "
        "without secrets; never on the command line",
    )
    tls_ca: str = option("", "file (PEM) of the CA of the proxies' certificates, where the usual ones are not enough")
    tls_cert: str = option("", "file (PEM) of our own certificate, for proxies that have tls_client_ca")
    tls_key: str = option("", "file (PEM) of its private key; empty: in the same file")
    run_dir: str = option(
        "runs/default", "folder for checkpoints, metrics.jsonl and phase.json; an existing one is resumed"
    )
    total_steps: int = option(
        0, "stop after this many steps, counted from the first start; 0 trains until told otherwise"
    )
    device: str = option(
        "auto", "what verl trains on; 'auto' takes the GPUs where there are any", choices=("auto", "cpu", "cuda")
    )
    placement: str = option(
        "hybrid",
        "'hybrid': verl launches vLLM on the trainer's own devices; 'attached': the engines at engine_urls stand alone",
        choices=("hybrid", "attached"),
    )
    engine_urls: tuple[str, ...] = option(
        (), "attached placement: base URLs of the running engines, e.g. http://127.0.0.1:8000"
    )
    weights_dir: str = option(
        "",
        "attached placement: folder that trainer and engines both see, for weights on their way; empty: shared memory",
    )
    groups: int = option(4, "groups (tasks) in a batch, that is, in a step")
    group_size: int = option(8, "episodes in a group")
    max_staleness: int | None = option(
        None, "how many policy versions behind the one that serves a sampled token may be, at most; unset: any"
    )
    no_signal: str = option(
        "keep",
        "groups whose rewards are all equal: 'keep' them (KL, entropy, batch baselines still use them) or 'drop' them",
        choices=("keep", "drop"),
    )
    max_tokens: int = option(
        4096, "longest sample that is trained, in tokens; also the context length of an engine launched here"
    )
    save_freq: int = option(
        10, "checkpoint every so many steps; batches are acknowledged with the checkpoint that holds them"
    )
    keep_checkpoints: int = option(2, "how many checkpoints stay on disk")
    lease_s: float = option(300.0, "length of a lease; it is extended while a batch is held")
    drain_s: float = option(600.0, "how long closing the gate may wait for calls in flight")
    push_timeout_s: float = option(600.0, "a weight push that takes longer has failed: the run ends with an error")
    connect_timeout_s: float = option(120.0, "how long to keep trying to reach the proxy before giving up")
    seed: int = option(0, "seed of the training side, below 2^32")
    verl: Mapping[str, Any] = option({}, "verl's own keys, as nested tables or dotted names")


OPTIONS = {f.name: f for f in fields(Config)}
MAX_SECONDS = 1e9
_HINTS = get_type_hints(Config)


def load(path: str | None, assignments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The configuration from a TOML file (or none), the environment and ``KEY=VALUE`` words. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    verl: dict[str, Any] = {}
    if path is not None:
        ours, theirs = read_file(Path(path))
        values.update(ours)
        verl.update(theirs)
    for name, text in sorted((environ or {}).items()):
        if name == "AJET_PROXY_URL":
            values["proxy_url"] = parse("proxy_url", text)
        elif name.startswith(ENV_PREFIX):
            key = known(name[len(ENV_PREFIX) :].lower(), where=f"environment variable {name}")
            values[key] = parse(key, text)
    for word in assignments:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not KEY=VALUE")
        if "." in name:
            verl[name.removeprefix("verl.")] = literal(text)
        else:
            if (key := known(name)) == "key":
                raise ConfigError(f"a command line can be read by all: set {ENV_PREFIX}KEY", param="key")
            values[key] = parse(key, text)
    return check(Config(**values, verl=verl))


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables ``[trainer]`` (types checked) and ``[verl]`` (as dotted names) of a TOML file."""
    try:
        document = _toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for table, content in document.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table!r} stands in no table: put it under [trainer] or [verl]")
        if table not in ("trainer", "verl"):
            raise ConfigError(f"{path}: unknown table [{table}]{nearest(table, ('trainer', 'verl'))}")
    ours = {known(name, where=str(path)): coerce(name, value) for name, value in document.get("trainer", {}).items()}
    return ours, dict(flatten(document.get("verl", {})))


def known(name: str, *, where: str = "command line") -> str:
    """`name` if it is a field of `Config`, else an error that names the nearest one."""
    names = [option_name for option_name in OPTIONS if option_name != "verl"]
    if name not in names:
        raise ConfigError(f"{where}: unknown key {name!r}{nearest(name, names)}", param=name)
    return name


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing when no name is close."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested tables as ``("a.b.c", value)``; a table with no entries stays a value."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def literal(text: str) -> Any:
    """A word of the command line as a TOML value where it is one (``1e-5``, ``true``, ``[1, 2]``), else as a string."""
    if text in ("null", "None"):
        return None
    try:
        return _toml(f"x = {text.lower() if text in ('True', 'False') else text}")["x"]
    except ValueError:
        return text


def _toml(text: str) -> dict[str, Any]:
    """What a TOML document says; a `ValueError` where it is none."""
    if sys.version_info >= (3, 11):
        from tomllib import loads
    else:
        from tomli import loads
    return loads(text)


def parse(name: str, text: str) -> Any:
    """`text` as the value of field `name`."""
    base = _base(name)
    return coerce(name, text if base in (str, tuple) else literal(text))


def coerce(name: str, value: Any) -> Any:
    """`value` checked against the type of field `name`; a list may be one text with commas. Raises `ConfigError`."""
    base, optional = _base(name), type(None) in get_args(_HINTS[name])
    if value is None and optional:
        return None
    if base is float and type(value) in (int, float) and abs(value) <= MAX_SECONDS:
        return float(value)
    if base is tuple and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if base is tuple and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if base in (int, str) and type(value) is base:
        return value
    words = {float: f"a number up to {MAX_SECONDS:g}", int: "an integer", str: "a string", tuple: "a list of strings"}
    raise ConfigError(f"{name} must be {words[base]}, not {value!r}", param=name)


def _base(name: str) -> type:
    hint = _HINTS[name]
    if get_origin(hint) is tuple:
        return tuple
    kinds = (hint, *get_args(hint))
    return next(kind for kind in (float, int, str) if kind in kinds)


def check(config: Config) -> Config:
    """`config` if its values make sense together. Raises `ConfigError`."""
    for name, option_field in OPTIONS.items():
        choices = option_field.metadata["choices"]
        if choices and getattr(config, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(config, name)!r}", param=name)
    if not config.model:
        raise ConfigError("model is required: the folder of the model to train", param="model")
    if config.model.startswith(("/", "./", "../")) and not Path(config.model).is_dir():
        raise ConfigError(f"model: there is no folder {config.model}", param="model")
    for name in ("proxy_url", "engine_urls"):
        if odd := [url for url in getattr(config, name) if server(url) is None]:
            shown = odd[0].rpartition("@")[2]  # a password is for nobody to see
            raise ConfigError(f"{name} must be http://HOST:PORT, not {shown!r}", param=name)
    check_daemons(config)
    for name in ("groups", "group_size", "max_tokens", "keep_checkpoints", "lease_s", "push_timeout_s"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} must be positive", param=name)
    for name in ("total_steps", "save_freq", "drain_s", "connect_timeout_s", "max_staleness", "seed"):
        if (getattr(config, name) or 0) < 0:
            raise ConfigError(f"{name} must not be negative", param=name)
    if config.seed >= 2**32:
        raise ConfigError("seed must be below 2^32, which is as far as NumPy's go", param="seed")
    if config.placement == "attached" and not config.engine_urls:
        raise ConfigError("placement 'attached' needs engine_urls", param="engine_urls")
    if config.placement == "hybrid" and config.engine_urls:
        raise ConfigError(
            "engine_urls belongs to placement 'attached'; 'hybrid' launches its own engines", param="engine_urls"
        )
    return config


def check_daemons(config: Config) -> None:
    """Raises `ConfigError` unless there is a daemon, none is named twice, and the keys are one for all or one each."""
    urls = [url.rstrip("/") for url in config.proxy_url]
    if not urls:
        raise ConfigError("proxy_url is required: where ajet-proxy listens", param="proxy_url")
    doubled = sorted({url for url in urls if urls.count(url) > 1})
    if doubled:
        raise ConfigError(f"proxy_url names {doubled[0]} twice", param="proxy_url")
    if config.tls_key and not config.tls_cert:
        raise ConfigError("tls_key belongs to tls_cert: give both", param="tls_key")
    for name in ("tls_ca", "tls_cert"):
        if getattr(config, name) and not all(url.startswith("https:") for url in urls):
            raise ConfigError(f"{name} is of no use to a proxy_url without https", param=name)
    if len(config.key) not in (0, 1, len(urls)):
        raise ConfigError(
            f"key must be one for all daemons or one for each: {len(config.key)} for {len(urls)} daemons", param="key"
        )


def describe() -> str:
    """Every key with its default and meaning, for ``--help`` and the documentation."""
    lines = []
    for name, option_field in OPTIONS.items():
        default = option_field.default
        default = ",".join(default) if isinstance(default, tuple) else default
        shown = "" if default is MISSING or default in ("", None) else f" [{default}]"
        lines.append(f"  {name:18}{option_field.metadata['doc']}{shown}")
    return "\n".join(lines)
