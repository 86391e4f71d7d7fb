"""The CLIP backbone that ClipScore, HPSv2 and PickScore share: loading, preprocessing, embedding."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from recast_lightning.paths import resolve
from recast_lightning.prompts import Prompt
from recast_lightning.rewards.base import RewardModel, require_package

if TYPE_CHECKING:
    from transformers import CLIPModel

_log = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16"]
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MEMO_SIZE = 4096


def shortest_side_crop(images: Tensor, size: int) -> Tensor:
    """Scale the shorter side to `size` (bicubic) and cut out the centre: [B, 3, H, W] -> [B, 3, size, size]."""
    height, width = images.shape[-2:]
    short = min(height, width)
    images = _resize(images, size * height // short, size * width // short)
    top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
    return images[..., top : top + size, left : left + size]


def longest_side_pad(images: Tensor, size: int) -> Tensor:
    """Scale the longer side to `size` (bicubic) and centre it on black: [B, 3, H, W] -> [B, 3, size, size]."""
    height, width = images.shape[-2:]
    long = max(height, width)
    images = _resize(images, max(1, round(size * height / long)), max(1, round(size * width / long)))
    rows, columns = size - images.shape[-2], size - images.shape[-1]
    return F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode="bicubic", antialias=True).clamp(0, 1)


class ClipBackbone:
    """A frozen CLIP model with its tokeniser, giving unit-length embeddings.

    Not an ``nn.Module`` on purpose: a reward model that holds one does not register its weights.

    Args:
        model: The loaded model; its configuration decides image size and token limit.
        tokenizer: A transformers tokenizer that ends each text with its EOS token.
        mean: Channel means of the training images, in [0, 1].
        std: Channel standard deviations, likewise.
        fit: How images are brought to the model's square size.
        batch_size: The number of images or texts a forward pass.
    """

    def __init__(
        self,
        model: "CLIPModel",
        tokenizer: Any,
        *,
        mean: Sequence[float] = _MEAN,
        std: Sequence[float] = _STD,
        fit: Callable[[Tensor, int], Tensor] = shortest_side_crop,
        batch_size: int = 64,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.fit = fit
        self.batch_size = batch_size
        self.image_size: int = model.config.vision_config.image_size
        self.token_limit: int = model.config.text_config.max_position_embeddings
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]
        self._memo: dict[str, Tensor] = {}
        self._warned = False

    def to(self, device: torch.device) -> "ClipBackbone":
        """Move the model; free if it is there already."""
        if self.model.device != device:
            self.model.to(device)
            self._memo.clear()
        return self

    def logit_scale(self) -> Tensor:
        """The learned temperature exp(logit_scale), about 100 for the published models."""
        scale: Tensor = self.model.logit_scale.float().exp()
        return scale

    def cosine(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """Cosine similarity [B] of images [B, 3, H, W] in [0, 1] and their texts; differentiable in the images."""
        return (self.embed_images(images) * self.embed_texts(texts)).sum(1)

    def embed_images(self, images: Tensor) -> Tensor:
        """Unit-length embeddings [B, D], float32, of images [B, 3, H, W] in [0, 1]."""
        images = images.to(self.model.device)
        chunks = [self._embed_image_chunk(chunk) for chunk in torch.split(images, self.batch_size)]
        return F.normalize(torch.cat(chunks), dim=1)

    def _embed_image_chunk(self, images: Tensor) -> Tensor:
        pixels = (self.fit(images, self.image_size) - self._mean.to(images)) / self._std.to(images)
        features: Tensor = self.model.get_image_features(pixel_values=pixels.to(self.model.dtype)).pooler_output
        return features.float()

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit-length embeddings [B, D], float32; the latest few thousand texts are remembered."""
        new = [text for text in dict.fromkeys(texts) if text not in self._memo]
        found = {text: self._memo[text] for text in texts if text in self._memo}
        # Embeddings made in inference mode would break a later backward pass through the image side.
        with torch.inference_mode(False), torch.no_grad():
            for text in new:  # one by one: an embedding must not depend, in its last bit, on what was read beside it
                found[text] = self._embed_text_chunk([text])[0]
        self._memo.update(found)
        while len(self._memo) > _MEMO_SIZE:
            del self._memo[next(iter(self._memo))]
        return torch.stack([found[text] for text in texts])

    def _embed_text_chunk(self, texts: list[str]) -> Tensor:
        lengths = [len(ids) for ids in self.tokenizer(texts, verbose=False)["input_ids"]]
        if max(lengths) > self.token_limit and not self._warned:
            self._warned = True
            longest = texts[lengths.index(max(lengths))]
            _log.warning(
                "CLIP reads only the first %d tokens of %r, which has %d (said once)",
                self.token_limit,
                longest,
                max(lengths),
            )
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.token_limit, return_tensors="pt"
        )
        if not (tokens["input_ids"] == self.tokenizer.eos_token_id).any(1).all():
            raise ValueError("The tokenizer ends texts without an EOS token, and CLIP reads its text embedding there.")
        features: Tensor = self.model.get_text_features(**tokens.to(self.model.device)).pooler_output
        return F.normalize(features.float(), dim=1)


