"""What the files of a saved diffusers pipeline say without loading it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast_lightning.errors import UserError
from recast_lightning.paths import reading, resolve

_INDEX = "model_index.json"
_CONFIGS = (_INDEX, "transformer/config.json", "vae/config.json")


@dataclass(frozen=True)
class PipelineFolder:
    """A diffusers pipeline whose configuration files are on this machine.

    Args:
        path: as the user gives it: a folder, a hub id or `signboard:NAME`.
        folder: where the files are.
    """

    path: str
    folder: Path

    @classmethod
    def find(cls, path: str) -> PipelineFolder | None:
        """A pipeline at a local path, or in the local cache of the hub; None for a hub id that is not in the cache.

        Raises:
            UserError: if a local path is absent or no saved pipeline.
        """
        place = resolve(path, "policy")
        if Path(place).exists():
            absent = next((name for name in _CONFIGS if not (Path(place) / name).is_file()), None)
            if absent:
                raise UserError(f"Policy path {path!r} has no {absent}: it must be a saved diffusers pipeline.")
            return cls(path, Path(place))
        from huggingface_hub import try_to_load_from_cache

        index, *others = (try_to_load_from_cache(path, name) for name in _CONFIGS)
        if not isinstance(index, str) or not all(isinstance(file, str) for file in others):
            return None
        return cls(path, Path(index).parent)

    @property
    def pipeline_class(self) -> str:
        """Name of the pipeline's class in diffusers."""
        return str(self._read(_INDEX).get("_class_name"))

    def has(self, part: str) -> bool:
        """Whether the pipeline was saved with a part, e.g. `text_encoder_3`."""
        return self._read(_INDEX).get(part, [None])[0] is not None

    def config(self, part: str) -> dict[str, Any]:
        """Configuration of a part, e.g. `vae`."""
        return self._read(f"{part}/config.json")

    def scheduler_config(self) -> dict[str, Any]:
        """Configuration of the scheduler; empty where its file is not on this machine yet."""
        name = "scheduler/scheduler_config.json"
        return self._read(name) if (self.folder / name).is_file() else {}

    def weight_shapes(self) -> dict[str, list[int]]:
        """Name → shape of the transformer's weights, from the headers of its safetensors files.

        Raises:
            UserError: if one of them cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        shapes: dict[str, list[int]] = {}
        for file in sorted((self.folder / "transformer").glob("*.safetensors")):
            try:
                with safe_open(str(file), "pt") as weights:
                    shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} cannot be read as safetensors: {error}.") from error
        return shapes

    def _read(self, name: str) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.folder / name} cannot be read as JSON: {error}.") from error
        return config


def fetch_index(path: str) -> PipelineFolder:
    """A pipeline of the hub, of which model_index.json is fetched.

    Raises:
        UserError: if the hub does not give it.
    """
    from huggingface_hub import hf_hub_download

    with reading("The policy found no pipeline", path):
        return PipelineFolder(path, Path(hf_hub_download(path, _INDEX)).parent)


def check_sides(path: str, height: int, width: int, unit: int, longest: int | None) -> None:
    """Refuse sides of a picture that are no multiple of `unit` pixels, or longer than `longest`.

    Raises:
        UserError: naming the side and what it can be.
    """
    for name, size in (("height", height), ("width", width)):
        if size % unit or size <= 0 or (longest is not None and size > longest):
            below = max(size // unit, 1) if longest is None else min(max(size // unit, 1), longest // unit - 1)
            up_to = f" up to {longest}" if longest is not None else ""
            raise UserError(
                f"{name} is {size}, but {path!r} draws pictures whose sides are multiples of {unit} pixels{up_to}: "
                f"take {below * unit} or {(below + 1) * unit}."
            )


def check_lora_targets(pipeline: PipelineFolder, targets: Sequence[str]) -> None:
    """Refuse targets that are the end of no module's name.

    Raises:
        UserError: naming the first one.
    """
    modules = {name.removesuffix(".weight") for name in pipeline.weight_shapes() if name.endswith(".weight")}
    for target in targets:
        if modules and not any(f".{module}".endswith(f".{target}") for module in modules):
            attention = sorted({module.partition(".attn.")[2] for module in modules} - {""})
            raise UserError(
                f"lora_targets holds {target!r}, which is the end of no module's name; in attention there are "
                f"{', '.join(f'attn.{name}' for name in attention if not name.startswith('norm'))}."
            )
