"""Writes the pictures of `recast predict`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter

from recast_lightning.callbacks.run_report import to_pil
from recast_lightning.evaluation import Evaluation
from recast_lightning.training import RecastModule
from recast_lightning.training.trainer import run_folder


class ImageWriter(BasePredictionWriter):
    """Writes each picture as `<index>.png`, and prompts and scores as `metadata.jsonl` (a proposals folder, too).

    Args:
        path: folder for the pictures; default `predictions/` in the run folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path) if path else None

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the folder, with an empty list."""
        self.folder = self.path or (run_folder(trainer) or Path()) / "predictions"
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "metadata.jsonl").write_text("")
        trainer.strategy.barrier()

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Evaluation,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch."""
        assert isinstance(pl_module, RecastModule)
        with (self.folder / "metadata.jsonl").open("a", encoding="utf-8") as file:
            for i, index in enumerate(prediction.index):
                if not prediction.real[i]:
                    continue
                to_pil(prediction.images[i]).save(self.folder / f"{index:05d}.png")
                values = prediction.scores[i].tolist()
                scores = {
                    name: None if math.isnan(value) else value
                    for name, value in zip(pl_module.rewards, values, strict=True)
                }
                row = {"file_name": f"{index:05d}.png", "prompt": prediction.texts[i], "scores": scores}
                file.write(json.dumps(row) + "\n")