class ClipReward(RewardModel):
    """Base of the rewards that compare an image with its prompt by CLIP; a subclass turns the cosine into a score.

    Args:
        model: ``signboard:<name>``, a local folder with a transformers CLIPModel, or a hub id.
        processor: Where tokenizer and image statistics come from, likewise. None: the folder of the model if it has a
            tokenizer, else `fallback_processor`.
        dtype: Precision of the model; embeddings are compared in float32.
        batch_size: Images a forward pass.
    """

    differentiable = True
    score_range = (-1.0, 1.0)
    fallback_processor: str | None = None

    def __init__(self, model: str, processor: str | None, dtype: DType, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: expected at least 1.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f'dtype is "{dtype}": expected "float32", "bfloat16" or "float16".')
        self.model = model
        self.processor = processor
        self.dtype = dtype
        self.batch_size = batch_size

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against their prompts; returns [B]."""
        clip: ClipBackbone = self.load().to(self._device)
        return self.from_cosine(clip.cosine(images, [prompt.text for prompt in prompts]), clip.logit_scale())

    def positive(self, scores: Tensor) -> Tensor:
        """Floor at 0, as CLIPScore does (Hessel et al. 2021, arXiv 2104.08718, Sec. 3): pictures below it are no match."""
        return scores.clamp(min=0)

    def from_cosine(self, cosine: Tensor, logit_scale: Tensor) -> Tensor:
        """Turn cosine similarities [B] into scores [B]."""
        raise NotImplementedError

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

    def _load(self) -> ClipBackbone:
        from transformers import AutoTokenizer

        processor = self.resolve_processor()
        model = self._load_model(self.resolve_model(), getattr(torch, self.dtype))
        try:
            tokenizer = AutoTokenizer.from_pretrained(processor)
        except OSError as error:
            raise ValueError(
                f'{self.name} found no tokenizer in "{processor}", neither here nor on the hub.'
            ) from error
        mean, std = read_image_statistics(processor)
        return ClipBackbone(model, tokenizer, mean=mean, std=std, fit=self._fit, batch_size=self.batch_size)

    def _load_model(self, path: str, dtype: torch.dtype) -> "CLIPModel":
        from transformers import CLIPModel

        try:
            return CLIPModel.from_pretrained(path, dtype=dtype)
        except OSError as error:
            raise ValueError(f'{self.name} found no CLIP model in "{path}", neither here nor on the hub.') from error

    _fit = staticmethod(shortest_side_crop)


def read_image_statistics(path: str) -> tuple[Sequence[float], Sequence[float]]:
    """Read channel mean and standard deviation from a processor folder or hub id; CLIP's own where it has none.

    The size comes from the model: CLIP takes no other.
    """
    from transformers.utils import cached_file

    for name in ("preprocessor_config.json", "processor_config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            config = json.loads(Path(file).read_text(encoding="utf-8"))
            config = config.get("image_processor", config)
            return config.get("image_mean", _MEAN), config.get("image_std", _STD)
    return _MEAN, _STD
