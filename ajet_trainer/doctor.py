"""Checks of all that a run depends on, before anything is loaded: each with what to do about a fault.

Sizes follow from the number of parameters in the model's folder. verl trains float32 weights with Adam: 4 bytes a
parameter for weights, gradients and each of Adam's two moments, before activations. An adapter needs the weights alone.
An engine that verl launches takes its share of each GPU, or on a CPU float32 weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from math import prod
from pathlib import Path
from typing import Any

from ajet_sdk.address import is_here, server
from ajet_sdk.errors import AjetError
from ajet_sdk.findings import Finding, fault, ok, warning
from ajet_sdk.ports import listener
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import DEVICE, GPUS, NODES, Config, find_model
from ajet_trainer.engines import EngineLost, same_model
from ajet_trainer.engines.attached import Attached, of_candidate, weights_parent
from ajet_trainer.link import Link

HALF, FLOAT, TRAINED, SAVED = 2, 4, 16, 12
"""Bytes a parameter: of a weight on its way to an engine in bfloat16, or to another; of one that is trained; and of one
in a checkpoint."""
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
"""verl's key for the share of a GPU that an engine takes which it launches; 0.5 if it is not set."""
WEIGHTS = "model*.safetensors"
"""Files of weights as transformers names them. There may be others beside, with the same weights once more."""
LACKING = {"config.json": "configuration", "tokenizer_config.json": "tokenizer", WEIGHTS: "weights"}
ASK = "import torch; print(*(n for i in range(torch.cuda.device_count()) for n in torch.cuda.mem_get_info(i)))"


def examine(config: Config) -> list[Finding]:
    """Every check, in the order in which faults should be repaired."""
    return [*_versions(), *_model(config), *room(config), *_others(config)]


def room(config: Config, beside: float = 0.0) -> list[Finding]:
    """Memory and disk against what a run takes, and `beside` bytes of each for what else is to run."""
    size, free = parameters(Path(config.model)), gpus() if config.verl.get(DEVICE) != "cpu" else []
    return [*_memory(config, size, free, beside), *_disk(config, size, beside)]


def parameters(folder: Path) -> int:
    """The number of parameters in a folder's safetensors; 0 where there are none. Only their headers are read."""
    headers = (header(path) or {} for path in folder.glob(WEIGHTS))
    return sum(prod(one["shape"]) for found in headers for name, one in found.items() if name != "__metadata__")


def header(path: Path) -> dict[str, Any] | None:
    """The header of a file of safetensors. None if it has none: it is cut short, or what git leaves without LFS."""
    with path.open("rb") as file, suppress(ValueError):
        if (size := int.from_bytes(file.read(8), "little")) < path.stat().st_size:
            return dict(json.loads(file.read(size)))
    return None


def _versions() -> Iterator[Finding]:
    """Compares what the extra `trainer` asks for with what is installed."""
    from packaging.requirements import Requirement

    wrong = []
    for line in requires("ajet") or ():
        wanted = Requirement(line)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": "trainer"}) or wanted.marker.evaluate():
            continue
        try:
            if not wanted.specifier.contains(has := version(wanted.name), prereleases=True):
                wrong.append(f"{wanted.name} {has} is installed, and {wanted.specifier} is needed")
        except PackageNotFoundError:
            wrong.append(f"{wanted.name} is not installed, and {wanted.specifier} is needed")
    for said in wrong:
        yield fault("versions", said, "pip install 'ajet[trainer]' in the environment that holds torch, vLLM and verl")
    if not wrong:
        yield ok("versions", "all packages are of the versions that the trainer accepts")
    if not wrong and shutil.which("nvidia-smi") and "+cpu" in version("torch"):
        yield warning("versions", "this host has GPUs, and torch is a CPU build", "install torch for CUDA")


def _model(config: Config) -> Iterator[Finding]:
    try:
        folder = find_model(config)
    except ConfigError as error:
        yield fault("model", str(error).split(": ")[1], "give model the path of a folder")
        return
    if not folder.is_dir():
        yield warning("model", f"{config.model} is a hub's: its size is not known", "give model the path of a folder")
        return
    for name, what in LACKING.items():
        if not any(folder.glob(name)):
            yield fault("model", f"{folder} has no {what} ({name})", "give the folder as save_pretrained writes it")
            return
    if odd := [path for path in sorted(folder.glob(WEIGHTS)) if header(path) is None]:
        yield fault("model", f"{odd[0]} holds no weights", "fetch it again; in a clone of git, `git lfs pull` does")
        return
    yield ok("model", f"{folder}: {parameters(folder) / 1e9:.2f} billion parameters")
    apart = any((folder / f"chat_template.{kind}").exists() for kind in ("jinja", "json"))
    if not apart and "chat_template" not in (folder / "tokenizer_config.json").read_text():
        yield warning("chat template", f"{folder} has none: chat completions are refused by vLLM",
                      "use a model that has one, or start vLLM with --chat-template")


