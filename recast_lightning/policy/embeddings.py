"""Encodes prompts with the text encoders of a diffusers SD3 pipeline.

Shape legend: B batch, L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


class PromptEncoder:
    """The text encoders of a pipeline, with a cache.

    Args:
        pipeline: a `StableDiffusion3Pipeline`; its encoders are used where they are or moved to `encode`'s device.
        max_sequence_length: T5 tokens.
        cache_size: number of encoded prompts to keep.
        offload: keep the encoders on the CPU except while they work.
    """

    def __init__(self, pipeline: Any, max_sequence_length: int, cache_size: int, offload: bool) -> None:
        self.pipeline, self.max_sequence_length = pipeline, max_sequence_length
        self.cache_size, self.offload = cache_size, offload
        found = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
        self.encoders = [encoder.eval().requires_grad_(False) for encoder in found if encoder is not None]
        self.cache: OrderedDict[str, Condition] = OrderedDict()

    def encode(self, texts: Sequence[str], device: torch.device) -> Condition:
        """Encode prompts one at a time (so that a prompt's embedding does not depend on its neighbours), with a cache."""
        missing = [text for text in dict.fromkeys(texts) if text not in self.cache]
        rows = {text: self.cache[text] for text in texts if text in self.cache} | self._encode(missing, device)
        for text, row in rows.items():
            self.cache[text] = row
            self.cache.move_to_end(text)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)
        embeddings = torch.cat([rows[text].embeddings for text in texts])
        return Condition(embeddings, torch.cat([rows[text].pooled for text in texts])).to(device)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str], device: torch.device) -> dict[str, Condition]:
        rows = {}
        for encoder in self.encoders if texts else []:
            encoder.to(device)
        for text in texts:
            embeddings, _, pooled, _ = self.pipeline.encode_prompt(
                text, None, None, do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length, device=device,
            )  # fmt: skip
            rows[text] = Condition(embeddings, pooled).to(torch.device("cpu"))
        for encoder in self.encoders if self.offload else []:
            encoder.to("cpu")
        return rows
