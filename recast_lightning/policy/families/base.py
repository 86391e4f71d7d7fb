"""What a policy has to know of a kind of flow-matching model; all else is the same for every kind.

Shape legend: B batch, C H W latents. Noise levels sigma are in [0, 1], 1 is noise; velocities are v = noise − x_0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from recast_lightning.errors import UserError
from recast_lightning.policy.condition import Condition
from recast_lightning.policy.pipeline_folder import PipelineFolder

ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip


class Family(ABC):
    """A kind of flow-matching text-to-image model.

    A family holds options and no weights: the parts of the pipeline are handed to its methods. Latents are [B, C, H, W]
    everywhere; a transformer that wants them packed gets them so inside `velocity`.

    Args:
        pipeline: the saved pipeline.
        max_sequence_length: text tokens; default the family's own.
        use_t5: whether to encode with T5 where the pipeline has it.
        guidance: scale of an embedded guidance; default the family's own.

    Attributes:
        name: of the family.
        pipelines: class names of `model_index.json` that the family serves.
        text_parts: all text encoders and tokenizers that such a pipeline can have.
        block_lists: lists of blocks in the transformer; each block is sharded and compiled by itself, and diffusers
            checkpoints the gradients of these.
        lora_targets: modules that get adapters by default, by the end of their name.
        used_text_parts: the text parts that encode prompts.
        max_sequence_length: text tokens in effect.
        guidance: in effect; None for a model without a guidance embedding.

    Raises:
        UserError: if an option does not fit the pipeline, or the pipeline was saved without a text part or with a scheduler
            whose levels rise.
    """

    name: ClassVar[str]
    pipelines: ClassVar[tuple[str, ...]]
    text_parts: ClassVar[tuple[str, ...]]
    block_lists: ClassVar[tuple[str, ...]]
    lora_targets: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        pipeline: PipelineFolder,
        max_sequence_length: int | None = None,
        use_t5: bool = True,
        guidance: float | None = None,
    ) -> None:
        self.path = pipeline.path
        self.transformer_config, self.vae_config = pipeline.config("transformer"), pipeline.config("vae")
        self.used_text_parts, self.max_sequence_length = self.choose_text(pipeline, max_sequence_length, use_t5)
        for part in self.used_text_parts:
            if not pipeline.has(part):
                raise UserError(f"Policy path {self.path!r} was saved without its {part}, which encodes prompts.")
        if pipeline.scheduler_config().get("invert_sigmas"):
            raise UserError(
                f"Policy path {self.path!r} has a scheduler with invert_sigmas, whose noise levels rise: a policy needs "
                "levels that fall to 0, so set invert_sigmas to false, if the model was trained so."
            )
        if guidance is not None and self.own_guidance is None:
            raise UserError(f"guidance is {guidance:g}, but {self.path!r} has no guidance embedding: leave it out.")
        self.guidance = self.own_guidance if guidance is None else guidance

    @abstractmethod
    def choose_text(
        self, pipeline: PipelineFolder, max_sequence_length: int | None, use_t5: bool
    ) -> tuple[tuple[str, ...], int]:
        """The text parts that encode prompts, and the number of tokens, of what the user asks for.

        Raises:
            UserError: if the two do not go together.
        """

    @abstractmethod
    def encode_prompt(self, pipeline: Any, text: str, device: Any) -> Condition:
        """Encode one prompt, B = 1, with the text encoders of a loaded pipeline, which are on `device`."""

    @abstractmethod
    def velocity(self, transformer: Any, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, H, W] at x [B, C, H, W] (of the frozen weights' type), sigma [B]."""

    @abstractmethod
    def sigmas(self, scheduler: Any, num_steps: int, height: int, width: int) -> Tensor:
        """The levels at which the pipeline samples a picture of that size, descending to 0, [num_steps + 1]."""

    def levels(self, scheduler: Any, num_steps: int, height: int, width: int) -> Tensor:
        """`sigmas`, checked, as a policy keeps them: ascending from 0 to at most 1, float64, [num_steps + 1].

        Raises:
            UserError: if the scheduler has no such levels.
        """
        name = f"Policy path {self.path!r} has a {type(scheduler).__name__}, "
        try:
            levels = self.sigmas(scheduler, num_steps, height, width).flip(0).double().cpu()
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UserError(f"{name}which gives no noise levels: {error}.") from error
        if len(levels) != num_steps + 1 or levels[0] != 0 or levels[-1] > 1 or not (levels.diff() > 0).all():
            shown = ", ".join(f"{level:.4g}" for level in levels.flip(0).tolist())
            raise UserError(
                f"{name}whose levels for {num_steps} steps are {shown}: they must fall from at most 1 to 0."
            )
        return levels

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int | None]:
        """What a picture's sides are multiples of, and the longest, in pixels; None where any length goes."""

    @property
    def own_guidance(self) -> float | None:
        """Default scale of the embedded guidance; None without one."""
        return None

    @property
    def vae_scale(self) -> int:
        """Pixels along the side of a latent."""
        return int(2 ** (len(self.vae_config["block_out_channels"]) - 1))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, H, W) of a picture's latents."""
        return self.vae_config["latent_channels"], height // self.vae_scale, width // self.vae_scale

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Images [B, 3, height, width] in about [-1, 1] of latents [B, C, H, W]."""
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        images: Tensor = vae.decode(z.to(vae.dtype), return_dict=False)[0]
        return images

    def encode(self, vae: Any, images: Tensor) -> Tensor:
        """Latents [B, C, H, W] (float32, the posterior's mode) of images [B, 3, height, width] in [-1, 1]."""
        z = vae.encode(images.to(vae.dtype)).latent_dist.mode()
        latents: Tensor = (z.float() - vae.config.shift_factor) * vae.config.scaling_factor
        return latents

    def blocks(self, transformer: Any) -> list[nn.Module]:
        """All blocks of `block_lists`, in the order in which they run."""
        return [block for name in self.block_lists for block in getattr(transformer, name)]


def dynamic_shift(scheduler: Any, tokens: int) -> dict[str, float]:
    """`mu` for `scheduler.set_timesteps`, linear in the tokens of a picture; empty for a scheduler of fixed shift."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return {}
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - fewest)
    return {"mu": tokens * slope + (low - slope * fewest)}
