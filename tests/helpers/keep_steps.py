"""A callback that keeps a checkpoint of every optimizer step, for tests that look at one or go on from it."""

from pathlib import Path
from typing import Any

import lightning as L


class KeepSteps(L.Callback):
    """Writes `checkpoints/step=<n>.ckpt` in the run folder."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        path = Path(str(trainer.log_dir)) / f"checkpoints/step={trainer.global_step}.ckpt"
        if trainer.global_step and not path.exists():
            trainer.save_checkpoint(path)
        trainer.strategy.barrier()
