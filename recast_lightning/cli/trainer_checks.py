"""Checks of the Trainer's options, before it is built and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import StrategyRegistry

from recast_lightning.cli.sentences import suggestion
from recast_lightning.ranges import check_ranges

_RANGES = {
    "accumulate_grad_batches": "[1, inf)",
    "check_val_every_n_epoch": "[1, inf)",
    "gradient_clip_val": "[0, inf)",
    "num_nodes": "[1, inf)",
    "num_sanity_val_steps": "[-1, inf)",
}


def check_trainer(options: Any) -> None:
    """Check what was asked of the Trainer, and that the machine has it.

    Args:
        options: the Trainer's arguments, by name.

    Raises:
        ValueError: naming the first option that is wrong.
    """
    given = {name: options[name] for name in _RANGES if options[name] is not None}
    check_ranges({f"trainer.{k}": v for k, v in given.items()}, {f"trainer.{k}": _RANGES[k] for k in given})
    if options.max_steps == 0 or options.max_steps < -1:
        raise ValueError(f"trainer.max_steps must be at least 1, or -1 for no limit, got {options.max_steps}.")
    accelerators = ("auto", "gpu", *AcceleratorRegistry.available_accelerators())
    if isinstance(options.accelerator, str) and options.accelerator not in accelerators:
        raise ValueError(
            f"trainer.accelerator is {options.accelerator!r}, which is unknown{suggestion(options.accelerator, accelerators)}"
        )
    there = {"gpu": torch.cuda.is_available() or torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not there.get(str(options.accelerator), True):
        raise ValueError(f"trainer.accelerator is {options.accelerator!r}, but torch sees no GPU here: take cpu.")
    known = StrategyRegistry.available_strategies()
    if isinstance(options.strategy, str) and options.strategy not in ("auto", *known):
        raise ValueError(
            f"trainer.strategy is {options.strategy!r}, which is unknown{suggestion(options.strategy, known, show=False)} "
            "For example auto, ddp, or class_path: ModelParallelStrategy."
        )
    _check_devices(options.devices, options.accelerator)


def _check_devices(devices: Any, accelerator: Any) -> None:
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if devices == "auto" or (devices in (-1, "-1") and not on_cpu):
        return
    count = int(devices) if isinstance(devices, str) and devices.lstrip("-").isdigit() else devices
    if on_cpu and (not isinstance(count, int) or count < 1):
        raise ValueError(f"trainer.devices is {devices!r}: on the CPU it is a number of processes, at least 1.")
    if not on_cpu and isinstance(count, int) and not 1 <= count <= torch.cuda.device_count():
        raise ValueError(f"trainer.devices is {devices!r}, but there are {torch.cuda.device_count()} GPUs here.")


def check_run(trainer: L.Trainer, items: int) -> None:
    """Check the Trainer that was built.

    Args:
        trainer: with its loggers.
        items: training steps of a rollout on each process; 0 where nothing is trained.

    Raises:
        ValueError: if optimizer steps do not fill a rollout, the run would have no folder of its own, or one that cannot be
            made, or W&B would ask for a key.
    """
    first = trainer.loggers[0] if trainer.loggers else None
    if first is not None and not isinstance(first, (CSVLogger, TensorBoardLogger, DummyLogger)):
        raise ValueError(
            f"trainer.logger begins with {type(first).__name__}, which gives all runs one folder: put CSVLogger before it."
        )
    _check_folder(Path(getattr(first, "root_dir", None) or trainer.default_root_dir))
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            check_wandb(logger)
    steps = trainer.accumulate_grad_batches
    if items and items % steps:
        below = max(d for d in range(1, min(steps, items) + 1) if items % d == 0)
        raise ValueError(
            f"trainer.accumulate_grad_batches {steps} does not divide the {items} training steps of a rollout on each "
            f"process, so its last optimizer step would weigh less: take {below}, or another divisor."
        )


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, or written to."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"The run's folder {str(folder)!r} cannot be made: {str(there)!r} is a file.")
    if not os.access(there, os.W_OK):
        raise ValueError(f"The run's folder {str(folder)!r} cannot be made: {str(there)!r} cannot be written to.")


def check_wandb(logger: WandbLogger) -> None:
    """Refuse to log to W&B at once without a key, for which it would ask when the models are loaded.

    Raises:
        ValueError: saying where a key can be.
    """
    if logger._offline or "WANDB_API_KEY" in os.environ:
        return  # before wandb sets itself up, which would settle its mode before the logger says offline
    import wandb

    mode = logger._wandb_init.get("mode") or os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "WandbLogger logs at once, but W&B has no key: run `wandb login`, or set WANDB_API_KEY or offline: true."
        )
