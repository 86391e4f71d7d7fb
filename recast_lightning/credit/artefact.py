"""Files of this package's measurements: tensors in safetensors, with a readable JSON beside them."""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_SUFFIXES = (".safetensors", ".json")


def save_artefact(path: str | Path, kind: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> Path:
    """Writes ``path``.safetensors (exact; the header rides in its metadata) and ``path``.json (to read).

    Args:
        path: With or without either suffix; folders are made.
        kind: What it is, checked on load.
        tensors: Named tensors.
        header: JSON-able values.

    Returns:
        Path of the safetensors file.
    """
    stem = _stem(path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    readable = {"kind": kind, **header, **{name: _readable(tensor.tolist()) for name, tensor in tensors.items()}}
    _with(stem, ".json").write_text(json.dumps(readable, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, _with(stem, ".safetensors"), metadata={"kind": kind, "header": json.dumps(header)})
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
    header: dict[str, Any] = json.loads(metadata["header"])
    return tensors, header


def _stem(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in _SUFFIXES else path


def _with(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _readable(values: Any) -> Any:
    """Numbers that JSON has no word for (nan, inf) become null."""
    if isinstance(values, list):
        return [_readable(value) for value in values]
    return values if not isinstance(values, float) or math.isfinite(values) else None
