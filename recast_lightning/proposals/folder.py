"""Proposals from a folder of pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.base import Proposals, picture_tensor


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
        return torch.stack([picture_tensor(picture, height, width) for picture in pictures])
