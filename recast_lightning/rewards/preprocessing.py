"""How images [B, 3, H, W] in [0, 1] are brought to what a model takes.

The published scorers read 8-bit pictures, and all but HPSv2 scale them by Pillow. That is `exact`, and passes no
gradients; otherwise images stay float tensors from end to end.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

Picture = NDArray[np.uint8]  # [H, W, 3]
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training images, and BLIP's
STD = (0.26862954, 0.26130258, 0.27577711)


def as_pictures(images: Tensor) -> list[Picture]:
    """Images [B, 3, H, W] in [0, 1] as arrays [H, W, 3], rounded to 8 bits a channel."""
    return list(images.detach().mul(255).round_().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy())


def shortest_side_crop(images: Tensor, size: int, *, exact: bool = True) -> Tensor:
    """Scale the shorter side to `size` (bicubic) and cut out the centre: [B, 3, H, W] -> [B, 3, size, size].

    As transformers' CLIPImageProcessor does: half of the surplus is rounded down.
    """
    images = _scale_shorter_side(images, size, exact)
    return _crop(images, size, *((side - size) // 2 for side in images.shape[-2:]))


def shortest_side_crop_to_even(images: Tensor, size: int, *, exact: bool = True) -> Tensor:
    """The same as torchvision's Resize and CenterCrop do: half of an odd surplus is rounded to the even number."""
    images = _scale_shorter_side(images, size, exact)
    return _crop(images, size, *(round((side - size) / 2) for side in images.shape[-2:]))


def longest_side_pad(images: Tensor, size: int, *, exact: bool = True) -> Tensor:
    """Scale the longer side to `size` (bicubic) and centre it on black: [B, 3, H, W] -> [B, 3, size, size].

    As HPSv2 does, which scales float tensors and leaves what bicubic interpolation shoots beyond [0, 1].
    """
    if exact:
        _check_no_gradients(images)
        images = images.mul(255).round_().div_(255)
    scale = size / max(images.shape[-2:])
    height, width = (max(1, round(side * scale)) for side in images.shape[-2:])
    images = _interpolate(images, height, width)
    rows, columns = size - height, size - width
    return F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def _scale_shorter_side(images: Tensor, size: int, exact: bool) -> Tensor:
    """[B, 3, H, W] -> [B, 3, H', W'], the shorter of which is `size`."""
    height, width = (size * side // min(images.shape[-2:]) for side in images.shape[-2:])
    if not exact:
        return _interpolate(images, height, width).clamp(0, 1)
    _check_no_gradients(images)
    pictures = [Image.fromarray(picture) for picture in as_pictures(images)]
    scaled = [np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC)) for picture in pictures]
    return torch.from_numpy(np.stack(scaled)).to(images.device).permute(0, 3, 1, 2).contiguous().float() / 255


def _interpolate(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode="bicubic", antialias=True)


def _crop(images: Tensor, size: int, top: int, left: int) -> Tensor:
    return images[..., top : top + size, left : left + size]


def _check_no_gradients(images: Tensor) -> None:
    if images.requires_grad and torch.is_grad_enabled():
        raise ValueError("No gradients pass 8-bit pictures, which scores are of by default: set differentiable: true.")
