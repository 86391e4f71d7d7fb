"""A diffusers SD3 pipeline with LoRA adapters.

Shape legend: B batch, C H W latents; noise levels ascend from clean to noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recast_lightning.flow.ode import sample_ode
from recast_lightning.policy.adapters import LORA_TARGETS, Adapter, Adapters, base_digest, compile_each
from recast_lightning.policy.embeddings import (
    TEXT_PARTS,
    Condition,
    EmbeddingFolder,
    PromptEncoder,
    encoder_fingerprints,
)
from recast_lightning.policy.files import check_lora_targets, check_picture_size, has_t5
from recast_lightning.policy.sharding import shard, whole
from recast_lightning.ranges import check_ranges

RANGES = {
    "lora_rank": "[1, inf)",
    "lora_alpha": "(0, inf)",
    "max_sequence_length": "[0, inf)",
    "embedding_cache": "[0, inf)",
}


class Policy(nn.Module):
    """A text-to-image policy with adapters `default` (trained), `old` (samples), `ema` (evaluated); none is the reference.

    Construction is cheap; `load` reads the weights. Only the transformer is a submodule: text encoders and VAE are frozen
    helpers that stay out of optimizers and checkpoints. The `state_dict` has the adapters, not the base.

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
        embedding_cache: number of encoded prompts to keep in memory.
        embedding_folder: keep encoded prompts on disk here, for this run and later ones; default in memory only.
        compile_blocks: compile the transformer's blocks (`torch.compile`), anew for each adapter and mode.
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
        embedding_folder: str | None = None,
        compile_blocks: bool = False,
    ) -> None:
        super().__init__()
        if num_steps < 2:
            raise ValueError(
                f"num_steps must be at least 2, got {num_steps}: credit in time needs more than one level."
            )
        if not lora_targets:
            raise ValueError("lora_targets is empty: name at least one module, as the default does.")
        self.path, self.height, self.width = path, height, width
        self.num_steps, self.solver = num_steps, solver
        self.lora_rank, self.lora_alpha, self.lora_targets = lora_rank, lora_alpha, tuple(lora_targets)
        self.max_sequence_length, self.use_t5, self.offload_frozen = max_sequence_length, use_t5, offload_frozen
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.gradient_checkpointing = gradient_checkpointing
        self.embedding_cache, self.embedding_folder = embedding_cache, embedding_folder
        self.compile_blocks, self.sharded = compile_blocks, False
        self._helpers: dict[str, Any] = {}
        self.register_state_dict_post_hook(_keep_adapters)
        check_ranges(vars(self), RANGES)

    def validate(self) -> None:
        """Check the path without loading anything.

        Raises:
            ValueError: if a local path is missing or is not an SD3 pipeline, does not fit picture size and adapters, its T5
                would get no tokens, or `embedding_folder` holds what other encoders made.
        """
        from recast_lightning.paths import resolve

        folder = Path(resolve(self.path, "policy"))
        if folder.is_dir() and not (folder / "model_index.json").is_file():
            raise ValueError(
                f"Policy path {self.path!r} has no model_index.json: it must be a saved diffusers pipeline."
            )
        check_picture_size(folder, self.height, self.width)
        check_lora_targets(folder, self.lora_targets)
        if self.use_t5 and self.max_sequence_length < 1 and has_t5(folder):
            raise ValueError(
                f"max_sequence_length is {self.max_sequence_length}, but {self.path!r} has T5: "
                "give 128 to 256, or use_t5: false."
            )
        if self.embedding_folder is not None and folder.is_dir():
            self._open_folder(folder)

    def load(self, seed: int = 0) -> None:
        """Load the pipeline and add adapters whose first weights are keyed by `seed`. Does nothing the second time."""
        if self._helpers:
            return
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # before diffusers is imported: it asks for processors we do not use
        transformers_logging.disable_progress_bar()
        from diffusers import StableDiffusion3Pipeline
        from diffusers.utils import logging

        from recast_lightning.paths import reading, resolve

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path = resolve(self.path, "policy")
        absent = {} if self.use_t5 and has_t5(Path(path)) else {"text_encoder_3": None, "tokenizer_3": None}
        with reading("The policy found no SD3 pipeline", path):
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                path, dtype=self.dtype, use_safetensors=True, **dict.fromkeys(TEXT_PARTS)
            )
        self.transformer = pipeline.transformer
        self._base_digest = base_digest(self.transformer)
        self.adapters = Adapters(self.transformer, self.lora_rank, self.lora_alpha, self.lora_targets, seed)
        if self.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if self.compile_blocks:
            compile_each(self.transformer.transformer_blocks)

        def load_encoders() -> Any:
            with reading("The policy found no text encoders", path):
                encoders = StableDiffusion3Pipeline.from_pretrained(
                    path, dtype=self.dtype, use_safetensors=True, transformer=None, vae=None, **absent
                )
            encoders.register_modules(transformer=self.transformer)  # zeros in T5's place take their width from it
            return encoders

        folder = None
        if self.embedding_folder is not None:
            with reading("The policy found no text encoders", path):
                local = path if Path(path).is_dir() else StableDiffusion3Pipeline.download(path, **absent)
            folder = self._open_folder(Path(local))
        encoder = PromptEncoder(
            load_encoders, self.max_sequence_length, self.embedding_cache, self.offload_frozen, folder
        )
        pipeline.scheduler.set_timesteps(self.num_steps)
        self.sigmas = pipeline.scheduler.sigmas.flip(0).double().cpu()
        self._helpers = {"vae": pipeline.vae.eval().requires_grad_(False), "encoder": encoder}

    def shard(self, mesh: Any) -> None:
        """Share the loaded transformer out over a device mesh (FSDP2). Does nothing without one, and the second time."""
        if mesh is not None and not self.sharded:
            shard(self.transformer, mesh)
            self.sharded = True

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
        condition: Condition = self._helpers["encoder"].encode(texts, self.device)
        return condition

    def encode_ahead(self, texts: Sequence[str], advance: Callable[[int], Any]) -> None:
        """See `PromptEncoder.encode_ahead`; needs an `embedding_folder`."""
        self._helpers["encoder"].encode_ahead(texts, self.device, advance)

    def has_embedding(self, text: str) -> bool:
        """Whether a prompt's embedding is in the `embedding_folder`."""
        return text in self._helpers["encoder"].folder

    def _open_folder(self, pipeline: Path) -> EmbeddingFolder:
        assert self.embedding_folder is not None
        settings = {"max_sequence_length": str(self.max_sequence_length), "dtype": str(self.dtype).split(".")[1]}
        return EmbeddingFolder(
            Path(self.embedding_folder),
            settings | encoder_fingerprints(pipeline, self.use_t5 and has_t5(pipeline)),
        )

    def _no_autocast(self) -> AbstractContextManager[None]:
        """The VAE computes alike wherever it is called, inside autocast or not."""
        return torch.autocast(self.device.type, enabled=False)

    @contextmanager
    def _vae(self) -> Iterator[Any]:
        vae = self._helpers["vae"].to(self.device)
        try:
            with self._no_autocast():
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

    def save_lora(self, folder: Path, adapter: Adapter = "ema", write: bool = True) -> None:
        """See `Adapters.save`. A collective call where the transformer is sharded: one process has `write` true."""
        self.adapters.save(folder, adapter, write)

    @property
    def base_fingerprint(self) -> str:
        """Tells bases apart: a hash of a few numbers of each weight."""
        return self._base_digest.hexdigest()

    def fingerprint(self) -> str:
        """Tells policies apart: a hash of the trained adapter and of a few numbers of each weight of the base, as loaded.

        A collective call where the transformer is sharded; the same however it runs.
        """
        digest = self._base_digest.copy()
        for weight in self.adapter_parameters("default"):
            digest.update(whole(weight).float().numpy().tobytes())
        return digest.hexdigest()


def _keep_adapters(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and ".lora_" not in name]:
        del state[name]
