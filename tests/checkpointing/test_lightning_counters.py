"""What we rely on in Lightning's loops: a checkpoint written as an epoch begins lets that epoch, whole, be what comes next."""

import contextlib

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from recast_lightning.checkpointing.lightning_counters import count_as_rollout_begun, rollout_is_whole

EPOCHS, ITEMS = 3, 4


class Counted(L.LightningModule):
    """Notes which items it sees; two items make an optimizer step."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch_idx))
        return self.layer(batch).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(torch.ones(ITEMS, 1))


class Stop(Exception):
    pass


class SaveAsItBegins(L.Callback):
    """Saves as an epoch begins, and breaks off there (`at` None: never)."""

    def __init__(self, path, at, whole=None):
        self.path, self.at, self.whole = path, at, whole

    def on_train_epoch_start(self, trainer, pl_module):
        count_as_rollout_begun(trainer)
        trainer.save_checkpoint(self.path)
        if trainer.current_epoch == self.at:
            raise Stop

    def on_train_epoch_end(self, trainer, pl_module):
        if self.whole is not None:
            self.whole.append(rollout_is_whole(trainer))


def train(path, at=None, resume=False, whole=None, **options):
    module = Counted()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[SaveAsItBegins(path, at, whole)], **options,
    )  # fmt: skip
    with contextlib.suppress(Stop):
        trainer.fit(module, ckpt_path=path if resume else None)
    return module, trainer


@pytest.mark.parametrize("times", [1, 3])
def test_a_run_stopped_as_an_epoch_begins_goes_on_with_that_epoch_whole(tmp_path, times):
    path = tmp_path / "a.ckpt"
    straight, _ = train(tmp_path / "straight.ckpt")
    first, _ = train(path, at=1)
    assert first.seen == [(0, i) for i in range(ITEMS)]
    counters = torch.load(path)["loops"]["fit_loop"]
    done = counters["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert (done["current"]["completed"], done["total"]["completed"]) == (0, ITEMS // 2)
    assert counters["epoch_loop.scheduler_progress"]["current"]["completed"] == 0
    for _ in range(times - 1):  # stopped again and again at one place
        again, _ = train(path, at=1, resume=True)
        assert again.seen == []
        assert torch.load(path)["loops"]["fit_loop"] == counters
    rest, trainer = train(path, resume=True)
    assert first.seen + rest.seen == straight.seen == [(e, i) for e in range(EPOCHS) for i in range(ITEMS)]
    assert trainer.global_step == EPOCHS * ITEMS // 2
    assert torch.equal(rest.layer.weight, straight.layer.weight)


def test_an_epoch_that_max_steps_ends_is_not_whole(tmp_path):
    whole = []
    train(tmp_path / "a.ckpt", whole=whole)
    assert whole == [True] * EPOCHS
    whole.clear()
    train(tmp_path / "a.ckpt", whole=whole, max_steps=3)
    assert whole == [True, False]
