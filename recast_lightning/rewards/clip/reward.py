"""Bases of the rewards that look through CLIP."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from recast_lightning.paths import resolve
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import DType, PositiveMap, RewardModel, check_options, require_package
from recast_lightning.rewards.clip.backbone import ClipBackbone, read_clip, shared_clip
from recast_lightning.rewards.preprocessing import shortest_side_crop


class ClipReward(RewardModel):
    """Base of the rewards that look through CLIP: their settings, checks, and loading.

    Args:
        model: ``signboard:<name>``, a local folder with a transformers CLIPModel, or a hub id.
        processor: Where tokenizer and image statistics come from, likewise. None: the folder of the model if it has a
            tokenizer, else `fallback_processor`.
        dtype: Precision of the model; embeddings come in float32.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass, see :mod:`~recast_lightning.rewards.preprocessing`. They always do
            through Signboard's own judges, which were trained on float tensors.
        positive_map: See :meth:`RewardModel.positive`.
    """

    fallback_processor: str | None = None

    def __init__(
        self,
        model: str,
        processor: str | None,
        dtype: DType,
        batch_size: int,
        differentiable: bool,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(positive_map)
        check_options(dtype, batch_size, differentiable)
        self.model = model
        self.processor = processor
        self.dtype = dtype
        self.batch_size = batch_size
        self.differentiable = differentiable or model.startswith("signboard:")

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """
        require_package("transformers", type(self).__name__)
        self.resolve_model()
        self.resolve_processor()

    def resolve_model(self) -> str:
        """The local path or hub id of the model; a local path must hold a configuration."""
        path = resolve(self.model, f"{self.name} model")
        if Path(path).exists() and not (Path(path) / "config.json").is_file():
            raise ValueError(f"{path} is no CLIP model: expected a folder in transformers' layout, with a config.json.")
        return path

    def resolve_processor(self) -> str:
        """The local path or hub id of tokenizer and image statistics."""
        if self.processor is not None:
            return resolve(self.processor, f"{self.name} processor")
        path = resolve(self.model, f"{self.name} model")
        if any((Path(path) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
            return path
        if self.fallback_processor is None and Path(path).exists():
            raise ValueError(f"{path} has no tokenizer: name the folder that does as `processor`.")
        return self.fallback_processor or path

    def _load(self) -> Any:
        return self._load_clip()

    def _load_clip(self) -> ClipBackbone:
        return shared_clip(
            self._locate(),
            self.resolve_processor(),
            self.dtype,
            self.batch_size,
            device=self._device,
            fit=partial(self._fit, exact=not self.differentiable),
            read=self._read,
            user=self.name,
        )

    def _locate(self) -> str:
        """The path or hub id from which :meth:`_read` reads."""
        return self.resolve_model()

    _fit: ClassVar[Callable[..., Tensor]] = staticmethod(shortest_side_crop)
    _read = staticmethod(read_clip)


class ClipSimilarity(ClipReward):
    """Base of the rewards that compare an image with its prompt by CLIP; a subclass turns the cosine into a score.

    Args:
        model: ``signboard:<name>``, a local folder with a transformers CLIPModel, or a hub id.
        processor: Where tokenizer and image statistics come from, see :class:`ClipReward`.
        dtype: Precision of the model; embeddings are compared in float32.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass, see :class:`ClipReward`.
    """

    score_range = (-1.0, 1.0)

    def __init__(self, model: str, processor: str | None, dtype: DType, batch_size: int, differentiable: bool) -> None:
        super().__init__(model, processor, dtype, batch_size, differentiable)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against their prompts; returns [B]."""
        clip: ClipBackbone = self.load().to(self._device)
        texts = [self.clean(prompt.text) for prompt in prompts]
        return self.from_cosine(clip.cosine(images, texts), clip.logit_scale())

    def clean(self, text: str) -> str:
        """What the tokenizer is to read of a prompt."""
        return text

    def positive(self, scores: Tensor) -> Tensor:
        """Floor at 0, as CLIPScore does (Hessel et al. 2021, arXiv 2104.08718, Sec. 3): pictures below it are no match."""
        return scores.clamp(min=0)

    def from_cosine(self, cosine: Tensor, logit_scale: Tensor) -> Tensor:
        """Turn cosine similarities [B] into scores [B]."""
        raise NotImplementedError
