"""What the files of a saved SD3 pipeline say without loading it: sizes of pictures, names of modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Name → shape of the transformer's weights, from the headers of its safetensors files; empty for a hub id."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted((folder / "transformer").glob("*.safetensors")):
        try:
            with safe_open(str(file), "pt") as weights:
                shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}.") from error
    return shapes


def check_picture_size(folder: Path, height: int, width: int) -> None:
    """Refuse sizes that the VAE and the transformer's patches do not divide, or that it has no positions for.

    Raises:
        ValueError: naming the size and what it must be a multiple of.
    """
    vae, transformer = (_read(folder / part / "config.json") for part in ("vae", "transformer"))
    unit, largest = 16, 3072  # of all SD3, for a hub id
    if vae and transformer:
        unit = 2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"]
        largest = unit * transformer["pos_embed_max_size"]
    for name, size in (("height", height), ("width", width)):
        if size % unit or not 0 < size <= largest:
            below = min(max(size // unit, 1), largest // unit - 1) * unit
            raise ValueError(
                f"{name} is {size}, but {folder.name} draws pictures whose sides are multiples of {unit} pixels up to "
                f"{largest}: take {below} or {below + unit}."
            )


def has_t5(folder: Path) -> bool:
    """Whether a pipeline comes with T5; a hub id is taken to be complete, as SD3.5 is."""
    index = _read(folder / "model_index.json")
    return not index or index.get("text_encoder_3", [None])[0] is not None


def check_lora_targets(folder: Path, targets: Sequence[str]) -> None:
    """Refuse targets that are the end of no module's name.

    Raises:
        ValueError: naming the first one.
    """
    modules = {name.removesuffix(".weight") for name in weight_shapes(folder) if name.endswith(".weight")}
    for target in targets:
        if modules and not any(f".{module}".endswith(f".{target}") for module in modules):
            attention = sorted({module.partition(".attn.")[2] for module in modules} - {""})
            raise ValueError(
                f"lora_targets holds {target!r}, which is the end of no module's name; in attention there are "
                f"{', '.join(f'attn.{name}' for name in attention if not name.startswith('norm'))}."
            )


def _read(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config
