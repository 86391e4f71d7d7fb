"""A run's records on disk (what was logged, evaluated and drawn), and how a resumed run goes on with them."""

from __future__ import annotations

import csv
import os
import re
import shutil
from pathlib import Path
from typing import Any

from recast_lightning.files import write_atomically

EVALUATIONS = "evaluation.jsonl"
LINES = (EVALUATIONS, "rollouts.jsonl")
METRICS = "metrics.csv"
WANDB_RUN = "wandb_run_id"
SET_ASIDE = "metrics.before-resume.csv"  # CSVLogger deletes the metrics.csv that it finds


def newest_checkpoint(folder: Path) -> Path | None:
    """The `last.ckpt` that was written last, among the runs `version_*` of a folder."""
    found = folder.glob("version_*/checkpoints/last.ckpt")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def count_records(run: Path) -> dict[str, int]:
    """How many lines each record of a run holds, as a checkpoint keeps it."""
    counts = {name: len(_lines(run / name)) for name in LINES}
    return {**counts, METRICS: len(_rows(run / METRICS))}


def set_metrics_aside(run: Path) -> None:
    """Keep metrics.csv from a logger that starts anew in the same folder."""
    if (run / METRICS).is_file() and not (run / SET_ASIDE).is_file():
        os.replace(run / METRICS, run / SET_ASIDE)


def put_metrics_back(run: Path) -> None:
    """Undo `set_metrics_aside`, where nothing was written in its place."""
    if (run / SET_ASIDE).is_file() and not (run / METRICS).is_file():
        os.replace(run / SET_ASIDE, run / METRICS)


def note_wandb_run(run: Path, identity: str) -> None:
    """Write down which W&B run this one logs to."""
    (run / WANDB_RUN).write_text(identity)


def wandb_run(run: Path) -> str | None:
    """What `note_wandb_run` wrote."""
    path = run / WANDB_RUN
    return path.read_text() if path.is_file() else None


def continue_records(
    source: Path, run: Path, counts: dict[str, int], rollout: int, stage: int, *, anew: bool = False
) -> list[dict[str, Any]]:
    """Bring the records of `source` up to a checkpoint into `run` (which may be `source`), and drop what came after it.

    Args:
        source: the run that wrote the checkpoint.
        run: the run that goes on.
        counts: what `count_records` said at the checkpoint.
        rollout: how many rollouts were done then.
        stage: the stage that was under way, from 1.
        anew: whether evaluations and their pictures end here, in `before-rollout-<k>/`: nothing to come compares with them.

    Returns:
        The rows of metrics.csv, for the logger to write again.
    """
    if anew:
        aside = run / f"before-rollout-{rollout + 1:04d}"
        aside.mkdir(parents=True, exist_ok=True)
        for path in (source / EVALUATIONS, source / "images"):
            bring: Any = shutil.move if source == run else shutil.copytree if path.is_dir() else shutil.copy2
            if path.exists():
                bring(str(path), str(aside / path.name))
    for name in LINES:
        if (source / name).is_file() and not (anew and name == EVALUATIONS):
            write_atomically(run / name, "".join(_lines(source / name)[: counts[name]]).encode())
    folders = (*(() if anew else source.glob("images/*")), *source.glob("stages/*"))
    for folder in folders if source != run else ():
        number = int(re.sub(r"\D.*", "", folder.name.removeprefix("rollout-")) or 0)
        if number <= (rollout if folder.parent.name == "images" else stage):
            copy = shutil.copytree if folder.is_dir() else shutil.copy2
            (run / folder.parent.name).mkdir(exist_ok=True)
            copy(folder, run / folder.parent.name / folder.name)
    kept = source / SET_ASIDE
    return _rows(kept if kept.is_file() else source / METRICS)[: counts[METRICS]]


def _lines(path: Path) -> list[str]:
    """Whole lines: one that was being written when the process was killed is none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith("\n")]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file, without their empty cells."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
