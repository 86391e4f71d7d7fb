"""Encodes prompts with a pipeline's text encoders, once each: kept in memory, and in a folder if there is one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recast_lightning.policy.condition import Condition
from recast_lightning.policy.embedding_folder import EmbeddingFolder
from recast_lightning.policy.families import Family


class PromptEncoder:
    """The text encoders of a pipeline, with a cache in memory and, if wanted, one on disk.

    Args:
        family: of the pipeline.
        load: gives the pipeline with text encoders on the CPU; called when they are first needed.
        cache_size: number of encoded prompts to keep in memory.
        offload: keep the encoders on the CPU except while they work.
        folder: where embeddings are kept and found.
    """

    def __init__(
        self,
        family: Family,
        load: Callable[[], Any],
        cache_size: int,
        offload: bool,
        folder: EmbeddingFolder | None = None,
    ) -> None:
        self.family, self.load = family, load
        self.cache_size, self.offload, self.folder = cache_size, offload, folder
        self.pipeline: Any = None
        self.cache: OrderedDict[str, Condition] = OrderedDict()

    def encode(self, texts: Sequence[str], device: torch.device) -> Condition:
        """Encode prompts one at a time (so that a prompt's embedding does not depend on its neighbours), with a cache."""
        unique = list(dict.fromkeys(texts))
        rows = {text: row for text in unique if (row := self._cached(text)) is not None}
        rows |= self._encode([text for text in unique if text not in rows], device)
        for text, row in rows.items():
            self.cache[text] = row
            self.cache.move_to_end(text)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)
        places = {text: i for i, text in enumerate(unique)}
        condition = Condition.stack([rows[text] for text in unique]).to(device)
        return condition[torch.tensor([places[text] for text in texts], device=device)]

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

    def _cached(self, text: str) -> Condition | None:
        if text in self.cache or self.folder is None:
            return self.cache.get(text)
        return self.folder.read(text)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str], device: torch.device) -> Iterator[tuple[str, Condition]]:
        if not texts:
            return
        if self.pipeline is None:
            self.pipeline = self.load()
        names = [part for part in self.family.used_text_parts if part.startswith("text_encoder")]
        encoders = [getattr(self.pipeline, name).eval().requires_grad_(False).to(device) for name in names]
        try:
            for text in texts:
                with torch.autocast(device.type, enabled=False):  # an embedding depends on no caller's precision
                    row = self.family.encode_prompt(self.pipeline, text, device).to(torch.device("cpu"))
                if self.folder is not None:
                    self.folder.write(text, row)
                yield text, row
        finally:
            for encoder in encoders if self.offload else []:
                encoder.to("cpu")
