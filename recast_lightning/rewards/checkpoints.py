"""Reading published weight files: from a folder or the hub, and only if every tensor finds its place."""

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast_lightning.errors import few
from recast_lightning.paths import reading, resolve

SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")

_SCALAR = np.float64(0).__reduce__()[0]  # makes numpy's numbers out of bytes
_NUMPY: list[Any] = [
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(code)) for code in "?bBhHiIlLqQefd"),
]


def check_file(path: str, filename: str, what: str) -> None:
    """Check that weights are there if their path is a local one.

    Raises:
        ValueError: If `path` is neither a file of weights, nor a folder that holds `filename`, nor a hub id.
    """
    local = Path(resolve(path, what))
    if local.is_dir() and not (local / filename).is_file():
        raise ValueError(f'The {what} folder {path} holds no file "{filename}": give the path of the file itself.')
    if local.is_file() and local.suffix not in SUFFIXES:
        raise ValueError(f"The {what} file {path} is none of {', '.join(SUFFIXES)}.")


def fetch(path: str, filename: str, user: str) -> str:
    """The local path of a weight file.

    Args:
        path: The file itself, a folder that holds it, or a hub id.
        filename: Its name in the folder or on the hub.
        user: Who asks, for messages.

    Raises:
        ValueError: If a folder has no such file.
        UserError: If the hub has none for this user, see `reading`.
    """
    if Path(path).is_dir():
        path = str(Path(path) / filename)
        if not Path(path).is_file():
            raise ValueError(f"{user} found no file {path}.")
    if Path(path).exists():
        return path
    from huggingface_hub import hf_hub_download

    with reading(f'{user} found no file "{filename}"', path):
        return hf_hub_download(path, filename)


@contextmanager
def whole(path: str) -> Iterator[None]:
    """Turns what libraries raise for damaged files of weights into one sentence.

    Raises:
        ValueError: If the file or folder `path`, read inside, is damaged, or would run code.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError, SafetensorError) as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} holds a {foreign.group(1)} and is not read, since such things can run code: "
                "save its state dict alone."
            ) from error
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise ValueError(
            f"{path} cannot be read as a file of weights, it may be damaged or incomplete: "
            f"{reason or type(error).__name__}."
        ) from error


def check_model_type(path: str, expected: str, user: str) -> None:
    """Check what the config.json of a folder or hub id in transformers' layout describes.

    Raises:
        ValueError: If it is another type of model.
        UserError: If there is none, see `reading`.
    """
    from transformers import PreTrainedConfig

    with reading(f'{user} found no model of the type "{expected}"', path):
        found = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if found != expected:
        raise ValueError(f'{path} holds a model of the type "{found}": {user} takes the type "{expected}".')


def read_tensors(path: str) -> dict[str, Tensor]:
    """Read a state dict, or a dict that holds one as ``state_dict``, from a .pt, .pth, .bin or .safetensors file.

    Nothing in the file is executed.

    Raises:
        ValueError: If the file holds anything else.
    """
    from safetensors.torch import load_file

    with whole(path):
        if path.endswith(".safetensors"):
            return load_file(path)
        with torch.serialization.safe_globals(_NUMPY):
            source = torch.load(path, map_location="cpu", weights_only=True)
    source = source.get("state_dict", source) if isinstance(source, dict) else source
    if not isinstance(source, dict) or not all(isinstance(value, Tensor) for value in source.values()):
        raise ValueError(f"{path} holds no state dict: expected names and tensors only.")
    return source


def load_strictly(model: nn.Module, tensors: dict[str, Tensor], path: str, kind: str) -> None:
    """Make tensors the weights of a model whose state dict has exactly their names and shapes; nothing is copied.

    Raises:
        ValueError: Naming the file `path`, the `kind` of model, and what is missing, surplus, or of another shape.
    """
    own = model.state_dict()
    check_fit(
        path,
        kind,
        missing=own.keys() - tensors.keys(),
        surplus=tensors.keys() - own.keys(),
        misshapen=(key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape),
    )
    model.load_state_dict(tensors, assign=True)


def check_fit(path: str, kind: str, missing: Iterable[str], surplus: Iterable[str], misshapen: Iterable[str]) -> None:
    """Refuse weights that do not fit their model.

    Raises:
        ValueError: If any tensor is missing, surplus, or of another shape.
    """
    faults = {"lacks": missing, "has the surplus": surplus, "has other shapes for": misshapen}
    found = [f"it {fault} {few(names)}" for fault, keys in faults.items() if (names := sorted(keys))]
    if found:
        raise ValueError(f"{path} does not fit {kind}: {', '.join(found)}.")
