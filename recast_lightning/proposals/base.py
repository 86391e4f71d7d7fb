"""Proposals: a strong generator's images of prompts, which stand in for the positive policies in a profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt


class Proposals(ABC):
    """A source of one good image for each prompt."""

    per_prompt = 1

    @abstractmethod
    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Check, before any work, that the source has an image of each prompt.

        Raises:
            ValueError: naming the first prompt that it has none of.
        """

    @abstractmethod
    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """Images [B, 3, height, width] in [0, 1]; raises as `validate`."""


def picture_tensor(picture: Image.Image, height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1]; larger or smaller pictures are scaled to cover, then cropped at the centre."""
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
        )
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
