"""Encodes prompts with the text encoders of a diffusers SD3 pipeline, once each: in memory, and in a folder if there is one.

Shape legend: B batch, L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.files import content_hash, write_atomically

TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_NOT_READ = (".safetensors", ".bin", ".msgpack", ".h5", ".index.json")  # other weights, and how they are split


@dataclass(frozen=True)
class Condition:
    """Encoded prompts: embeddings [B, L, D] and pooled [B, P]."""

    embeddings: Tensor
    pooled: Tensor

    def __getitem__(self, index: Tensor) -> Condition:
        return Condition(self.embeddings[index], self.pooled[index])

    def to(self, device: torch.device) -> Condition:
        """Move both tensors."""
        return Condition(self.embeddings.to(device), self.pooled.to(device))


class EmbeddingFolder:
    """Embeddings on disk: a safetensors file for each prompt, named by the prompt's hash, that says what made it.

    Files appear whole or not at all, so any number of processes may read and write at a time. What is read is
    memory-mapped: it takes page cache that all processes share, not memory.

    Args:
        path: the folder; made when the first file is written.
        made_by: what embeddings depend on, by name, e.g. {"dtype": "bfloat16"}.

    Raises:
        UserError: if the folder holds what something else made.
    """

    def __init__(self, path: Path, made_by: dict[str, str]) -> None:
        self.path, self.made_by = path, made_by
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
        tensors = {"embeddings": row.embeddings.contiguous(), "pooled": row.pooled.contiguous()}
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
                found = opened.metadata() or {}
                self._check(found)
                return Condition(opened.get_tensor("embeddings"), opened.get_tensor("pooled"))
        except (FileNotFoundError, SafetensorError):
            return None

    def _check(self, found: dict[str, str]) -> None:
        for name, ours in self.made_by.items():
            if found.get(name) != ours:
                raise UserError(
                    f"embedding_folder {str(self.path)!r} holds embeddings of {name} {found.get(name)}, but this run has "
                    f"{name} {ours}: give another folder, or empty this one."
                )


def encoder_fingerprints(pipeline: Path, use_t5: bool) -> dict[str, str]:
    """Tells text encoders and tokenizers of a saved pipeline apart without loading them, in a moment even for T5-XXL.

    Hashes the first row of each weight, and configuration and tokenizer files as a whole.

    Args:
        pipeline: folder of a diffusers pipeline.
        use_t5: whether its third encoder is used.

    Returns:
        Part of the pipeline -> hash, or `none` where there is no such part.
    """
    parts = TEXT_PARTS if use_t5 else [part for part in TEXT_PARTS if not part.endswith("_3")]
    return dict.fromkeys(TEXT_PARTS, "none") | {part: _fingerprint(pipeline / part) for part in parts}


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
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(rows):
        digest.update(name.encode() + rows[name].tobytes())
    for file in files:
        if file.is_file() and not file.name.endswith(_NOT_READ):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


class PromptEncoder:
    """The text encoders of a pipeline, with a cache in memory and, if wanted, one on disk.

    Args:
        load: gives a `StableDiffusion3Pipeline` with text encoders on the CPU; called when they are first needed.
        max_sequence_length: T5 tokens.
        cache_size: number of encoded prompts to keep in memory.
        offload: keep the encoders on the CPU except while they work.
        folder: where embeddings are kept and found.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        max_sequence_length: int,
        cache_size: int,
        offload: bool,
        folder: EmbeddingFolder | None = None,
    ) -> None:
        self.load, self.max_sequence_length = load, max_sequence_length
        self.cache_size, self.offload, self.folder = cache_size, offload, folder
        self.pipeline: Any = None
        self.cache: OrderedDict[str, Condition] = OrderedDict()

    def encode(self, texts: Sequence[str], device: torch.device) -> Condition:
        """Encode prompts one at a time (so that a prompt's embedding does not depend on its neighbours), with a cache."""
        unique = list(dict.fromkeys(texts))
        rows = {text: row for text in unique if (row := self._known(text)) is not None}
        rows |= self._encode([text for text in unique if text not in rows], device)
        for text, row in rows.items():
            self.cache[text] = row
            self.cache.move_to_end(text)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)
        embeddings, pooled = (torch.cat([getattr(rows[t], n) for t in unique]) for n in ("embeddings", "pooled"))
        places = {text: i for i, text in enumerate(unique)}
        return Condition(embeddings, pooled).to(device)[torch.tensor([places[t] for t in texts], device=device)]

    def encode_ahead(self, texts: Sequence[str], device: torch.device, advance: Callable[[int], Any]) -> None:
        """Put what it lacks of these prompts into the folder, then free the encoders.

        Args:
            texts: each prompt once.
            device: where to encode.
            advance: called with the number of prompts that were found or encoded.

        Raises:
            UserError: if the folder cannot be written to.
        """
        assert self.folder is not None
        lacking = [text for text in texts if self.folder.read(text) is None]
        advance(len(texts) - len(lacking))
        for _ in self._encode(lacking, device):
            advance(1)
        self.pipeline = None

    def _known(self, text: str) -> Condition | None:
        if text in self.cache or self.folder is None:
            return self.cache.get(text)
        return self.folder.read(text)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str], device: torch.device) -> Iterator[tuple[str, Condition]]:
        if not texts:
            return
        if self.pipeline is None:
            self.pipeline = self.load()
        names = [name for name in TEXT_PARTS if name.startswith("text_encoder")]
        found = [getattr(self.pipeline, name) for name in names if getattr(self.pipeline, name) is not None]
        encoders = [encoder.eval().requires_grad_(False).to(device) for encoder in found]
        try:
            for text in texts:
                with torch.autocast(device.type, enabled=False):  # an embedding depends on no caller's precision
                    embeddings, _, pooled, _ = self.pipeline.encode_prompt(
                        text, None, None, do_classifier_free_guidance=False,
                        max_sequence_length=self.max_sequence_length, device=device,
                    )  # fmt: skip
                row = Condition(embeddings, pooled).to(torch.device("cpu"))
                if self.folder is not None:
                    self.folder.write(text, row)
                yield text, row
        finally:
            for encoder in encoders if self.offload else []:
                encoder.to("cpu")
