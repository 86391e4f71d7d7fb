"""Writes down what each process of a run trained on."""

from pathlib import Path

import lightning as L
import torch


class Recorder(L.Callback):
    """Keeps training items, each rollout's gathered scores and evaluated pictures, in `<folder>/rank-<r>.pt`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.items, self.scores, self.pictures = Path(folder), [], [], []

    def setup(self, trainer, pl_module, stage):
        advantages = pl_module.collector.advantages

        def recording(rewards, level_weights, groups):
            self.scores.append(rewards[groups.argsort(stable=True)])
            return advantages(rewards, level_weights, groups)

        pl_module.collector.advantages = recording

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        tensors = (batch.noise, batch.latents, batch.optimality_probability)
        rows = zip(batch.levels.tolist(), batch.texts, *tensors, strict=True)
        self.items += [(trainer.current_epoch, *row) for row in rows]

    def on_validation_batch_end(self, trainer, pl_module, outputs, *args, **kwargs):
        done = 0 if trainer.sanity_checking else trainer.current_epoch + 1
        rows = zip(outputs.index, outputs.real, outputs.images, strict=True)
        self.pictures += [((done, index), picture) for index, real, picture in rows if real]

    def on_fit_end(self, trainer, pl_module):
        self.folder.mkdir(exist_ok=True)
        torch.save((self.items, self.scores, self.pictures), self.folder / f"rank-{trainer.global_rank}.pt")
