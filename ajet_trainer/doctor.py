"""Checks of all that a run depends on, before anything is loaded: each with what to do about a fault.

Sizes follow from the number of parameters in the model's folder. verl trains float32 weights with Adam: 4 bytes a
parameter for weights, gradients and each of Adam's two moments, before activations. An adapter needs the weights alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, requires, version
from math import prod
from pathlib import Path

from ajet_sdk.errors import AjetError
from ajet_sdk.findings import Finding, fault, ok, warning
from ajet_trainer.config import DEVICE, Config, flatten
from ajet_trainer.engines import same_model
from ajet_trainer.engines.attached import Attached, weights_parent
from ajet_trainer.engines.http import EngineLost
from ajet_trainer.link import Link

HALF, FLOAT, TRAINED, SAVED = 2, 4, 16, 12
"""Bytes a parameter: of a weight on its way to an engine in bfloat16, or to another; of one that is trained; and of one
in a checkpoint."""


def examine(config: Config) -> list[Finding]:
    """Every check, in the order in which faults should be repaired."""
    size = parameters(Path(config.model))
    return [*_versions(), *_model(config, size), *_memory(config, size), *_disk(config, size), *_others(config)]


def parameters(folder: Path) -> int:
    """The number of parameters in a folder's safetensors; 0 where there are none. Only their headers are read."""
    found = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += sum(prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return found


def _versions() -> Iterator[Finding]:
    """What the extra `trainer` asks for, against what is installed."""
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
    if not wrong and gpus() and "+cpu" in version("torch"):
        yield warning("versions", "this host has GPUs, and torch is a CPU build", "install torch for CUDA")


def _model(config: Config, size: int) -> Iterator[Finding]:
    folder = Path(config.model)
    if not folder.is_dir():
        offline = os.environ.get("HF_HUB_OFFLINE") == "1" or config.model.count("/") > 1
        said = f"there is no folder {folder.absolute()}, so {config.model!r} is the name of a model of a hub"
        yield (fault if offline else warning)("model", said, "give model the path of a folder, if it is one")
        return
    for name, lacking in (("config.json", "configuration"), ("tokenizer_config.json", "tokenizer")):
        if not (folder / name).is_file():
            yield fault("model", f"{folder} has no {lacking} ({name})", "give the folder as save_pretrained writes it")
            return
    if not size:
        yield fault("model", f"{folder} has no weights (*.safetensors)", "give the whole folder")
    else:
        yield ok("model", f"{folder}: {size / 1e9:.2f} billion parameters")
    apart = any((folder / f"chat_template.{kind}").exists() for kind in ("jinja", "json"))
    if not apart and "chat_template" not in (folder / "tokenizer_config.json").read_text():
        yield warning("chat template", f"{folder} has none: chat completions are refused by vLLM",
                      "use a model that has one, or start vLLM with --chat-template")


def _memory(config: Config, size: int) -> Iterator[Finding]:
    """Memory of the host or of its GPUs against what weights, gradients and Adam take, before activations."""
    bytes_ = size * (FLOAT if _adapter(config) else TRAINED)
    free = gpus() if config.verl.get(DEVICE) != "cpu" else []
    if config.verl.get(DEVICE) == "cuda" and not free:
        yield fault("GPU memory", "no GPU is seen here", f"install its driver, or set {DEVICE} = 'cpu'")
        return
    said = f"the trainer takes {bytes_ / 1e9:.1f} GB before activations"
    if not free:
        yield _room("memory", said, bytes_, available(), "train a smaller model, or an adapter (lora_rank)")
        return
    used = int(config.verl.get("trainer.n_gpus_per_node", 1))
    if used > len(free):
        yield fault("GPU memory", f"{used} GPUs are asked for, and {len(free)} seen", "set trainer.n_gpus_per_node")
        return
    share = bytes_ / used / int(config.verl.get("trainer.nnodes", 1))
    remedy = "use more GPUs (trainer.n_gpus_per_node), offload (docs/guide/trainer.md), or end what uses them"
    yield _room("GPU memory", f"{said}, {share / 1e9:.1f} GB on each of {used}", share, min(free[:used]), remedy)


def _disk(config: Config, size: int) -> Iterator[Finding]:
    kept = config.keep_checkpoints + 1
    run, remedy = _existing(Path(config.run_dir)), "set run_dir to a larger disk, or trainer.max_actor_ckpt_to_keep"
    if not os.access(run, os.W_OK):
        yield fault("run_dir", f"{run} cannot be written", "chown it to this user, or set another run_dir")
    said = f"{kept} checkpoints take {size * SAVED * kept / 1e9:.1f} GB"
    yield _room("disk", said, size * SAVED * kept, shutil.disk_usage(run).free, remedy)
    if config.attached and not _adapter(config):
        folder = _existing(weights_parent(config))
        two = 2 * size * (HALF if Attached(config, folder).dtype() == "bfloat16" else FLOAT)
        said = f"weights of two steps on their way take {two / 1e9:.1f} GB of {folder}"
        yield _room("weights", said, two, shutil.disk_usage(folder).free, "enlarge it, or set weights_dir")


def _others(config: Config) -> Iterator[Finding]:
    """The proxy and the engines that stand alone."""
    try:
        with closing(Link.of(config, deadline_s=0.0)) as link:
            link.meet()
        yield ok("proxy", f"{config.proxy_url} answers, and takes our key")
    except AjetError as error:
        yield fault("proxy", error.message, "start ajet-proxy serve, or set proxy_url and key")
    try:
        found = same_model.look(config, {})
    except EngineLost as error:
        said, _, advice = str(error).rpartition(": ")
        yield fault("engine", said, advice)
        return
    for url in config.engine_urls:
        if url in found:
            yield ok("engine", f"{url} serves {same_model.named(found[url])}")
        else:
            yield fault("engine", f"{url} does not answer", "start vLLM there, or set engine_urls")


def _adapter(config: Config) -> bool:
    """True if an adapter is trained, and not the whole model."""
    return any(key.endswith("lora_rank") and value for key, value in flatten(config.verl))


def _room(check: str, said: str, needed: float, free: float, remedy: str) -> Finding:
    text = f"{said}, and {free / 1e9:.1f} GB are free"
    return fault(check, text, remedy) if needed > free else ok(check, text)


def _existing(path: Path) -> Path:
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def available() -> int:
    """Bytes of memory that this host has free; without a limit where it does not tell."""
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 1 << 60


def gpus() -> list[int]:
    """The free bytes of each GPU that CUDA_VISIBLE_DEVICES lets torch see, by NVIDIA's own program; empty if there is
    none."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()
        free, seen = [int(one) << 20 for one in told], os.environ.get("CUDA_VISIBLE_DEVICES")
        return free if seen is None else [free[int(one)] for one in seen.split(",") if one.strip()]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
