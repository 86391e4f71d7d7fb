"""GenEval's detector: Mask2Former on the 80 things of COCO, and CLIP for colours.

Sources: Cheng et al. 2022 (arXiv 2112.01527); Ghosh et al. 2023 (arXiv 2310.11513). Scaling and boxes are those of
OpenMMLab's test pipeline (mmdet 2.x), on which GenEval's thresholds rest, and not those of transformers' image processor.
Padding is that of whoever trained the weights: OpenMMLab pads with grey before it normalises, Meta with 0 after it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from recast_lightning.paths import resolve
from recast_lightning.prompts.geneval_names import COCO_CLASSES, COLORS
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards.base import DType, check_choice, require_package
from recast_lightning.rewards.geneval.colors import ColorNamer
from recast_lightning.rewards.geneval.detection import Box, Detection, Detector, Failure, Found, Hint
from recast_lightning.rewards.geneval.mask2former_weights import load_mask2former

_MEAN = (123.675, 116.28, 103.53)  # of ImageNet, RGB in 0...255
_STD = (58.395, 57.12, 57.375)
_DIVISOR = 32
_GREY = 128  # with which OpenMMLab pads before it normalises
_MOST_PER_IMAGE = 100
_MOST_PER_CLASS = 16  # GenEval looks at no more
_MANY = 16  # images of one call without a single mask: not the images are empty, the detector is broken


class Instances(NamedTuple):
    """N objects of one image, the most certain first.

    Attributes:
        labels: Class indices [N].
        scores: Certainties [N] in (0, 1].
        masks: [N, H, W], bool.
        boxes: Tightly around the masks, in pixels; the right and the lower side lie outside.
    """

    labels: list[int]
    scores: list[float]
    masks: Tensor
    boxes: list[Box]


class Mask2FormerDetector(Detector):
    """Finds the 80 things of COCO in photographs, and names their colours by CLIP.

    Args:
        model: A hub id or a local folder with a transformers Mask2FormerForUniversalSegmentation of COCO instances, or
            OpenMMLab's file ``mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth`` (Apache-2.0),
            which published GenEval numbers use. The default (CC-BY-NC-4.0) is of the same architecture but of another
            training, so its scores differ a little.
        clip: The CLIP that names colours: a hub id, a local folder, or ``signboard:clip``. One of the same name and type
            in another reward is the same in memory.
        clip_processor: Where its tokenizer comes from. None: as `clip`.
        clip_dtype: Its precision.
        threshold: Objects must be more certain than this.
        counting_threshold: The same where the number of objects is what is asked for.
        short_side: Images are scaled to this many pixels on the shorter side,
        long_side: but to no more than this on the longer.
        batch_size: Images a forward pass of Mask2Former.
    """

    classes = COCO_CLASSES
    colors = COLORS
    most = _MOST_PER_IMAGE
    licence = "OpenMMLab's file: Apache-2.0; facebook's weights: CC-BY-NC-4.0; CLIP: not verified"

    def __init__(
        self,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        *,
        clip: str = "openai/clip-vit-large-patch14",
        clip_processor: str | None = None,
        clip_dtype: DType = "float32",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        short_side: int = 800,
        long_side: int = 1333,
        batch_size: int = 4,
    ) -> None:
        super().__init__()
        check_ranges(
            {"threshold": threshold, "counting_threshold": counting_threshold, "batch_size": batch_size},
            {"threshold": "[0, 1)", "counting_threshold": "[0, 1)", "batch_size": "[1, inf)"},
        )
        if not 1 <= short_side <= long_side:
            raise ValueError(
                f"short_side is {short_side} and long_side {long_side}: expected 1 ≤ short_side ≤ long_side."
            )
        check_choice("clip_dtype", clip_dtype, get_args(DType))
        self.version = f"{Path(model).name}, {Path(clip).name}"
        self.model = model
        self.clip = clip
        self.clip_processor = clip_processor
        self.clip_dtype = clip_dtype
        self.threshold = threshold
        self.counting_threshold = counting_threshold
        self.short_side = short_side
        self.long_side = long_side
        self.batch_size = batch_size
        self._loaded: tuple[Any, ColorNamer] | None = None  # a tuple keeps the weights out of the module tree

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """
        require_package("transformers", type(self).__name__)
        path = Path(resolve(self.model, "Mask2Former"))
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(
                f"{path} is no Mask2Former: expected a folder in transformers' layout, with a config.json."
            )
        resolve(self.clip, "CLIP")
        if self.clip_processor is not None:
            resolve(self.clip_processor, "CLIP processor")

    def load(self, device: torch.device | None = None) -> None:
        """Read Mask2Former and CLIP to a device (None: the CPU); later calls only move them."""
        self._load(device or torch.device("cpu"))

    def _load(self, device: torch.device) -> tuple[Any, ColorNamer]:
        if self._loaded is None:
            self.validate()
            with torch.inference_mode(False):
                network: Any = load_mask2former(resolve(self.model, "Mask2Former"), len(COCO_CLASSES))
                colors = ColorNamer.load(self.clip, self.clip_processor, self.clip_dtype, device)
            self._loaded = network.eval().requires_grad_(False), colors
        self._loaded[0].to(device)
        self._loaded[1].clip.to(device)
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles travel without the weights and load them again."""
        return {**self.__dict__, "_loaded": None}

    @torch.no_grad()
    def detect(self, images: Tensor, hints: Sequence[Hint] | None = None) -> list[Found]:
        """Find things in images [B, 3, H, W] (float32 in [0, 1]); one list an image, or a :class:`Failure`.

        A class has at most 16 colours, those of its most certain objects.
        """
        network, _ = self._load(images.device)
        hints = hints or [Hint(0.0, frozenset(COCO_CLASSES))] * len(images)
        openmmlab = Path(resolve(self.model, "Mask2Former")).is_file()
        found: list[Found] = []
        empty = True
        for start in range(0, len(images), self.batch_size):
            chunk = images[start : start + self.batch_size]
            pixels, inner = preprocess(chunk, self.short_side, self.long_side, openmmlab)
            output = network(pixel_values=pixels)
            classes, masks = output.class_queries_logits, output.masks_queries_logits
            empty &= not (masks > 0).any()
            for image, hint, class_logits, mask_logits in zip(
                chunk, hints[start : start + self.batch_size], classes, masks, strict=True
            ):
                found.append(self._describe(image, hint, class_logits, mask_logits, pixels.shape[-2:], inner))
        if empty and len(images) >= _MANY:
            return [f if isinstance(f, Failure) else Failure(_BLANK) for f in found]
        return found

    def _describe(
        self, image: Tensor, hint: Hint, classes: Tensor, masks: Tensor, padded: Sequence[int], inner: Sequence[int]
    ) -> Found:
        """The objects of one image [3, H, W], from the network's class and mask logits."""
        if classes.ndim != 2 or masks.ndim != 3 or classes.shape != (len(masks), len(COCO_CLASSES) + 1):
            return Failure(f"Mask2Former's logits have the shapes {list(classes.shape)} and {list(masks.shape)}")
        if not (classes.isfinite().all() and masks.isfinite().all()):
            return Failure("Mask2Former's logits are NaN or infinite")
        objects = find_instances(classes, masks, padded, inner, image.shape[-2:], hint.threshold)
        labels = [COCO_CLASSES[i] for i in objects.labels]
        colors: list[str | None] = [None] * len(labels)
        shown = [
            i for i, label in enumerate(labels) if label in hint.colored and labels[:i].count(label) < _MOST_PER_CLASS
        ]
        if shown:
            names = self._load(image.device)[1].name(
                image, objects.masks[shown], [objects.boxes[i] for i in shown], [labels[i] for i in shown]
            )
            if names is None:
                return Failure("CLIP's answer about colours is NaN or infinite")
            for i, name in zip(shown, names, strict=True):
                colors[i] = name
        return [Detection(*each) for each in zip(labels, objects.scores, objects.boxes, colors, strict=True)]


