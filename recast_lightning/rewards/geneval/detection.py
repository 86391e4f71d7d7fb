"""What a detector of objects answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

Box = tuple[float, float, float, float]


class Detection(NamedTuple):
    """One object in an image.

    Attributes:
        label: Its class.
        score: How certain the detector is, in [0, 1].
        box: x0, y0, x1, y1 in pixels, y pointing down.
        color: The name of its colour, if the detector tells colours.
    """

    label: str
    score: float
    box: Box
    color: str | None = None


class Hint(NamedTuple):
    """What the caller looks at in one image; a detector may leave out the rest.

    Attributes:
        threshold: Only objects more certain than this.
        colored: Only the colours of objects of these classes.
    """

    threshold: float
    colored: frozenset[str]


@dataclass(frozen=True)
class Failure:
    """Stands for the objects of an image on which the detector broke down, which is not the same as finding none."""

    reason: str


Found = list[Detection] | Failure


class Detector(nn.Module, ABC):
    """Finds objects in images.

    Attributes:
        threshold: The certainty above which an object counts.
        counting_threshold: The same where the number of objects is what is asked for.
        classes: The classes it can find; empty if it does not say.
        colors: The colours it can tell; empty if it does not say.
        most: The most objects that it finds in an image; 0 if there is no limit.
        version: Of the weights that scores are comparable within; empty where there are none.
        licence: Of these weights.
    """

    threshold: float = 0.3
    counting_threshold: float = 0.9
    classes: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    most: int = 0
    version: str = ""
    licence: str = ""

    @abstractmethod
    def detect(self, images: Tensor, hints: Sequence[Hint] | None = None) -> Sequence[Found]:
        """Find objects in images [B, 3, H, W] (float32 in [0, 1]).

        Args:
            images: On the device where the work shall be done.
            hints: One an image. None: everything matters.

        Returns:
            One list an image, or a :class:`Failure`.
        """

    def load(self, device: torch.device | None = None) -> None:
        """Read the weights, if there are any, to a device (None: the CPU); later calls do not read them again."""

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """
