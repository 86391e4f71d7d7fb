"""Encoded prompts on disk, and the fingerprints that keep those of other encoders out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from recast_lightning.errors import UserError
from recast_lightning.files import content_hash, write_atomically
from recast_lightning.policy.condition import Condition

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_NOT_READ = (".safetensors", ".bin", ".msgpack", ".h5", ".index.json")  # other weights, and how they are split
_UNSAID = {"family": "sd3"}  # of files that were written when there was no other


class EmbeddingFolder:
    """A safetensors file for each encoded prompt, named by the prompt's hash, that says what made it.

    Files appear whole or not at all, so any number of processes may read and write at a time. What is read is
    memory-mapped: it takes page cache that all processes share, not memory.

    Args:
        path: the folder; made when the first file is written.
        made_by: what embeddings depend on, by name, e.g. {"dtype": "bfloat16"}.

    Raises:
        UserError: if the folder is a file, or holds what something else made.
    """

    def __init__(self, path: Path, made_by: dict[str, str]) -> None:
        self.path, self.made_by = path, made_by
        if path.exists() and not path.is_dir():
            raise UserError(f"embedding_folder {str(path)!r} is a file: name a folder.")
        some = next(path.glob("*.safetensors"), None)
        if some is not None:
            self._read(some)

    def __contains__(self, text: str) -> bool:
        return self._file(text).is_file()

    def read(self, text: str) -> Condition | None:
        """A prompt's embedding, B = 1; None where there is none, or a file that the machine's end cut short.

        Raises:
            UserError: if something else made it.
        """
        return self._read(self._file(text))

    def write(self, text: str, row: Condition) -> None:
        """Keep a prompt's embedding, B = 1.

        Raises:
            UserError: if the folder or the disk does not take it.
        """
        tensors = {name: tensor.contiguous() for name, tensor in row.tensors.items()}
        try:
            write_atomically(self._file(text), save(tensors, metadata={**self.made_by, "prompt": text}))
        except OSError as error:
            raise UserError(
                f"embedding_folder {str(self.path)!r} cannot keep an embedding ({error.strerror}): make it writable, or "
                "make room on its disk."
            ) from error

    def _file(self, text: str) -> Path:
        return self.path / f"{content_hash(text.encode(), size=16)}.safetensors"

    def _read(self, file: Path) -> Condition | None:
        try:
            with safe_open(file, "pt") as opened:
                self._check(_UNSAID | (opened.metadata() or {}))
                return Condition({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 (not a dict)
        except (FileNotFoundError, SafetensorError):
            return None

    def _check(self, found: dict[str, str]) -> None:
        for name, ours in self.made_by.items():
            if found.get(name) != ours:
                raise UserError(
                    f"embedding_folder {str(self.path)!r} holds embeddings of {name} {found.get(name)}, but this run has "
                    f"{name} {ours}: give another folder, or empty this one."
                )


def encoder_fingerprints(pipeline: Path, parts: Sequence[str], used: Sequence[str]) -> dict[str, str]:
    """Tells text encoders and tokenizers of a saved pipeline apart without loading them, in a moment even for T5-XXL.

    Hashes the first row of each weight, and configuration and tokenizer files as a whole.

    Args:
        pipeline: folder of a diffusers pipeline.
        parts: all text encoders and tokenizers that such a pipeline can have.
        used: those that encode prompts.

    Returns:
        Part of the pipeline → hash, or `none` for a part that is not there or not used.

    Raises:
        UserError: if a text encoder has no safetensors file.
    """
    return dict.fromkeys(parts, "none") | {part: _fingerprint(pipeline / part) for part in used}


def _fingerprint(folder: Path) -> str:
    if not folder.is_dir():
        return "none"
    files, rows = sorted(folder.iterdir()), {}
    for file in files:
        if _WEIGHTS.fullmatch(file.name):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(name)
                    row = part[:1] if part.get_shape() else opened.get_tensor(name)
                    rows[f"{name} {part.get_dtype()} {part.get_shape()}"] = row.flatten().view(torch.uint8).numpy()
    if folder.name.startswith("text_encoder") and not rows:
        raise UserError(f"{folder} has no model.safetensors, by which an embedding_folder knows its encoders.")
    return content_hash(
        *(name.encode() + rows[name].tobytes() for name in sorted(rows)),
        *(f.name.encode() + f.read_bytes() for f in files if f.is_file() and not f.name.endswith(_NOT_READ)),
    )
