"""Writes checkpoints so that the last good one survives whatever happens."""

from __future__ import annotations

import io
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
            UserError: if it cannot be written; what was there before is untouched.
        """
        content = io.BytesIO()
        torch.save(checkpoint, content)
        try:
            write_atomically(path, content.getbuffer())
        except OSError as error:
            raise UserError(
                f"The checkpoint {str(path)!r} could not be written ({error.strerror}); the one before it is whole. "
                "Make room, then go on with --ckpt_path last."
            ) from error
