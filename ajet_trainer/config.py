"""One configuration object for the trainer: defaults, then the TOML file, then ``AJET_TRAINER_*``, then KEY=VALUE.

The file has three tables. ``[trainer]`` holds the fields of `Config`. ``[mix]`` holds the shares of lanes
(`ajet_trainer.mix`). ``[verl]`` holds verl's own keys, passed through untouched, so that verl's estimators, losses and
engines are reached by the names that verl gives them::

    [trainer]
    model = "models/smollm2"
    [verl]
    algorithm.adv_estimator = "rloo"
    actor_rollout_ref.actor.optim.lr = 1e-5

On the command line a key with a dot is verl's (``trainer.n_gpus_per_node=8``), a key without one is ours.
An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ajet_sdk.address import is_key, server
from ajet_sdk.limits import MAX_AGE_S, MAX_AHEAD, MAX_GROUPS, MAX_LABEL, MAX_VERSION
from ajet_sdk.runs import LEARNING_RATE, literal
from ajet_sdk.settings import COMMAND_LINE, ENVIRONMENT, FILE, ConfigError, Settings, nearest, option, read_toml
from ajet_trainer.mix import Mixture, read_mix

NAME = "policy"
"""The `model_name` of a configuration that sets none."""
ADAPTER = ("lora_rank", "lora.rank", "lora_adapter_path")
"""The ends of verl's keys that have an adapter trained."""
DEVICE = "trainer.device"
"""verl's key for what it trains on."""
GPUS, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
"""verl's keys for how many processes train: so many on each of so many hosts."""
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
"""verl's key for the groups of an update."""
NULLS = ("null", "None")
"""The words for verl's null, which TOML lacks."""
KEEP = "trainer.max_actor_ckpt_to_keep"
"""verl's key for how many checkpoints stay on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that ajet itself decides about a training run."""

    model: str = option(
        "", "Folder (or hub name) of the model to train, in Hugging Face format; required.", metavar="DIR"
    )
    model_name: str = option(
        NAME, "Name under which agents ask for the model; unset: the only one that engine_urls serve, else policy."
    )
    proxy_url: str = option("http://127.0.0.1:8484", "Where ajet-proxy listens.")
    key: str = option(
        "", "Key of scope trainer for the proxy; a loopback proxy without secrets needs none. Never on the command "
        "line.", secret=True, places=(FILE, ENVIRONMENT),
    )
    tls_cert: str = option(
        "", "File (PEM) of our own certificate and its private key, for a proxy that has tls_client_ca.",
        metavar="FILE",
    )
    run_dir: str = option(
        "runs/default", "Folder for checkpoints, metrics.jsonl and phase.json; an existing one is resumed.",
        metavar="DIR",
    )
    total_steps: int = option(
        0, "Stop after this many steps, counted from the first start; 0 trains until told otherwise.", zero=True
    )
    engine_urls: tuple[str, ...] = option(
        (), "Base URLs of engines that stand alone and are sent the weights; without one, verl launches vLLM on the "
        "trainer's own devices."
    )
    engine_key: str = option(
        "", "The engines' own API key (vLLM's --api-key); AJET_UPSTREAM_KEY gives it too, as to the daemon. Never on "
        "the command line.", secret=True, places=(FILE, ENVIRONMENT),
    )
    weights_dir: str = option(
        "", "Folder that trainer and engines of engine_urls both see, for weights on their way; empty: shared memory, "
        "or run_dir for an adapter alone.",
        metavar="DIR",
    )
    groups: int = option(4, "Groups (tasks) in a batch, that is, in a step.", most=MAX_GROUPS)
    group_size: int = option(8, "Episodes in a group.", most=MAX_GROUPS)
    min_group_size: int | None = option(
        None, "Episodes that make a group of a task that nobody plays any more; fewer are discarded. Unset: 2, or 1 "
        "where group_size is 1. 0: only whole groups are trained.", zero=True,
    )
    group_wait_s: float = option(
        60.0, "Seconds after the last opening until nobody plays a task any more, if none of its episodes is open.",
        zero=True, most=int(MAX_AGE_S),
    )
    ahead: int | None = option(
        None, "Groups that agents may have open or ready beyond those of the batch that trains; more are held. Unset: "
        "as many as a batch has, times overlap. 0: any number.", zero=True, most=MAX_AHEAD,
    )
    max_staleness: int | None = option(
        None, "How many policy versions behind the one that serves a sampled token may be, at most; unset: any.",
        zero=True, most=MAX_VERSION,
    )
    max_kl: float = option(
        0.05, "End the run before an update if the KL divergence of engine and trainer is above this, in nats a token, "
        "over 1000 tokens or more of the weights that the step begins with. 0: never.", zero=True,
    )
    max_lead: int | None = option(
        None, "How many updates the model may be ahead of the slowest that learns from the same episodes; 0: in "
        "lockstep. Unset: any number.", zero=True, most=MAX_VERSION,
    )
    overlap: int | None = option(
        None, "How many batches agents may be ahead of the weights that train; 0 holds agents while a step trains. It "
        "sets max_staleness where that is unset. More than 0 needs engine_urls.", zero=True, most=MAX_AHEAD,
    )
    no_signal: str = option(
        "keep",
        "Groups whose rewards are all equal: keep them (KL, entropy, batch baselines still use them), or drop them and "
        "train others in their place.",
        choices=("keep", "drop"),
    )
    sampling: str = option(
        "correct",
        "Calls that were sampled otherwise than the trainer computes: correct them where both distributions are known, "
        "train exact ones alone, or be strict, and refuse their episodes.",
        choices=("correct", "exact", "strict"),
    )
    overlong: str = option(
        "keep",
        "Calls that ended at their limit of tokens: keep them, or mask them: then their episode's reward alone counts.",
        choices=("keep", "mask"),
    )
    turn_gamma: float = option(
        1.0, "Discount of a turn in the rewards that ajet_turn and ajet_running, of algorithm.adv_estimator, give to "
        "earlier calls.",
        zero=True, most=1,
    )
    max_tokens: int = option(
        4096, "Longest sample that is trained, in tokens; also the context length of an engine launched here."
    )
    rows: str | None = option(
        None,
        "What the trainer computes tokens by: tree, what rows of a step share once; or timeline, each row whole, with "
        "the same gradient. By default tree where model and settings carry trees, and timeline elsewhere and on GPUs.",
        choices=("tree", "timeline"),
    )
    save_freq: int = option(
        10, "Checkpoint every so many steps; batches are acknowledged with the checkpoint that holds them. 0: at the "
        "end alone.", zero=True,
    )
    eval_every: int = option(
        0, "Evaluate after every so many steps, and before the first: agents play episodes that are not trained. 0: "
        "never.", zero=True,
    )
    eval_episodes: int | None = option(
        None, "Episodes of an evaluation. Unset: 16, or 128 with a candidate.", most=10_000
    )
    candidate: str = option(
        "", "Name under which weights are evaluated before they serve; empty: each step's weights serve."
    )
    candidate_urls: tuple[str, ...] = option(
        (), "Base URLs of the candidate's own engines; an adapter needs none, and is on those of engine_urls."
    )
    promote_every: int = option(4, "With a candidate: the steps from one evaluation of it to the next.")
    promote_margin: float = option(
        0.1, "With a candidate: how much worse its mean reward may be than that of the weights that serve, with 90 % "
        "certainty.", zero=True,
    )
    mix: tuple[Mixture, ...] = ()
    """The share of each lane, by step; none: whatever the daemon holds."""
    verl: Mapping[str, Any] = field(default_factory=dict)
    """verl's own keys, as dotted names."""

    @property
    def attached(self) -> bool:
        """True if the engines stand alone, and the backend launches none."""
        return bool(self.engine_urls)

    @property
    def pace(self) -> int:
        """The number of groups that may be open or ready; 0: any number."""
        return self.groups * max(1, self.overlap or 0) if self.ahead is None else self.ahead

    @property
    def adapts(self) -> bool:
        """True if an adapter is trained, and not the whole model."""
        return any(key.endswith(ADAPTER) and value for key, value in flatten(self.verl))

    @property
    def keep_checkpoints(self) -> int:
        """The number of checkpoints that stay on disk."""
        kept: int = self.verl.get(KEEP, 5 if self.candidate else 2)
        return kept


