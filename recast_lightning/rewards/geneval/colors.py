"""GenEval's colours: CLIP zero-shot on objects cut out of the image (Ghosh et al. 2023, arXiv 2310.11513)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from recast_lightning.prompts.geneval_names import COLORS
from recast_lightning.rewards.base import DType
from recast_lightning.rewards.clip.backbone import ClipBackbone, shared_clip
from recast_lightning.rewards.geneval.detection import Box
from recast_lightning.rewards.preprocessing import shortest_side_crop_to_even

_TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
_GREY = 153 / 255  # what stands around the object
_LONGEST = 16  # a longer cut-out, over its width, loses its ends before CLIP scales it rather than after


class ColorNamer:
    """Names the colours of objects.

    Args:
        clip: GenEval takes OpenAI's ViT-L/14.
    """

    def __init__(self, clip: ClipBackbone) -> None:
        self.clip = clip

    @classmethod
    def load(cls, model: str, processor: str | None, dtype: DType, device: torch.device) -> "ColorNamer":
        """On the CLIP model that other rewards with the same `model` and `dtype` use, too.

        Raises:
            ValueError: If it cannot be loaded.
        """
        return cls(shared_clip(model, processor, dtype, device=device, user="geneval colours"))

    def name(self, image: Tensor, masks: Tensor, boxes: Sequence[Box], labels: Sequence[str]) -> list[str] | None:
        """Name the colour of each of N ≥ 1 objects.

        Args:
            image: [3, H, W], float32 in [0, 1].
            masks: Where the objects are, [N, H, W], bool.
            boxes: Around the masks, in pixels.
            labels: Their classes.

        Returns:
            One of :data:`COLORS` an object; None if CLIP's answer is not finite.
        """
        self.clip.to(image.device)
        crops = [self._cut_out(image, mask, box) for mask, box in zip(masks, boxes, strict=True)]
        objects = self.clip.embed_images(torch.cat(crops))
        texts = torch.stack([self._embed_colors(label) for label in labels])
        cosines = (texts @ objects[:, :, None])[..., 0]
        return [COLORS[i] for i in cosines.argmax(1).tolist()] if cosines.isfinite().all() else None

    def _cut_out(self, image: Tensor, mask: Tensor, box: Box) -> Tensor:
        """The object on grey, cut to its box and brought to CLIP's size as GenEval does: [1, 3, size, size]."""
        left, top, right, bottom = (round(side) for side in box)
        window = (slice(top, bottom), slice(left, right))
        crop = torch.where(mask[window], image[:, window[0], window[1]], _GREY)
        longest = _LONGEST * min(crop.shape[-2:])
        for axis in (-2, -1):
            surplus = max(0, crop.shape[axis] - longest)
            crop = crop.narrow(axis, surplus // 2, crop.shape[axis] - surplus)
        return shortest_side_crop_to_even(crop[None], self.clip.image_size)

    def _embed_colors(self, label: str) -> Tensor:
        """Unit-length embeddings [len(COLORS), D] of the colours of a class."""
        texts = [template.format(color=color, label=label) for color in COLORS for template in _TEMPLATES]
        embeddings = self.clip.embed_texts(texts).unflatten(0, (len(COLORS), len(_TEMPLATES)))
        return F.normalize(embeddings.mean(1), dim=-1)
