"""A whole run in seconds, through the real command line: the embedded base, tiny sizes."""

from pathlib import Path

import torch
import yaml

from recast_lightning.cli import main

ROOT = Path(__file__).parents[2]


def config(folder: Path, *, keep_steps: bool = False, **changes) -> Path:
    """Write the demo's configuration cut down; `changes` are dotted paths with `__` for the dots.

    With `keep_steps`, there is `checkpoints/step=<n>.ckpt` of each optimizer step.
    """
    text = yaml.safe_load((ROOT / "configs/signboard/demo.yaml").read_text())
    text["model"]["policy"]["init_args"] |= {"num_steps": 3, "lora_rank": 4}
    text["model"]["objective"]["kl_weight"] = 1e-4
    text["model"] |= {
        "rollout": {"batch_size": 8, "micro_batch_size": 4},
        "stages": [
            {"name": "warmup", "epochs": 2, "budgets": {"clip": 1, "hpsv2": 1}},
            {"name": "text", "epochs": 1, "budgets": {"clip": 1, "ocr": 2}, "credit": "static"},
        ],
    }
    text["data"] |= {
        "train": "signboard:train:12",
        "validation": "signboard:test:5",
        "prompts_per_rollout": 2,
        "group_size": 4,
        "evaluation_batch_size": 4,
    }
    text["trainer"] |= {"devices": 1, "strategy": "auto", "accumulate_grad_batches": 3, "check_val_every_n_epoch": 1}
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    text["trainer"]["logger"] = [logger]
    text["trainer"]["callbacks"][0]["init_args"] |= {"num_prompts": 4, "levels": None}
    text["trainer"]["callbacks"][-1]["init_args"] = {"every_n_epochs": 1, "keep": -1}
    if keep_steps:
        text["trainer"]["callbacks"].append({"class_path": "helpers.keep_steps.KeepSteps"})
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = text
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(text))
    return file


def fit(folder: Path, *arguments: str, **changes) -> Path:
    """Run `recast fit`; returns the run's folder."""
    main(["fit", "--config", str(config(folder, **changes)), *arguments])
    return newest_run(folder)


def newest_run(folder: Path) -> Path:
    return max((folder / "run").glob("version_*"), key=lambda p: int(p.name.split("_")[1]))


def adapters(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def with_wandb(folder):
    """Loggers of a run in `folder`, W&B offline among them."""
    csv = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder), "name": "run"}}
    options = {"save_dir": str(folder), "project": "test", "offline": True}
    return [csv, {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": options}]