def _memory(config: Config, size: int, gpus: Sequence[tuple[int, int]], beside: float) -> Iterator[Finding]:
    """Memory of the host, or of `gpus`, against what weights, gradients and Adam take, and an engine that verl
    launches."""
    trained, own = size * (FLOAT if config.adapts else TRAINED), not config.attached
    used, hosts, share = _number(config, GPUS, 1), _number(config, NODES, 1), _number(config, SHARE, 0.5)
    said = f"weights, gradients and moments{' and an engine' if own else ''}"
    if not gpus and config.verl.get(DEVICE) == "cuda":
        yield fault("GPU memory", "torch sees no GPU here", f"install its driver, or set {DEVICE} = 'cpu'")
    elif not gpus:
        remedy = "train a smaller model, or an adapter (lora_rank), or end other programs"
        yield _room("memory", said, trained + own * size * FLOAT + beside, memory("MemAvailable") or 1 << 60, remedy)
    elif used > len(gpus):
        yield fault("GPU memory", f"{used} GPUs are asked for, and {len(gpus)} seen", f"set {GPUS}")
    else:
        free, whole = min(gpus[:used])
        needed = trained / used / hosts + own * share * whole + beside
        remedy = f"use more GPUs ({GPUS}), offload (docs/guide/trainer.md), or end what uses them"
        yield _room("GPU memory", f"{said} on each of {used}", needed, free, remedy)


def _number(config: Config, key: str, other: Any) -> Any:
    """The number of verl's `key`; the `other` where it is not set, or to what verl reads elsewhere."""
    return said if type(said := config.verl.get(key)) in (int, float) else other


def _disk(config: Config, size: int, beside: float) -> Iterator[Finding]:
    kept = config.keep_checkpoints + 1
    run, remedy = _existing(Path(config.run_dir)), "set run_dir to a larger disk, or trainer.max_actor_ckpt_to_keep"
    if not (run.is_dir() and os.access(run, os.W_OK)):
        yield fault("run_dir", f"{run} cannot be written", "chown it to this user, or set another run_dir")
    yield _room("disk", f"{kept} checkpoints", size * SAVED * kept + beside, shutil.disk_usage(run).free, remedy)
    if config.attached and not config.adapts:
        folder = _existing(weights_parent(config))
        two = 2 * size * (HALF if Attached(config, folder).dtype() == "bfloat16" else FLOAT)
        said, remedy = f"weights of two steps in {folder}", "enlarge it, or set weights_dir"
        yield _room("weights", said, two, shutil.disk_usage(folder).free, remedy)


def _others(config: Config) -> Iterator[Finding]:
    """The proxy and the engines that stand alone."""
    try:
        with closing(Link.of(config, deadline_s=0.0)) as link:
            link.meet()
        yield ok("proxy", f"{config.proxy_url} answers, and takes our key")
    except AjetError as error:
        said = error.message + _instead(config.proxy_url)
        yield fault("proxy", said, "start ajet-proxy serve, or set proxy_url and key")
    yield from _engines(config, "engine", "engine_urls")
    if config.candidate_urls:
        yield from _engines(of_candidate(config), "candidate's engine", "candidate_urls")


def _engines(config: Config, check: str, setting: str) -> Iterator[Finding]:
    """The engines of `config`, which `setting` names."""
    try:
        found = same_model.look(config, {})
    except EngineLost as error:
        said, _, advice = str(error).rpartition(": ")
        yield fault(check, said, advice)
        return
    for url in config.engine_urls:
        if url in found:
            yield ok(check, f"{url} serves {same_model.named(found[url])}")
        else:
            yield fault(check, f"{url} does not answer{_instead(url)}", f"start vLLM there, or set {setting}")


def _instead(url: str) -> str:
    """Who listens at the port of `url`, if that is on this host."""
    _, port = server(url) or ("", 0)
    found = listener(port) if is_here(url) else None
    return "" if found is None else f" ({found} listens on port {port})"


def _room(check: str, said: str, needed: float, free: float, remedy: str) -> Finding:
    text = f"{said} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return fault(check, text, remedy) if needed > free else ok(check, text)


def _existing(path: Path) -> Path:
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def memory(kind: str) -> int | None:
    """Bytes of a kind that /proc/meminfo names, where the system has such a file."""
    try:
        return int(Path("/proc/meminfo").read_text().split(f"{kind}:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def gpus() -> list[tuple[int, int]]:
    """The free and all bytes of each GPU that torch sees. It is asked in a process of its own, which takes its part of
    them with it."""
    try:
        told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return []
    numbers = iter(map(int, told.stdout.split()))
    return list(zip(numbers, numbers, strict=True))
