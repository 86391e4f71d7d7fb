"""Proposals: a strong generator's images of prompts, which stand in for the positive policies in a profile."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast_lightning.prompts import Prompt


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


class RendererProposals(Proposals):
    """Signboard's own renderer: the embedded stand-in for a strong generator.

    Args:
        seed: keys what a prompt leaves open (tint, sizes, jitter).
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """See `Proposals.validate`."""
        from recast_lightning.signboard.world import parse

        for prompt in prompts:
            parse(prompt)

    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """See `Proposals.images`."""
        from recast_lightning.signboard.world import draw, parse

        return torch.stack([_to_tensor(draw(parse(p), self.seed), height, width) for p in prompts])


class FolderProposals(Proposals):
    """Pictures in a folder, listed in its `metadata.jsonl` as lines {"file_name": ..., "prompt": ...}.

    Args:
        path: the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """See `Proposals.validate`."""
        self._files(prompts)

    def _files(self, prompts: Sequence[Prompt]) -> list[Path]:
        folder = f"Proposals folder {str(self.path)!r}"
        if not (self.path / "metadata.jsonl").is_file():
            raise ValueError(
                f"{folder} has no metadata.jsonl: it must list each picture as "
                '{"file_name": "0.png", "prompt": "..."}.'
            )
        files = self._listed()
        missing = [p.text for p in prompts if p.text not in files]
        if missing:
            raise ValueError(
                f"{folder} has no picture for {len(missing)} of {len(prompts)} prompts, first {missing[0]!r}."
            )
        chosen = {files[p.text]: self.path / files[p.text] for p in prompts}
        for name, file in chosen.items():
            if not file.resolve().is_relative_to(self.path.resolve()):
                raise ValueError(f"{folder} lists {name!r}, which is outside of it: list its own pictures alone.")
            if not file.is_file():
                raise ValueError(f"{folder} lists {name!r}, which is not there.")
        return [chosen[files[p.text]] for p in prompts]

    def _listed(self) -> dict[str, str]:
        """Prompt → file name."""
        files: dict[str, str] = {}
        for number, line in enumerate((self.path / "metadata.jsonl").read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line) if line.strip() else None
                if row is not None:
                    files[str(row["prompt"])] = str(row["file_name"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path / 'metadata.jsonl'}, line {number}: expected "
                    '{"file_name": "0.png", "prompt": "..."}.'
                ) from error
        return files

    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """See `Proposals.images`."""
        pictures = (Image.open(file).convert("RGB") for file in self._files(prompts))
        return torch.stack([_to_tensor(picture, height, width) for picture in pictures])


class PolicyProposals(Proposals):
    """The policy's own images, each reward weighting them by its score: no second generator is needed.

    Their weight is what makes them stand for a positive policy, so where a reward finds few good ones among them, they
    say little: such a reward is refused before anything is spent on it. docs/credit.md shows how far this goes.

    Args:
        per_prompt: images of each prompt.
        minimum_share: smallest effective share of a prompt's images, 1 where all score alike, 1 / per_prompt where one
            has all of the score.
    """

    def __init__(self, per_prompt: int = 8, minimum_share: float = 0.5) -> None:
        if per_prompt < 2:
            raise ValueError(f"per_prompt must be at least 2, got {per_prompt}: weights compare images of a prompt.")
        self.per_prompt, self.minimum_share = per_prompt, minimum_share

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """See `Proposals.validate`: any prompt will do."""

    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """Not for this source: the profiler draws them from the policy."""
        raise NotImplementedError("The policy itself draws these.")


def _to_tensor(picture: Image.Image, height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1]; larger or smaller pictures are scaled to cover, then cropped at the centre."""
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
        )
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
