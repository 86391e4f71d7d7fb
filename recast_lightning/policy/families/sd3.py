"""Stable Diffusion 3 and 3.5: two CLIPs, pooled and by token, and T5; latents as they are; real guidance only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.policy.condition import Condition
from recast_lightning.policy.families.base import ATTENTION, Family, dynamic_shift
from recast_lightning.policy.pipeline_folder import PipelineFolder


class SD3(Family):
    """Prompts become `embeddings` [B, L, D], CLIP's tokens before T5's, and `pooled` [B, P]."""

    name = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    text_parts = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    block_lists = ("transformer_blocks",)
    lora_targets = ATTENTION

    def choose_text(
        self, pipeline: PipelineFolder, max_sequence_length: int | None, use_t5: bool
    ) -> tuple[tuple[str, ...], int]:
        with_t5 = use_t5 and pipeline.has("text_encoder_3")
        if with_t5 and max_sequence_length == 0:
            raise UserError(f"max_sequence_length is 0, but {self.path!r} has T5: give 128 to 256, or use_t5: false.")
        parts = tuple(part for part in self.text_parts if with_t5 or not part.endswith("_3"))
        tokens = 256 if with_t5 else 0  # without T5, diffusers puts as many zero embeddings in its place
        return parts, tokens if max_sequence_length is None else max_sequence_length

    def encode_prompt(self, pipeline: Any, text: str, device: Any) -> Condition:
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            text, None, None, do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length, device=device,
        )  # fmt: skip
        return Condition({"embeddings": embeddings, "pooled": pooled})

    def velocity(self, transformer: Any, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        velocity: Tensor = transformer(
            hidden_states=x,
            timestep=1000 * sigma,
            encoder_hidden_states=condition.tensors["embeddings"],
            pooled_projections=condition.tensors["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def sigmas(self, scheduler: Any, num_steps: int, height: int, width: int) -> Tensor:
        unit = self.sides[0]
        scheduler.set_timesteps(num_steps, **dynamic_shift(scheduler, (height // unit) * (width // unit)))
        sigmas: Tensor = scheduler.sigmas
        return sigmas

    @property
    def sides(self) -> tuple[int, int | None]:
        unit = self.vae_scale * self.transformer_config["patch_size"]
        return unit, unit * self.transformer_config["pos_embed_max_size"]
