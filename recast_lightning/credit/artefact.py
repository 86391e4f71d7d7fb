"""Files of this package's measurements: tensors in safetensors, with a readable JSON beside them."""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from recast_lightning.files import write_atomically

_SUFFIXES = (".safetensors", ".json")


def save_artefact(
    path: str | Path,
    kind: str,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    *,
    shown: dict[str, Tensor] | None = None,
) -> Path:
    """Writes ``path``.safetensors (exact; the header rides in its metadata) and ``path``.json (to read).

    Args:
        path: With or without either suffix; folders are made.
        kind: What it is, checked on load.
        tensors: Named tensors.
        header: JSON-able values.
        shown: What the JSON file has of numbers; default the tensors. No JSON file is written if it is empty.

    Returns:
        Path of the safetensors file.
    """
    stem = _stem(path)
    # safetensors takes no tensors that share memory
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    readable = {name: _readable(tensor.tolist()) for name, tensor in (tensors if shown is None else shown).items()}
    if readable:
        text = json.dumps({"kind": kind, **_readable(header), **readable}, indent=1, allow_nan=False)
        write_atomically(_with(stem, ".json"), (text + "\n").encode())
    write_atomically(_with(stem, ".safetensors"), save(tensors, metadata={"kind": kind, "header": json.dumps(header)}))
    return _with(stem, ".safetensors")


def load_artefact(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads back the tensors and the header that `save_artefact` wrote, bit for bit; both by name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged or holds something else.
    """
    file = _with(_stem(path), ".safetensors")
    if not file.is_file():
        raise FileNotFoundError(f"There is no {kind} at {file}.")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file ({error}).") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{file} holds {metadata.get('kind') or 'something else'}, not a {kind}.")
    try:
        header: dict[str, Any] = json.loads(metadata["header"])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: its header cannot be read.") from error
    return tensors, header


def delete_artefact(path: str | Path) -> None:
    """Deletes the files of `save_artefact`, if they are there."""
    for suffix in _SUFFIXES:
        _with(_stem(path), suffix).unlink(missing_ok=True)


def _stem(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in _SUFFIXES else path


def _with(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _readable(values: Any) -> Any:
    """Numbers that JSON has no word for (nan, inf) become null."""
    if isinstance(values, dict):
        return {name: _readable(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_readable(value) for value in values]
    return values if not isinstance(values, float) or math.isfinite(values) else None
