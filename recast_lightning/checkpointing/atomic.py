"""Writes checkpoints so that the last good one survives whatever happens."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from recast_lightning.errors import UserError
from recast_lightning.files import write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file, then puts the whole in its place: a reader finds the old checkpoint or the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint to a local path.

        Raises:
            UserError: if it cannot be written, or not be read again; what was there before is untouched.
        """
        content = io.BytesIO()
        torch.save(checkpoint, content)
        if not _is_readable(content):
            raise UserError(f"The checkpoint {str(path)!r} was not written, since {_culprit(checkpoint)}.")
        try:
            write_atomically(path, content.getbuffer())
        except OSError as error:
            raise UserError(
                f"The checkpoint {str(path)!r} could not be written ({error.strerror}); the one before it is whole. "
                "Make room, then go on with --ckpt_path last."
            ) from error


def _is_readable(content: io.BytesIO) -> bool:
    """Whether what was saved can be loaded, which runs no code that it holds."""
    content.seek(0)
    try:
        torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _culprit(thing: Any, place: str = "it") -> str:
    """Which part of a checkpoint cannot be loaded again, in words."""
    if isinstance(thing, (Mapping, list, tuple)):
        parts = thing.items() if isinstance(thing, Mapping) else enumerate(thing)
        for key, part in parts:
            content = io.BytesIO()
            torch.save(part, content)
            if not _is_readable(content):
                return _culprit(part, f"{place}[{key!r}]")
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    return (
        f"{place} is a {kind}, which a safe reader refuses: a state_dict may hold numbers, text, tensors, lists and "
        "dictionaries of them"
    )
