"""A flow-matching text-to-image pipeline of diffusers with LoRA adapters.

Shape legend: B batch, C H W latents; noise levels ascend from clean to noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recast_lightning.files import content_hash
from recast_lightning.flow.ode import sample_ode
from recast_lightning.paths import resolve
from recast_lightning.policy.condition import Condition
from recast_lightning.policy.embedding_folder import EmbeddingFolder, encoder_fingerprints
from recast_lightning.policy.families import Family, family_of
from recast_lightning.policy.loading import PipelineLoader
from recast_lightning.policy.lora import Adapter, Adapters, compile_blocks, sample_of_weights
from recast_lightning.policy.pipeline_folder import PipelineFolder, check_lora_targets, check_sides, fetch_index
from recast_lightning.policy.prompt_encoder import PromptEncoder
from recast_lightning.policy.sharding import gathered, shard
from recast_lightning.ranges import check_ranges

RANGES = {
    "lora_rank": "[1, inf)",
    "lora_alpha": "(0, inf)",
    "max_sequence_length": "[0, inf)",
    "guidance": "[0, inf)",
    "embedding_cache": "[0, inf)",
}


class Policy(nn.Module):
    """A text-to-image policy with adapters `default` (trained), `old` (samples), `ema` (evaluated); none is the reference.

    Construction is cheap; `load` reads the weights. Only the transformer is a submodule: text encoders and VAE are frozen
    helpers that stay out of optimizers and checkpoints. The `state_dict` has the adapters, not the base.

    Args:
        path: folder or hub id of a diffusers pipeline of a served family (SD3, FLUX.1), or `signboard:base` for the
            embedded one.
        height: picture height in pixels.
        width: picture width in pixels.
        num_steps: T, sampling steps, which are also the levels that are trained at.
        solver: `dpm2` (DPM-Solver++ 2M) or `euler`, on the scheduler's own grid.
        lora_rank: rank of the adapters.
        lora_alpha: scale of the adapters.
        lora_targets: modules that get adapters, by the end of their name; default the family's.
        max_sequence_length: T5 tokens; default 256 for SD3 with T5, 512 for FLUX, 0 without T5, in whose place diffusers puts
            as many zero embeddings.
        use_t5: whether to load T5 where the pipeline has one and does without.
        guidance: scale of an embedded guidance, for a model that has one; default 3.5 for FLUX.
        offload_frozen: keep text encoders and VAE on the CPU except while they work.
        dtype: of the frozen transformer and text encoders; adapters are float32.
        vae_dtype: of the VAE.
        gradient_checkpointing: trade compute for memory in the trained pass.
        embedding_cache: number of encoded prompts to keep in memory.
        embedding_folder: keep encoded prompts on disk here, for this run and later ones; default in memory only.
        compile_blocks: compile the transformer's blocks (`torch.compile`), anew for each adapter and mode.
    """

    family: Family  # from `load` on
    transformer: Any

    def __init__(
        self,
        path: str = "signboard:base",
        height: int = 64,
        width: int = 64,
        num_steps: int = 10,
        solver: Literal["dpm2", "euler"] = "dpm2",
        lora_rank: int = 32,
        lora_alpha: int = 64,
        lora_targets: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
        use_t5: bool = True,
        guidance: float | None = None,
        offload_frozen: bool = False,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
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
        if lora_targets is not None and not lora_targets:
            raise ValueError("lora_targets is empty: name at least one module, or leave it out.")
        self.path, self.height, self.width = path, height, width
        self.num_steps, self.solver = num_steps, solver
        self.lora_rank, self.lora_alpha, self._lora_targets = lora_rank, lora_alpha, tuple(lora_targets or ())
        self.max_sequence_length, self.use_t5, self.guidance = max_sequence_length, use_t5, guidance
        self.offload_frozen = offload_frozen
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.vae_dtype: torch.dtype = getattr(torch, vae_dtype)
        self.gradient_checkpointing = gradient_checkpointing
        self.embedding_cache, self.embedding_folder = embedding_cache, embedding_folder
        self.compile_blocks, self.sharded = compile_blocks, False
        self._helpers: dict[str, Any] = {}
        self.register_state_dict_post_hook(_drop_all_but_adapters)
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_ranges(given, {name: interval for name, interval in RANGES.items() if name in given})

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Modules that get adapters; empty while they are the family's and the pipeline is not on this machine yet."""
        if self._lora_targets:
            return self._lora_targets
        pipeline = PipelineFolder.find(self.path)
        return family_of(pipeline).lora_targets if pipeline else ()

    def validate(self) -> None:
        """Check path and options without loading anything; for a hub id that is not in the local cache, `load` does it.

        Raises:
            ValueError: if a local path is missing or is no pipeline of a served family, or does not fit picture size,
                adapters, T5 tokens or guidance, or `embedding_folder` holds what other encoders made.
        """
        pipeline = PipelineFolder.find(self.path)
        if pipeline is None:
            return
        family = self._fitting_family(pipeline)
        if self.embedding_folder is not None and Path(resolve(self.path, "policy")).is_dir():
            self._open_folder(family, pipeline.folder)

    def _fitting_family(self, pipeline: PipelineFolder) -> Family:
        family = family_of(pipeline)(pipeline, self.max_sequence_length, self.use_t5, self.guidance)
        check_sides(self.path, self.height, self.width, *family.sides)
        check_lora_targets(pipeline, self._lora_targets or family.lora_targets)
        return family

    def load(self, seed: int = 0) -> None:
        """Load the pipeline and add adapters whose first weights are keyed by `seed`. Does nothing the second time.

        Raises:
            UserError: if the pipeline is neither here nor on the hub; and what `validate` could not check.
        """
        if self._helpers:
            return
        found = PipelineFolder.find(self.path) or fetch_index(self.path)
        loader = PipelineLoader(resolve(self.path, "policy"), found.pipeline_class, self.dtype, self.vae_dtype)
        pipeline = loader.load("pipeline", without=family_of(found).text_parts)
        found = PipelineFolder.find(self.path) or found  # now with all files that are checked, from the hub, too
        self.family = self._fitting_family(found)
        self.transformer = pipeline.transformer
        self._told_apart_by = sample_of_weights(self.transformer)
        if self.family.guidance is not None:
            self._told_apart_by += f"guidance {self.family.guidance:g}".encode()
        targets = self._lora_targets or self.family.lora_targets
        self.adapters = Adapters(self.transformer, self.lora_rank, self.lora_alpha, targets, seed)
        if self.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if self.compile_blocks:
            compile_blocks(self.family.blocks(self.transformer))
        with torch.device("cpu"):
            self.sigmas = self.family.levels(pipeline.scheduler, self.num_steps, self.height, self.width)
        self._helpers = {
            "vae": pipeline.vae.eval().requires_grad_(False),
            "encoder": self._prompt_encoder(loader),
            "loader": loader,
        }

    def _prompt_encoder(self, loader: PipelineLoader) -> PromptEncoder:
        unused = [part for part in self.family.text_parts if part not in self.family.used_text_parts]

        def load_encoders() -> Any:
            encoders = loader.load("text encoders", without=["transformer", "vae", *unused])
            encoders.register_modules(transformer=self.transformer)  # it knows the width of what stands for no T5
            return encoders

        folder = None
        if self.embedding_folder is not None:
            folder = self._open_folder(self.family, loader.folder(without=unused))
        return PromptEncoder(self.family, load_encoders, self.embedding_cache, self.offload_frozen, folder)

    def _open_folder(self, family: Family, pipeline: Path) -> EmbeddingFolder:
        assert self.embedding_folder is not None
        made_by = {
            "family": family.name,
            "max_sequence_length": str(family.max_sequence_length),
            "dtype": str(self.dtype).split(".")[1],
            **encoder_fingerprints(pipeline, family.text_parts, family.used_text_parts),
        }
        return EmbeddingFolder(Path(self.embedding_folder), made_by)

    def shard(self, mesh: Any) -> None:
        """Share the loaded transformer out over a device mesh (FSDP2). Does nothing without one, and the second time."""
        if mesh is not None and not self.sharded:
            shard(self.transformer, self.family.blocks(self.transformer), mesh)
            self.sharded = True

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        device: torch.device = next(self.transformer.parameters()).device
        return device

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one latent."""
        return self.family.latent_shape(self.height, self.width)

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
        return self.family.velocity(self.transformer, x.to(self.dtype), sigma, condition).float()

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
            images = self.family.decode(vae, latents)
        return (images.float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents [B, C, H, W] (float32, the posterior's mode) of images [B, 3, height, width] in [0, 1]."""
        with self._vae() as vae:
            return self.family.encode(vae, (images * 2 - 1).to(self.device))

    def save_lora(self, folder: Path, adapter: Adapter = "ema", write: bool = True) -> None:
        """See `Adapters.save`. A collective call where the transformer is sharded: one process has `write` true."""
        self.adapters.save(folder, adapter, self._helpers["loader"].pipeline_class, write)

    @property
    def base_fingerprint(self) -> str:
        """Tells bases apart: a hash of a few numbers of each weight, and of an embedded guidance."""
        return content_hash(self._told_apart_by)

    def fingerprint(self) -> str:
        """Tells policies apart: a hash of the trained adapter, and of the base as loaded (see `base_fingerprint`).

        A collective call where the transformer is sharded; the same however it runs.
        """
        trained = (gathered(weight).float().numpy().tobytes() for weight in self.adapter_parameters("default"))
        return content_hash(self._told_apart_by, *trained)


def _drop_all_but_adapters(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and ".lora_" not in name]:
        del state[name]
