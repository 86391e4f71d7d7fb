"""The contract that every reward model keeps."""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from recast_lightning.errors import UserError
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.ranges import check_ranges

_log = logging.getLogger(__name__)
_ROUNDING = 1e-3  # by which arithmetic may leave a range, relative to a bound above 1

_HOW_TO_SUPPLY = {
    "ocr": 'read the prompts with ocr=True, or give the text to be drawn under the key "ocr" of a .jsonl file',
    "include": 'use a .jsonl file in GenEval\'s format, for example {"prompt": ..., "tag": ..., "include": [...]}',
}

DType = Literal["float32", "bfloat16", "float16"]
PositiveMap = Literal["floor", "exp", "sigmoid"]
_POSITIVE: dict[PositiveMap, Callable[[Tensor], Tensor]] = {
    "floor": lambda scores: scores.clamp(min=0),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
}


class RewardModel(nn.Module, ABC):
    """Scores images against prompts; larger is better, and NaN means "could not be scored".

    Constructors store plain values and are cheap. Weights are read by :meth:`load`, at the latest on the first score.
    They are kept out of the module tree, so that they reach neither a checkpoint nor an optimiser, but they follow
    ``.to(device)``.

    Attributes:
        name: The name under which configurations and logs know this reward.
        needs: The metadata keys that every prompt must carry.
        differentiable: Whether :meth:`score` passes gradients back to the images.
        score_range: The smallest and the largest score possible; one outside is an error.
        failed: How many images could not be scored so far.
        offloaded: Whether the weights go back to the CPU after each batch.
        version: Of the checkpoint that scores are comparable within.
        licence: Of the weights; empty where there are none.
        workers: Where it scores when a run has workers: ``inline`` on the device, in ``threads`` or in ``processes``.
    """

    name: str
    needs: tuple[str, ...] = ()
    differentiable: bool = False
    score_range: tuple[float, float] = (0.0, 1.0)
    version: str = ""
    licence: str = ""
    workers: ClassVar[Literal["inline", "threads", "processes"]] = "inline"

    def __init__(self, positive_map: PositiveMap | None = None) -> None:
        super().__init__()
        if positive_map is not None:
            check_choice("positive_map", positive_map, get_args(PositiveMap))
        self.positive_map = positive_map
        self.failed = 0
        self.offloaded = False
        self._device = torch.device("cpu")
        self._loaded: Any = None
        self._reported: set[str] = set()

    @abstractmethod
    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against their prompts; returns [B], NaN where that fails.

        :meth:`forward` also takes a list or an array of numbers.
        """

    def positive(self, scores: Tensor) -> Tensor:
        """Scores as weights of the positive policy, which must not be negative; a profile measures these.

        They are the scores themselves, or what `positive_map` makes of them: an increasing map to numbers ≥ 0.
        """
        return scores if self.positive_map is None else _POSITIVE[self.positive_map](scores)

    def check_positive(self) -> None:
        """Check that a profile of this reward is possible.

        Raises:
            ValueError: If it can score below 0 and no map mends that.
        """
        if self.positive(torch.tensor(self.score_range[:1])).lt(0).any():
            raise ValueError(
                f"{self.name} can score below 0 (down to {self.score_range[0]:g}), which is no weight of a positive policy: "
                f"give it a positive_map ({', '.join(_POSITIVE)}), or train with credit: static."
            )

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """

    def _load(self) -> Any:
        """Read the weights; :meth:`load` calls this once."""
        return True

    def load(self) -> Any:
        """Return what scoring needs, reading it on the first call."""
        if self._loaded is None:
            self.validate()
            with torch.inference_mode(False):  # weights made in inference mode could never pass gradients on
                self._loaded = self._load()
        return self._loaded

    def offload(self) -> None:
        """Bring the weights back to the CPU at once; they move when they are used after the next ``.to(device)``."""
        self.to("cpu")
        for part in self._loaded if isinstance(self._loaded, tuple) else (self._loaded,):
            if hasattr(part, "to"):
                part.to(torch.device("cpu"))

    @torch.no_grad()
    def forward(self, images: Tensor | Sequence[Image.Image], prompts: Sequence[Prompt]) -> Tensor:
        """Check the input, score it, and report what could not be scored.

        Args:
            images: [B, 3, H, W], float in [0, 1] or uint8 in 0...255, on any device; or PIL images of one size.
            prompts: One prompt an image.

        Returns:
            Scores [B], float32 on the CPU. NaN (never 0) stands for an image that could not be scored.

        Raises:
            ValueError: If shape, number, type or range of the input is wrong, or a prompt lacks metadata that is
                needed.
            UserError: If :meth:`score` returned something else than one number an image, or one outside `score_range`.
        """
        images = _as_unit_float(images if isinstance(images, Tensor) else _stacked(images))
        if len(prompts) != len(images):
            raise ValueError(
                f"{self.name} got {len(images)} images for {len(prompts)} prompts: give one prompt an image."
            )
        self.check_prompts(prompts)
        if not len(images):
            return torch.zeros(0)

        broken = ~images.isfinite().flatten(1).all(1)
        if broken.any():
            self._report("the image holds NaN or infinite pixels")
        try:
            scores = self.score(torch.where(broken[:, None, None, None], 0.0, images), prompts)
        finally:
            if self.offloaded:
                self.offload()
        scores = torch.where(broken.cpu(), torch.nan, self._as_scores(scores, len(images)))
        scores[scores.isinf()] = torch.nan
        scores = self._within_range(scores)
        self.failed += int(scores.isnan().sum())
        return scores

    def _as_scores(self, returned: Any, count: int) -> Tensor:
        """What `score` returned (a tensor, an array or a list of numbers) as float32 [count] on the CPU."""
        try:
            scores = torch.as_tensor(returned)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{type(self).__name__}.score returned {returned!r:.80}: expected a number for each of {count} images, and "
                "NaN for one that could not be scored."
            ) from error
        if scores.shape != (count,) or scores.is_complex():
            raise UserError(
                f"{type(self).__name__}.score returned shape {list(scores.shape)} and type {scores.dtype} for {count} "
                f"images: expected [{count}] and real numbers."
            )
        return scores.to("cpu", torch.float32)

    def _within_range(self, scores: Tensor) -> Tensor:
        """The scores, with what rounding took out of the range brought back to its end."""
        low, high = self.score_range
        inside = scores.clamp(low, high)
        far = (scores - inside).abs() > _ROUNDING * inside.abs().clamp(min=1)
        if far.any():
            raise UserError(
                f"{type(self).__name__}.score returned {scores[far][0]:g}, outside of {self.name}'s score_range "
                f"[{low:g}, {high:g}]: give the range that its scores have."
            )
        return inside

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that every prompt carries the metadata that this reward needs.

        Raises:
            ValueError: Naming the first prompt that does not.
        """
        for prompt in prompts:
            for key in self.needs:
                if not prompt.metadata.get(key):
                    raise ValueError(
                        f'{self.name} needs "{key}" in the metadata of each prompt, and {prompt.text!r} has none: '
                        f"{_HOW_TO_SUPPLY.get(key, 'give it in a .jsonl file')}."
                    )

    def _report(self, reason: str) -> None:
        """Log why an image could not be scored, once for each reason."""
        if reason not in self._reported:
            self._reported.add(reason)
            _log.warning("%s could not score an image: %s (NaN; said once)", self.name, reason)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RewardModel":
        """Take note of the device in ``.to(device)``; the weights follow when they are used."""
        self._device = fn(torch.empty(0, device=self._device)).device
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles travel without the weights and load them again."""
        return {**self.__dict__, "_loaded": None}


