"""FLUX.1: T5 by token and CLIP pooled; latents packed by twos; two kinds of blocks; embedded guidance, dynamic shift."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.policy.condition import Condition
from recast_lightning.policy.families.base import ATTENTION, Family, dynamic_shift
from recast_lightning.policy.pipeline_folder import PipelineFolder

MOST_TOKENS = 512


class Flux(Family):
    """Prompts become `embeddings` [B, L, D] of T5, padded to L without a mask as in training, and CLIP's `pooled` [B, P]."""

    name = "flux"
    pipelines = ("FluxPipeline",)
    text_parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    lora_targets = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def choose_text(
        self, pipeline: PipelineFolder, max_sequence_length: int | None, use_t5: bool
    ) -> tuple[tuple[str, ...], int]:
        if not use_t5:
            raise UserError(f"use_t5 is false, but {self.path!r} reads prompts by T5 alone: leave it out.")
        tokens = MOST_TOKENS if max_sequence_length is None else max_sequence_length
        if not 1 <= tokens <= MOST_TOKENS:
            raise UserError(
                f"max_sequence_length is {tokens}, but {self.path!r} takes 1 to {MOST_TOKENS} tokens of T5."
            )
        return self.text_parts, tokens

    @property
    def own_guidance(self) -> float | None:
        return 3.5 if self.transformer_config["guidance_embeds"] else None

    def encode_prompt(self, pipeline: Any, text: str, device: Any) -> Condition:
        embeddings, pooled, _ = pipeline.encode_prompt(
            text, device=device, max_sequence_length=self.max_sequence_length
        )
        return Condition({"embeddings": embeddings, "pooled": pooled})

    def velocity(self, transformer: Any, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        embeddings = condition.tensors["embeddings"]
        height, width = x.shape[2] // 2, x.shape[3] // 2
        packed = transformer(
            hidden_states=pack(x),
            timestep=sigma,
            guidance=None if self.guidance is None else torch.full_like(sigma, self.guidance),
            encoder_hidden_states=embeddings,
            pooled_projections=condition.tensors["pooled"],
            txt_ids=torch.zeros(embeddings.shape[1], 3, device=x.device),
            img_ids=places(height, width, x.device),
            return_dict=False,
        )[0]
        return unpack(packed, height, width)

    def sigmas(self, scheduler: Any, num_steps: int, height: int, width: int) -> Tensor:
        unit = self.sides[0]
        even = np.linspace(1, 1 / num_steps, num_steps)  # unlike SD3's, they end at 1 / num_steps before the shift
        scheduler.set_timesteps(sigmas=even, **dynamic_shift(scheduler, (height // unit) * (width // unit)))
        sigmas: Tensor = scheduler.sigmas
        return sigmas

    @property
    def sides(self) -> tuple[int, int | None]:
        return 2 * self.vae_scale, None


def pack(x: Tensor) -> Tensor:
    """Squares of 2 × 2 latents as tokens: [B, C, H, W] → [B, H/2 · W/2, 4 C]."""
    batch, channels, height, width = x.shape
    squares = x.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack` for height × width tokens."""
    squares = tokens.reshape(len(tokens), height, width, -1, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 2 * height, 2 * width)


def places(height: int, width: int, device: torch.device) -> Tensor:
    """(0, row, column) of each token, [height · width, 3]."""
    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()
