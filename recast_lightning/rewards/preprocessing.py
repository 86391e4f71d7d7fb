"""How images [B, 3, H, W] in [0, 1] are brought to what a model takes."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Picture = NDArray[np.uint8]  # [H, W, 3]
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training images, and BLIP's
STD = (0.26862954, 0.26130258, 0.27577711)


def as_pictures(images: Tensor) -> list[Picture]:
    """Images [B, 3, H, W] in [0, 1] as arrays [H, W, 3], rounded to 8 bits a channel."""
    return list((images.detach() * 255).round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy())


def scale_shorter_side(images: Tensor, size: int) -> Tensor:
    """Scale the shorter side to `size` (bicubic), keeping proportions: [B, 3, H, W] -> [B, 3, H', W']."""
    height, width = images.shape[-2:]
    short = min(height, width)
    return _resize(images, size * height // short, size * width // short)


def shortest_side_crop(images: Tensor, size: int) -> Tensor:
    """Scale the shorter side to `size` (bicubic) and cut out the centre: [B, 3, H, W] -> [B, 3, size, size]."""
    images = scale_shorter_side(images, size)
    top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
    return images[..., top : top + size, left : left + size]


def fit_image(images: Tensor, size: int) -> Tensor:
    """As :func:`shortest_side_crop`, but the middle is torchvision's: an odd remainder is halved and rounded to even."""
    images = scale_shorter_side(images, size)
    top, left = (round((side - size) / 2) for side in images.shape[-2:])
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