def _stacked(pictures: Sequence[Image.Image]) -> Tensor:
    """PIL images of one size as uint8 [B, 3, H, W]."""
    sizes = sorted({picture.size for picture in pictures})
    if len(sizes) > 1:
        raise ValueError(
            f"The pictures have different sizes, such as {sizes[0]} and {sizes[1]}: score each size apart."
        )
    if not sizes:
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    arrays = [np.asarray(picture.convert("RGB")) for picture in pictures]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def _as_unit_float(images: Tensor) -> Tensor:
    """Turn uint8 or float images [B, 3, H, W] into float32 in [0, 1]; what is not finite becomes NaN."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"Images have shape {list(images.shape)}: expected [B, 3, H, W].")
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise ValueError(f"Images have type {images.dtype}: expected a float type in [0, 1], or uint8.")
    images = images.float()
    finite = images[images.isfinite()]
    if len(finite) and (finite.min() < -1e-3 or finite.max() > 1 + 1e-3):
        raise ValueError(f"Images span [{finite.min():.3g}, {finite.max():.3g}]: expected floats in [0, 1], or uint8.")
    return torch.where(images.isfinite(), images.clamp(0, 1), torch.nan)


def check_options(
    dtype: str, batch_size: int, differentiable: bool = False, known: Sequence[str] = get_args(DType)
) -> None:
    """Check the options of a reward with a network of its own: precision, batch size, and whether gradients pass.

    Raises:
        ValueError: If one is wrong.
    """
    check_ranges({"batch_size": batch_size}, {"batch_size": "[1, inf)"})
    check_choice("dtype", dtype, known)
    if not isinstance(differentiable, bool):
        raise ValueError(f"differentiable is {differentiable!r}: expected True or False.")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Check that the value of an option is one of those known.

    Raises:
        ValueError: If not.
    """
    if value not in known:
        raise ValueError(f'{name} is "{value}": expected one of {", ".join(known)}.')


def require_package(name: str, user: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        ValueError: If it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{user} needs the package {name}, which is not installed: pip install {name}.")
