"""The trained model as a Hugging Face folder: what a checkpoint's processes wrote, put together tensor by tensor.

verl's own merger rounds every weight to bfloat16, holds several copies of the model in memory, and leaves an adapter
next to the model. So this is ours. The tensors of a checkpoint stay in their files until they are needed, and what is
made of them stays in files too. transformers writes the folder, by the names that tensors have on disk. An adapter is
merged into the weights that it adapts, as for engines.

Invariant: the folder appears whole, with every tensor that the model has, or not at all. Nothing of a checkpoint is
unpickled but tensors, and how they are dealt to processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor, Shard

from ajet_sdk.errors import AjetError
from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.checkpoints import DTYPE, whole
from ajet_trainer.trained_rows import listed

PIECE = "2GB"
"""No file of weights is larger, since one is in memory while it is written."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
"""Files that verl saves besides if it is asked for a whole model, as it was before adapters are merged and in fp32."""
BASE, PREFIX = ".base_layer.", "base_model.model."
"""Parts of the names that an adapter's library gives to the tensors of the model."""


class ExportFailed(AjetError):
    """The model cannot be written; the message is one line."""

    type = "export_failed"


def export(run: Path, step: int | None, target: Path, say: Callable[[str], None]) -> None:
    """Writes the model of a checkpoint of `run`, the latest unless a `step` is asked for, into the folder `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: name one that does not exist yet", param="DIR")
    checkpoint = find(run, step)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # warns that no process group is there
    try:
        with unfinished(target) as folder:
            Export(checkpoint, say).write(folder)
    except (OSError, ValueError) as error:  # such as a model that brings code of its own
        raise ExportFailed(f"cannot export {checkpoint} to {target}: {error}") from error
    say(f"exported to {target}")


def find(run: Path, step: int | None) -> Path:
    """The checkpoint of `step` in `run`, a run folder or its folder of checkpoints."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    there = whole(folder)
    if not there:
        raise ConfigError(f"no whole checkpoint is in {folder}: is {run} the run_dir of a run that has saved one?")
    if step is not None and step not in there:
        half = (folder / f"global_step_{step}").is_dir()
        said = f"the checkpoint of step {step} is not whole" if half else f"there is no checkpoint of step {step}"
        raise ConfigError(f"{said}; {folder} has {listed(there)}")
    return folder / f"global_step_{there[-1] if step is None else step}"


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` at the end, and goes after an error. What a killed export left goes first."""
    target = target.absolute()
    folder = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Parts:
    """The tensors of a checkpoint. Each is put together of the parts of all processes when it is asked for."""

    def __init__(self, actor: Path) -> None:
        try:
            size = json.loads((actor / "fsdp_config.json").read_text())["world_size"]
        except FileNotFoundError:
            said = f"{actor} was not written by fsdp: `python -m verl.model_merger` knows other engines"
            raise ExportFailed(said) from None
        paths = [actor / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
        self._parts = [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths]
        self.names = tuple(self._parts[0])

    def tensor(self, name: str) -> torch.Tensor:
        first = self._parts[0][name]
        if not isinstance(first, DTensor):
            return torch.as_tensor(first)
        mesh, placement = first.device_mesh.mesh, first.placements[-1]
        holders = mesh.reshape(-1, mesh.shape[-1])[0].tolist()  # any others have copies
        local = [self._parts[rank][name].to_local() for rank in holders]
        return torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else torch.as_tensor(local[0])


class Export:
    """One whole `checkpoint` on its way into a folder; `say` hears of the way."""

    def __init__(self, checkpoint: Path, say: Callable[[str], None]) -> None:
        self._checkpoint, self._say = checkpoint, say
        self._own = checkpoint / "actor" / "huggingface"
        """The files that verl saved with the weights: the configuration, and the tokenizer with its template."""
        self._described = json.loads((self._own / "config.json").read_text())
        kept = torch.load(checkpoint / "data.pt", mmap=True, weights_only=True)
        self._described["dtype"] = kept.get(DTYPE) or self._described.get("dtype") or "float32"
        self._described.pop("attn_implementation", None)  # the trainer's choice

    def write(self, folder: Path) -> None:
        """Writes weights, configuration and tokenizer into `folder`."""
        self._say(f"reading {self._checkpoint}")
        parts = Parts(self._checkpoint / "actor")
        model, dtype = self._model(), getattr(torch, self._described["dtype"])
        between = folder / "between"
        between.mkdir()
        tensors = {}
        for number, (name, tensor) in enumerate(self._tensors(parts, model)):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            file = torch.from_file(str(between / str(number)), shared=True, size=tensor.numel(), dtype=kind)
            tensors[name] = file.view(tensor.shape).copy_(tensor)
        self._say(f"writing {len(tensors)} tensors in {self._described['dtype']}")
        model.to(dtype).save_pretrained(folder, state_dict=tensors, max_shard_size=PIECE)
        shutil.rmtree(between)
        shutil.copytree(self._own, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
        (folder / "config.json").write_text(json.dumps(self._described, indent=2) + "\n")
        for path in folder.glob("*.safetensors"):  # which their library writes for us alone to read
            path.chmod((folder / "config.json").stat().st_mode)

    def _model(self) -> Any:
        """The model without weights: which tensors it has, and which of them are one."""
        config = transformers.AutoConfig.from_pretrained(self._own)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None:
            raise ExportFailed(f"transformers has no model of the kind {config.architectures}")
        with torch.device("meta"):
            return kind(config)

    def _tensors(self, parts: Parts, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model by the model's name; one that has several names, by the first."""
        plain = {name.removeprefix(PREFIX).replace(BASE, "."): name for name in parts.names if "lora_" not in name}
        first: dict[int, str] = {}
        alias = {name: first.setdefault(id(one), name) for name, one in model.named_parameters(remove_duplicate=False)}
        wanted = {alias.get(name, name): None for name in model.state_dict()}
        lacking, odd = wanted.keys() - plain.keys(), plain.keys() - alias.keys() - wanted.keys()
        for those, fault in ((lacking, "lacks"), (odd, "has")):
            if those:
                raise ExportFailed(f"the checkpoint {fault} {min(those)}, unlike its model, and {len(those) - 1} more")
        merge = self._adapter(parts)
        for name in wanted:
            yield name, merge(plain[name], parts.tensor(plain[name]))

    def _adapter(self, parts: Parts) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Adds to a tensor what the checkpoint's adapter, if there is one, adds to it."""
        found = self._checkpoint / "actor" / "lora_train_meta.json"
        known = json.loads(found.read_text()) if found.exists() else {"r": 1, "lora_alpha": 0}
        pairs = {
            name: [name.replace(f"{BASE}weight", f".lora_{side}.default.weight") for side in "BA"]
            for name in parts.names if name.endswith(f"{BASE}weight")
        }
        merged = {one for pair in pairs.values() for one in pair}
        if odd := [name for name in parts.names if "lora_" in name and name not in merged]:
            raise ExportFailed(f"the adapter's {odd[0]} cannot be merged into the model, and {len(odd) - 1} more")

        def merge(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name not in pairs:
                return tensor
            up, down = (parts.tensor(one).float() for one in pairs[name])
            return tensor.float() + known["lora_alpha"] / known["r"] * (up @ down)

        return merge
