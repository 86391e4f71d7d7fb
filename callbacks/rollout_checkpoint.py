"""Checkpoints whose cadence is in rollouts, and a run that can be stopped and resumed anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from recast_lightning.checkpointing import records
from recast_lightning.checkpointing.atomic import AtomicCheckpointIO
from recast_lightning.checkpointing.lightning_counters import count_as_rollout_begun, rollout_is_whole
from recast_lightning.files import write_atomically
from recast_lightning.training import RecastModule
from recast_lightning.training.trainer import run_folder


class RolloutCheckpoint(Checkpoint):
    """Keeps `checkpoints/last.ckpt` up to date, and `checkpoints/rollout-<k>.ckpt` of some rollouts.

    The last one is written when W was built, after optimizer steps and at the end of each rollout, so that a signal can stop
    the run at once and a crash costs a step. A resumed run goes on with the records of the one it comes from.

    Args:
        every_n_epochs: how often, in epochs of one rollout each, a checkpoint is kept under its own name, besides `last.ckpt`.
        keep: how many of those are kept, the newest; -1 keeps all.
        every_n_steps: optimizer steps between two writings of `last.ckpt` within a rollout; 0 writes it between rollouts
            only.
    """

    def __init__(self, every_n_epochs: int = 10, keep: int = 3, every_n_steps: int = 1) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}.")
        if keep < -1:
            raise ValueError(f"keep must be a number of checkpoints, or -1 for all, got {keep}.")
        if every_n_steps < 0:
            raise ValueError(f"every_n_steps must be at least 0, got {every_n_steps}.")
        self.every_n_epochs, self.keep, self.every_n_steps = every_n_epochs, keep, every_n_steps
        self.folder = Path()
        self._saved_credit: Any = None
        self._saved_step = -1
        self._counts: dict[str, int] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write checkpoints whole, and let signals stop the run at its stop points."""
        assert isinstance(pl_module, RecastModule)
        self.folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"
        if stage == "fit":
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
            pl_module.interruption.catch_slurm()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave signals as they were, and the records of a run that was finished already."""
        assert isinstance(pl_module, RecastModule)
        pl_module.interruption.release()
        if trainer.is_global_zero:
            records.put_metrics_back(self.folder.parent)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Likewise, where there will be no teardown."""
        self.teardown(trainer, pl_module, "fit")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals from here on."""
        assert isinstance(pl_module, RecastModule)
        pl_module.interruption.catch()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals; go on with the records of the run that is resumed."""
        assert isinstance(pl_module, RecastModule)
        pl_module.interruption.catch()
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            for part in self.folder.glob(".*.part"):
                part.unlink()  # what a killed run was writing
        if pl_module.resumed.sentence:
            rank_zero_only(print)(f"Resumed {trainer.ckpt_path}: {pl_module.resumed.sentence}")
        if self._counts is not None and trainer.is_global_zero and trainer.loggers:
            source, counts = Path(str(trainer.ckpt_path)).absolute().parents[1], self._counts
            run = self.folder.absolute().parent
            done, stage = counts["rollouts.jsonl"], pl_module.credit.credit_stage + 1
            anew = pl_module.resumed.incomparable
            rows = records.continue_records(source, run, counts, done, stage, anew=anew)
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger) and Path(logger.log_dir).absolute() == run:
                    logger.experiment.metrics.extend(rows)
                    logger.save()
                    (run / records.SET_ASIDE).unlink(missing_ok=True)

    # When ----------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep a W that was just built: its profile is dear."""
        assert isinstance(pl_module, RecastModule)
        if pl_module.credit.current(trainer.current_epoch, pl_module.policy.sigmas) is not self._saved_credit:
            count_as_rollout_begun(trainer)
            self._save(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after an optimizer step; that of a rollout's last step is left to its end."""
        assert isinstance(pl_module, RecastModule)
        due = self.every_n_steps and trainer.global_step >= self._saved_step + self.every_n_steps
        if due and batch_idx + 1 < trainer.num_training_batches:
            self._save(trainer, pl_module)
        pl_module.context.stop_point()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, if the rollout was trained on as a whole (`max_steps` can end it before); keep some under their own name."""
        assert isinstance(pl_module, RecastModule)
        if not rollout_is_whole(trainer):
            return
        self._save(trainer, pl_module)
        done = trainer.current_epoch + 1
        if done % self.every_n_epochs == 0 and self.keep and trainer.is_global_zero:
            name = self.folder / f"rollout-{done:04d}.ckpt"
            write_atomically(name, (self.folder / "last.ckpt").read_bytes())
            for old in sorted(self.folder.glob("rollout-*.ckpt"))[: -self.keep] if self.keep > 0 else ():
                old.unlink()

    def _save(self, trainer: L.Trainer, module: RecastModule) -> None:
        trainer.save_checkpoint(self.folder / "last.ckpt")
        self._saved_credit, self._saved_step = module.credit.credit, trainer.global_step

    # What ----------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put down how far the records are, written out in full."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
            checkpoint["records"] = records.count_records(self.folder.parent)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take note of how far the records are."""
        self._counts = checkpoint.get("records")
