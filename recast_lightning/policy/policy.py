"""A diffusers SD3 pipeline with LoRA adapters.

Shape legend: B batch, C H W latents; noise levels ascend from clean to noisy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recast_lightning.flow import sample_ode
from recast_lightning.policy.adapters import LORA_TARGETS, Adapter, Adapters
from recast_lightning.policy.embeddings import Condition, PromptEncoder


class Policy(nn.Module):
    """A text-to-image policy with adapters `default` (trained), `old` (samples), `ema` (evaluated); none is the reference.

    Construction is cheap; `load` reads the weights. Only the transformer is a submodule: text encoders and VAE are frozen
    helpers that stay out of optimizers and checkpoints.

    Args:
        path: folder or hub id of a `StableDiffusion3Pipeline`, or `signboard:base` for the embedded one.
        height: picture height in pixels.
        width: picture width in pixels.
        num_steps: T, sampling steps, which are also the levels that are trained at.
        solver: `dpm2` (DPM-Solver++ 2M) or `euler`, on the scheduler's own grid.
        lora_rank: rank of the adapters.
        lora_alpha: scale of the adapters.
        lora_targets: modules that get adapters, by the end of their name.
        max_sequence_length: T5 tokens. Without T5, diffusers puts as many zero embeddings in their place; 0 leaves them out.
        use_t5: whether to load T5 where the pipeline has one.
        offload_frozen: keep text encoders and VAE on the CPU except while they work.
        dtype: of the frozen weights; adapters are float32.
        gradient_checkpointing: trade compute for memory in the trained pass.
        embedding_cache: number of encoded prompts to keep.
    """

    def __init__(
        self,
        path: str = "signboard:base",
        height: int = 64,
        width: int = 64,
        num_steps: int = 10,
        solver: Literal["dpm2", "euler"] = "dpm2",
        lora_rank: int = 32,
        lora_alpha: int = 64,
        lora_targets: Sequence[str] = LORA_TARGETS,
        max_sequence_length: int = 0,
        use_t5: bool = True,
        offload_frozen: bool = False,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        gradient_checkpointing: bool = False,
        embedding_cache: int = 4096,
    ) -> None:
        super().__init__()
        if num_steps < 2:
            raise ValueError(
                f"num_steps must be at least 2, got {num_steps}: credit in time needs more than one level."
            )
        if lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {lora_rank}.")
        self.path, self.height, self.width = path, height, width
        self.num_steps, self.solver = num_steps, solver
        self.lora_rank, self.lora_alpha, self.lora_targets = lora_rank, lora_alpha, tuple(lora_targets)
        self.max_sequence_length, self.use_t5, self.offload_frozen = max_sequence_length, use_t5, offload_frozen
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.gradient_checkpointing, self.embedding_cache = gradient_checkpointing, embedding_cache
        self._helpers: dict[str, Any] = {}

    def validate(self) -> None:
        """Check the path without loading anything.

        Raises:
            ValueError: if a local path is missing or is not an SD3 pipeline, or its T5 would get no tokens.
        """
        from recast_lightning.paths import resolve

        folder = Path(resolve(self.path, "policy"))
        if folder.is_dir() and not (folder / "model_index.json").is_file():
            raise ValueError(
                f"Policy path {self.path!r} has no model_index.json: it must be a saved diffusers pipeline."
            )
        if self.use_t5 and self.max_sequence_length < 1 and _has_t5(str(folder)):
            raise ValueError(
                f"max_sequence_length is {self.max_sequence_length}, but {self.path!r} has T5: "
                "give 128 to 256, or use_t5: false."
            )

    def load(self, seed: int = 0) -> None:
        """Load the pipeline and add adapters whose first weights are keyed by `seed`. Does nothing the second time."""
        if self._helpers:
            return
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # before diffusers is imported: it asks for processors we do not use
        transformers_logging.disable_progress_bar()
        from diffusers import StableDiffusion3Pipeline
        from diffusers.utils import logging

        from recast_lightning.paths import resolve

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path = resolve(self.path, "policy")
        absent = {} if self.use_t5 and _has_t5(path) else {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = StableDiffusion3Pipeline.from_pretrained(path, dtype=self.dtype, **absent)
        self.transformer = pipeline.transformer
        self.adapters = Adapters(self.transformer, self.lora_rank, self.lora_alpha, self.lora_targets, seed)
        if self.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        encoder = PromptEncoder(pipeline, self.max_sequence_length, self.embedding_cache, self.offload_frozen)
        pipeline.scheduler.set_timesteps(self.num_steps)
        self.sigmas = pipeline.scheduler.sigmas.flip(0).double().cpu()
        self._helpers = {"vae": pipeline.vae.eval().requires_grad_(False), "encoder": encoder}

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.transformer.parameters()).device

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one latent."""
        scale = 2 ** (len(self._helpers["vae"].config.block_out_channels) - 1)
        return self.transformer.config.in_channels, self.height // scale, self.width // scale

    def adapter(self, name: Adapter | None) -> AbstractContextManager[None]:
        """See `Adapters.use`."""
        return self.adapters.use(name)

    def adapter_parameters(self, name: Adapter) -> list[nn.Parameter]:
        """The weights of one adapter, in the same order for every adapter."""
        return self.adapters.parameters(name)

    def blend(self, target: Adapter, source: Adapter, keep: float) -> None:
        """θ_target ← keep·θ_target + (1 − keep)·θ_source."""
        self.adapters.blend(target, source, keep)

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Velocity v [B, C, H, W] (float32) at x_σ [B, C, H, W], σ [B]."""
        velocity: Tensor = self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=condition.embeddings,
            pooled_projections=condition.pooled,
            return_dict=False,
        )[0]
        return velocity.float()

    def sample(self, noise: Tensor, condition: Condition, adapter: Adapter | None) -> Tensor:
        """Latents x_0 [B, C, H, W] from noise, without classifier-free guidance."""

        def velocity(x: Tensor, sigma: Tensor, index: Tensor) -> Tensor:
            return self(x, sigma, condition)

        with self.adapter(adapter):
            return sample_ode(velocity, noise, self.sigmas, solver=self.solver)

    def encode_prompts(self, texts: Sequence[str]) -> Condition:
        """Encoded prompts, on the transformer's device."""
        with torch.autocast(self.device.type, enabled=False):  # cached for callers with and without
            condition: Condition = self._helpers["encoder"].encode(texts, self.device)
        return condition

    @contextmanager
    def _vae(self) -> Iterator[Any]:
        vae = self._helpers["vae"].to(self.device)
        try:
            with torch.autocast(self.device.type, enabled=False):  # pictures are the same wherever they are decoded
                yield vae
        finally:
            if self.offload_frozen:
                vae.to("cpu")

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, height, width] in [0, 1] (float32) of latents [B, C, H, W]."""
        with self._vae() as vae:
            z = latents / vae.config.scaling_factor + vae.config.shift_factor
            images: Tensor = vae.decode(z.to(self.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents [B, C, H, W] (float32, the posterior's mode) of images [B, 3, height, width] in [0, 1]."""
        with self._vae() as vae:
            z = vae.encode((images * 2 - 1).to(self.device, self.dtype)).latent_dist.mode()
        return (z.float() - vae.config.shift_factor) * vae.config.scaling_factor

    def save_lora(self, folder: Path, adapter: Adapter = "ema") -> None:
        """See `Adapters.save`."""
        self.adapters.save(folder, adapter)


def _has_t5(path: str) -> bool:
    """Whether a pipeline comes with T5; a hub id is taken to be complete, as SD3.5 is."""
    index = Path(path) / "model_index.json"
    return not index.is_file() or json.loads(index.read_text()).get("text_encoder_3", [None])[0] is not None