OF_THE_HOST = ("proxy_url", "key", "engine_key", "tls_cert", "run_dir")
"""Settings that say where a run stands and not how it trains."""
NAMED_THERE = ("model", "model_name", "weights_dir", "engine_urls", "candidate_urls")
"""Settings for which each host has folders, addresses and names of its own. All of them take a restart."""
SETTINGS = Settings(Config, prefix="AJET_TRAINER_")


def load(path: str | None, assignments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The configuration from a TOML file (or none), the environment and ``KEY=VALUE`` words. Raises `ConfigError`."""
    values, mix, verl = ({}, (), {}) if path is None else read_file(path)
    environ = environ or {}
    if "AJET_PROXY_URL" in environ:
        environ = {SETTINGS.variable("proxy_url"): environ["AJET_PROXY_URL"], **environ}
    if "AJET_UPSTREAM_KEY" in environ:
        environ = {SETTINGS.variable("engine_key"): environ["AJET_UPSTREAM_KEY"].strip(), **environ}
    values |= SETTINGS.in_environment(environ)
    words = {}
    for word in assignments:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not KEY=VALUE")
        if "." in name:
            verl[name.removeprefix("verl.")] = literal(text)
        else:
            words[name] = text
    values |= SETTINGS.read(words, COMMAND_LINE, "command line: ")
    return check(Config(**values, mix=mix, verl=verl))


def read_file(path: str) -> tuple[dict[str, Any], tuple[Mixture, ...], dict[str, Any]]:
    """The tables ``[trainer]`` (types checked), ``[mix]`` and ``[verl]`` (as dotted names) of a TOML file."""
    document = read_toml(path)
    mix = document.pop("mix", None)
    for table, content in document.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table!r} stands in no table: put it under [trainer] or [verl]")
        if table not in ("trainer", "verl"):
            raise ConfigError(f"{path}: unknown table [{table}]{nearest(table, ('trainer', 'verl', 'mix'))}")
    own = SETTINGS.read(document.get("trainer", {}), FILE, f"{path}: ")
    shares = () if mix is None else read_mix(mix, f"{path}: ")
    return own, shares, dict(flatten(document.get("verl", {})))


def digest(config: Config) -> str:
    """16 hexadecimal digits that stand for how `config` trains, wherever it does."""
    told = (one.name for one in fields(config) if one.name not in OF_THE_HOST + NAMED_THERE)
    said = {name: getattr(config, name) for name in told}
    said["mix"] = [(mixture.step, dict(mixture.shares)) for mixture in config.mix]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=dict).encode()).hexdigest()[:16]


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested tables as ``("a.b.c", value)``; a table with no entries stays a value."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_model(config: Config) -> Path:
    """The folder of its model, which is not there if a hub gives it. Raises `ConfigError` if there is no model."""
    folder = Path(config.model)
    if folder.is_dir() or (config.model.count("/") < 2 and _has_hub(config.model)):
        return folder
    said = f"there is no folder {folder.absolute()}, and no hub or its cache gives {config.model!r}"
    raise ConfigError(f"model: {said}: give the path of a folder", param="model")


def _has_hub(model: str) -> bool:
    """True if the configuration of `model` is in the cache of Hugging Face's hub, or can be fetched into it."""
    try:
        from huggingface_hub import hf_hub_download

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each attempt
        return bool(hf_hub_download(model, "config.json"))
    except (ImportError, OSError, ValueError):
        return False


def check(config: Config) -> Config:
    """`config` if its values make sense together, with those that follow from others. Raises `ConfigError`."""
    config = replace(config, verl={key: None if value in NULLS else value for key, value in config.verl.items()})
    if not config.model:
        raise ConfigError("model is required: the folder of the model to train", param="model")
    if config.model.startswith(("/", "./", "../")) and not Path(config.model).is_dir():
        raise ConfigError(f"model: there is no folder {config.model}", param="model")
    for name, said in (("model_name", config.model_name), ("candidate", config.candidate or "none")):
        if not 1 <= len(said) <= MAX_LABEL:
            raise ConfigError(f"{name} must have 1 to {MAX_LABEL} characters", param=name)
    if not config.proxy_url:
        raise ConfigError("proxy_url is required: where ajet-proxy listens", param="proxy_url")
    for name, urls in (
        ("proxy_url", (config.proxy_url,)), ("engine_urls", config.engine_urls),
        ("candidate_urls", config.candidate_urls),
    ):
        if odd := [url for url in urls if server(url) is None]:
            shown = odd[0].rpartition("@")[2]  # a password is for nobody to see
            raise ConfigError(f"{name} must be http://HOST:PORT, not {shown!r}", param=name)
    for name, key in (("key", config.key), ("engine_key", config.engine_key)):
        if not is_key(key):
            raise ConfigError(f"{name} holds characters that no key has: the end of a line, perhaps", param=name)
    if config.tls_cert and not config.proxy_url.startswith("https:"):
        raise ConfigError("tls_cert is of no use to a proxy_url without https", param="tls_cert")
    if config.overlap and not config.attached:
        said = "trainer and engine take turns on the same devices: set engine_urls, or leave overlap out"
        raise ConfigError(f"overlap = {config.overlap} cannot be: {said}", param="overlap")
    if config.overlap is not None and config.max_staleness not in (None, config.overlap):
        said = "overlap is the bound: leave max_staleness out, or set it to"
        raise ConfigError(
            f"max_staleness = {config.max_staleness} contradicts overlap = {config.overlap}: {said} {config.overlap}",
            param="max_staleness",
        )
    if config.min_group_size is None:
        config = replace(config, min_group_size=min(2, config.group_size))
    elif config.min_group_size > config.group_size:
        said = f"a group has group_size = {config.group_size} episodes"
        raise ConfigError(f"min_group_size = {config.min_group_size} cannot be: {said}", param="min_group_size")
    if 0 < config.pace < config.groups:
        said = f"a batch has groups = {config.groups}, which nobody could play then"
        raise ConfigError(f"ahead = {config.pace} cannot be: {said}", param="ahead")
    if config.pace > MAX_AHEAD:
        raise ConfigError(f"groups times overlap must be at most {MAX_AHEAD}, not {config.pace}", param="overlap")
    for param, said in _of_verl(config):
        raise ConfigError(f"{param} {said}", param=param)
    if config.max_staleness is None:
        config = replace(config, max_staleness=config.overlap)
    for param, said in _of_candidate(config):
        raise ConfigError(f"{param}: {said}", param=param)
    if config.eval_episodes is None:
        config = replace(config, eval_episodes=128 if config.candidate else 16)
    return config


def _of_verl(config: Config) -> Iterable[tuple[str, str]]:
    """verl's keys that cannot be, each with what is wrong, as far as ajet itself reads them."""
    kept, device, size = config.keep_checkpoints, config.verl.get(DEVICE, "cpu"), config.verl.get(MINI_BATCH)
    rate = config.verl.get(LEARNING_RATE, 0)
    known = [(key, config.verl[key]) for key in (GPUS, NODES) if "$" not in str(config.verl.get(key, "$"))]
    for key, count in ((KEEP, kept), *known):
        if type(count) is not int or count < 1:
            yield key, f"must be an integer above 0, not {count!r}"
    if device not in ("cpu", "cuda"):
        yield DEVICE, f"must be cpu or cuda, not {device!r}"
    if type(size) is int and (size < 1 or config.groups % size):
        updates = f"groups / {MINI_BATCH.rpartition('.')[2]} updates of a step"
        yield MINI_BATCH, f"makes {updates}: a divisor of {config.groups}, not {size}"
    if "$" not in str(rate) and not (type(rate) in (int, float) and 0 <= rate < math.inf):
        yield LEARNING_RATE, f"must be a number of at least 0, not {rate!r}"


def _of_candidate(config: Config) -> Iterable[tuple[str, str]]:
    """The settings of a candidate that cannot be, each with what is wrong."""
    if not config.candidate:
        if config.candidate_urls:
            yield "candidate_urls", "engines of a candidate that has no name: set candidate"
        for name in ("promote_every", "promote_margin"):
            if getattr(config, name) != SETTINGS.options[name].default:
                yield name, "nothing is promoted without a candidate: set candidate, or leave it out"
        return
    if config.save_freq != SETTINGS.options["save_freq"].default:
        yield "save_freq", "with a candidate each version that serves is saved: leave it out"
    if config.candidate == config.model_name:
        yield "candidate", f"{config.candidate!r} is the name of the model that serves: give it another"
    if not config.attached:
        yield "candidate", "users would be held for whole steps by an engine that the trainer launches: set engine_urls"
    if not config.adapts and not config.candidate_urls:
        yield "candidate", "one engine holds the whole weights of one model: set candidate_urls, or train an adapter"
    if not config.adapts and not {*map(server, config.candidate_urls)}.isdisjoint(map(server, config.engine_urls)):
        yield "candidate_urls", "the engine of what serves has its weights: take others, or train an adapter"
    if config.max_staleness is not None and config.max_staleness < config.promote_every - 1:
        least = f"promote_every = {config.promote_every} steps train on what one version has sampled"
        yield "max_staleness", f"{config.max_staleness} is too few: {least}, so leave it out, or take more"
    if config.eval_every:
        yield "eval_every", "a candidate is evaluated by promote_every: leave it out"
    if config.eval_episodes == 1:
        yield "eval_episodes", "one episode tells nothing of the next: set it to 2 or more with a candidate"
