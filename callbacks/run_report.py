"""Keeps a run's evaluations, rollouts and pictures in its folder, and writes report.html from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast_lightning.checkpointing.settings import EVALUATION, MODEL, belongs_to, versions
from recast_lightning.evaluation import Evaluation
from recast_lightning.report import write_report
from recast_lightning.rollout.processes import gather_values
from recast_lightning.training import RecastModule
from recast_lightning.training.run_settings import settings_of
from recast_lightning.training.trainer import run_folder


class RunReport(L.Callback):
    """Records every evaluation, the base policy's first, and ends `fit` with a self-contained `report.html`.

    The base policy is evaluated by Lightning's sanity check: set `trainer.num_sanity_val_steps` to -1.

    Args:
        num_images: evaluation pictures to keep each time.
    """

    def __init__(self, num_images: int = 16) -> None:
        self.num_images = num_images
        self.report: Path | None = None
        self._rows: list[dict[str, Any]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start afresh."""
        self._rows = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Keep this process's scores and first pictures."""
        assert isinstance(outputs, Evaluation)
        for i, index in enumerate(outputs.index):
            if outputs.real[i]:
                picture = outputs.images[i] if index < self.num_images else None
                self._rows.append({"index": index, "scores": outputs.scores[i], "picture": picture})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one line of `evaluation.jsonl` and the pictures."""
        assert isinstance(pl_module, RecastModule)
        if trainer.state.fn != "fit":
            return
        gathered = gather_values(self._rows)
        folder = run_folder(trainer)
        if not trainer.is_global_zero or folder is None:
            return
        rows = sorted((row for part in gathered for row in part), key=lambda row: row["index"])
        done = 0 if trainer.sanity_checking else trainer.current_epoch + 1
        stage = pl_module.credit.stage(trainer.current_epoch).name
        record = _summarise(rows, list(pl_module.rewards))
        record |= {"rollout": done, "stage": stage if done else "", "count": len(rows)}
        settings = settings_of(pl_module)
        record["settings"] = {
            name: value for name, value in settings.items() if belongs_to(name, (*MODEL, *EVALUATION))
        }
        record["versions"] = versions()
        _append(folder / "evaluation.jsonl", record)
        _save_pictures(folder / "images" / f"rollout-{done:04d}", rows)
        texts = [p.text for p in pl_module.data.prompts["validation"][: self.num_images]]
        (folder / "images" / "prompts.json").write_text(json.dumps(texts, indent=1))
        for logger in trainer.loggers:
            if trainer.sanity_checking:
                logger.log_metrics({f"val/{k}": v for k, v in record["metrics"].items()}, step=0)
            if hasattr(logger, "log_image"):
                pictures = [row["picture"] for row in rows if row["picture"] is not None]
                logger.log_image("val/images", [to_pil(p) for p in pictures], caption=texts, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one line of `rollouts.jsonl`."""
        assert isinstance(pl_module, RecastModule)
        folder = run_folder(trainer)
        if trainer.is_global_zero and folder is not None:
            train = {f"train/{k}": v for k, v in pl_module.run_state.step_means.rollout().items()}
            record = {"rollout": trainer.current_epoch + 1, "stage": pl_module.credit.stage(trainer.current_epoch).name}
            record["metrics"] = pl_module.run_state.metrics | train
            _append(folder / "rollouts.jsonl", record)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the trained adapter for diffusers, and the report."""
        assert isinstance(pl_module, RecastModule)
        folder = run_folder(trainer)
        if folder is not None:
            pl_module.policy.save_lora(folder / "lora", write=trainer.is_global_zero)
        if trainer.is_global_zero and folder is not None:
            self.report = write_report(folder)


def _summarise(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    scores = torch.stack([row["scores"] for row in rows]).double()
    metrics, stderr, failed, kept = {}, {}, {}, {}
    for name, column in zip(names, scores.T, strict=True):
        valid = column[column.isfinite()]
        metrics[name] = valid.mean().item()
        stderr[name] = (valid.std() / max(len(valid), 1) ** 0.5).item()
        failed[name] = len(column) - len(valid)
        kept[name] = [round(value, 5) if math.isfinite(value) else None for value in column.tolist()]
    return {"metrics": metrics, "stderr": stderr, "failed": failed, "scores": kept}


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def to_pil(picture: Tensor) -> Image.Image:
    """A picture [3, H, W] in [0, 1] as an 8-bit image."""
    return Image.fromarray((picture.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy().astype(np.uint8))


def _save_pictures(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["picture"] is not None:
            to_pil(row["picture"]).save(folder / f"{row['index']:03d}.png")
