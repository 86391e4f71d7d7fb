"""The policy: a diffusers SD3 pipeline with LoRA adapters. The only file that knows diffusers and peft.

Shape legend: B batch, L text tokens, D text width, P pooled width, C H W latents; noise levels ascend from clean to noisy.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recast_lightning.flow import sample_ode
from recast_lightning.seeds import derive_seed

Adapter = Literal["default", "old", "ema"]
ADAPTERS: tuple[Adapter, ...] = ("old", "ema", "default")  # diffusers trains the one added last
LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip


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
        self._cache: OrderedDict[str, Condition] = OrderedDict()

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
        pipeline.transformer.requires_grad_(False)
        self.transformer = pipeline.transformer
        self._add_adapters(seed)
        if self.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        for name in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
            if getattr(pipeline, name) is not None:
                getattr(pipeline, name).eval().requires_grad_(False)
        pipeline.scheduler.set_timesteps(self.num_steps)
        self.sigmas = pipeline.scheduler.sigmas.flip(0).double().cpu()
        self._helpers = {"pipeline": pipeline, "vae": pipeline.vae}

    def _add_adapters(self, seed: int) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        config = LoraConfig(
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,
            init_lora_weights="gaussian",
            target_modules=list(self.lora_targets),
        )
        with torch.random.fork_rng(devices=[]):
            for name in ADAPTERS:  # the same seed: all three start equal
                torch.manual_seed(derive_seed(seed, "lora"))
                self.transformer.add_adapter(config, name)
        self._layers: list[Any] = [m for m in self.transformer.modules() if isinstance(m, LoraLayer)]
        for name, parameter in self.transformer.named_parameters():
            parameter.requires_grad_(".default." in name)
            if ".lora_" in name:
                parameter.data = parameter.data.float()

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.transformer.parameters()).device

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one latent."""
        scale = 2 ** (len(self._helpers["vae"].config.block_out_channels) - 1)
        return self.transformer.config.in_channels, self.height // scale, self.width // scale

    @contextmanager
    def adapter(self, name: Adapter | None) -> Iterator[None]:
        """Use another adapter (None: the frozen reference) for forwards without gradients.

        It touches neither `requires_grad` (peft's `set_adapter` does, which starves gradients) nor a forward that backward
        has yet to recompute: leave the block before the trained forward.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        for layer in self._layers:
            layer._disable_adapters = name is None
            layer._active_adapter = [name or "default"]
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def adapter_parameters(self, name: Adapter) -> list[nn.Parameter]:
        """The weights of one adapter, in the same order for every adapter."""
        return [p for n, p in self.transformer.named_parameters() if f".{name}." in n]

    @torch.no_grad()
    def blend(self, target: Adapter, source: Adapter, keep: float) -> None:
        """θ_target ← keep·θ_target + (1 − keep)·θ_source."""
        for p, q in zip(self.adapter_parameters(target), self.adapter_parameters(source), strict=True):
            p.lerp_(q, 1 - keep)

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
        """Encode prompts one at a time (so that a prompt's embedding does not depend on its neighbours), with a cache."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._cache]
        rows = {text: self._cache[text] for text in texts if text in self._cache} | self._encode(missing)
        for text, row in rows.items():
            self._cache[text] = row
            self._cache.move_to_end(text)
        while len(self._cache) > self.embedding_cache:
            self._cache.popitem(last=False)
        embeddings = torch.cat([rows[text].embeddings for text in texts])
        return Condition(embeddings, torch.cat([rows[text].pooled for text in texts])).to(self.device)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> dict[str, Condition]:
        pipeline = self._helpers["pipeline"]
        encoders = [
            e for e in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3) if e is not None
        ]
        rows = {}
        for encoder in encoders if texts else []:
            encoder.to(self.device)
        for text in texts:
            embeddings, _, pooled, _ = pipeline.encode_prompt(
                text, None, None, do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length, device=self.device,
            )  # fmt: skip
            rows[text] = Condition(embeddings, pooled).to(torch.device("cpu"))
        for encoder in encoders if self.offload_frozen else []:
            encoder.to("cpu")
        return rows

    @contextmanager
    def _vae(self) -> Iterator[Any]:
        vae = self._helpers["vae"].to(self.device)
        try:
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
        """Write an adapter as `pytorch_lora_weights.safetensors` that diffusers' `load_lora_weights` reads, scale included."""
        from diffusers import StableDiffusion3Pipeline
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(self.transformer, adapter_name=adapter)
        config = self.transformer.peft_config[adapter].to_dict()
        metadata = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
        StableDiffusion3Pipeline.save_lora_weights(
            folder,
            transformer_lora_layers={k: v.contiguous().cpu() for k, v in weights.items()},
            transformer_lora_adapter_metadata=metadata,
        )


def _has_t5(path: str) -> bool:
    """Whether a pipeline comes with T5; a hub id is taken to be complete, as SD3.5 is."""
    index = Path(path) / "model_index.json"
    return not index.is_file() or json.loads(index.read_text()).get("text_encoder_3", [None])[0] is not None