_BLANK = f"Mask2Former marks no pixel in any of {_MANY} images or more: its weights must be broken"


def preprocess(
    images: Tensor, short_side: int, long_side: int, openmmlab: bool = False
) -> tuple[Tensor, tuple[int, int]]:
    """Scale images [B, 3, H, W] in [0, 1] (bilinear, without smoothing), normalise, and pad right and below.

    Args:
        images: [B, 3, H, W].
        short_side: Of the scaled images, in pixels,
        long_side: but no more than this.
        openmmlab: Pad with grey before normalising, and not with 0 after it.

    Returns:
        Pixels [B, 3, H', W'], both sides multiples of 32, and (height, width) of the images within.
    """
    height, width = images.shape[-2:]
    scale = min(short_side / min(height, width), long_side / max(height, width))
    inner = (max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5)))
    scaled = F.interpolate(images.float(), inner, mode="bilinear", align_corners=False) * 255
    mean, std = (scaled.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    missing = (0, -inner[1] % _DIVISOR, 0, -inner[0] % _DIVISOR)
    if openmmlab:
        return (F.pad(scaled, missing, value=_GREY) - mean) / std, inner
    return F.pad((scaled - mean) / std, missing), inner


def find_instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    padded: Sequence[int],
    inner: Sequence[int],
    size: Sequence[int],
    threshold: float,
) -> Instances:
    """Read the objects of one image off the network's answer.

    The 100 likeliest pairs of query and class stay; a query may stand for several classes. An object's certainty is its
    class probability times the mean probability of the pixels in its mask.

    Args:
        class_logits: [Q, C + 1], the last for "no object".
        mask_logits: [Q, h, w], for the padded image.
        padded: (height, width) of what the network saw,
        inner: of the image within it,
        size: and of the image itself, which masks and boxes refer to.
        threshold: Only objects more certain than this.
    """
    classes = class_logits.shape[1] - 1
    probabilities = class_logits.float().softmax(1)[:, :-1].flatten()
    likeliest, places = probabilities.topk(min(_MOST_PER_IMAGE, len(probabilities)))
    keep = likeliest > threshold  # the other factor is at most 1
    likeliest, places = likeliest[keep], places[keep]
    if not len(places):
        return Instances([], [], torch.zeros(0, *size, dtype=torch.bool, device=mask_logits.device), [])
    queries, which = (places // classes).unique(return_inverse=True)

    logits = F.interpolate(mask_logits[None, queries].float(), tuple(padded), mode="bilinear", align_corners=False)
    logits = logits[..., : inner[0], : inner[1]]
    logits = F.interpolate(logits, tuple(size), mode="bilinear", align_corners=False)[0]
    masks = logits > 0
    inside = (logits.sigmoid() * masks).flatten(1).sum(1) / (masks.flatten(1).sum(1) + 1e-6)

    scores = likeliest * inside[which]
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] > threshold]
    masks = masks[which[order]]
    return Instances((places % classes)[order].tolist(), scores[order].tolist(), masks, [_box(mask) for mask in masks])


def _box(mask: Tensor) -> Box:
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
