"""`recast doctor`: is every part of a configuration there and sane, before a GPU is rented?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from rich.table import Table

from recast_lightning.cli.trainer_checks import check_wandb
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import RewardModel
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.module import RecastModule

Verdict = Literal["ok", "note", "FAILED"]
_TOLERANCE = 2e-3  # of a score on another machine, relative to the largest of 1 and the score


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    part: str
    verdict: Verdict
    text: str


def check_configuration(
    trainer: L.Trainer, model: RecastModule, data: PromptDataModule, *, load: bool, checks: dict[str, Callable[[], str]]
) -> list[Finding]:
    """Checks every configured part, each for itself, so that all faults show at once.

    Args:
        trainer: devices and loggers.
        model: policy and rewards.
        data: prompts.
        load: also load the policy and the rewards, and score a picture with each.
        checks: more parts: name -> a function that says what it found or raises.

    Returns:
        Findings in the order of the table.
    """
    rewards = model.rewards
    parts: dict[str, Callable[[], str]] = {
        "devices": partial(_devices, trainer),
        "policy": partial(_policy, model, load),
        "prompts": partial(_prompts, model, data),
    }
    parts |= {f"reward {name}": partial(_reward, reward, load) for name, reward in rewards.items()}
    parts |= checks
    parts |= {f"logger {type(logger).__name__}": partial(_logger, logger) for logger in trainer.loggers}
    return [_finding_of(part, check) for part, check in parts.items()]


def findings_table(findings: list[Finding]) -> Table:
    """The findings, one a row."""
    table = Table()
    for title in ("part", "verdict", "what was found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        colour = {"ok": "green", "note": "yellow", "FAILED": "red"}[finding.verdict]
        table.add_row(finding.part, f"[{colour}]{finding.verdict}[/]", finding.text)
    return table


def check_picture() -> tuple[torch.Tensor, Prompt]:
    """The bundled picture [1, 3, 64, 64] that every reward scores, and its prompt."""
    from recast_lightning.proposals.renderer import RendererProposals
    from recast_lightning.signboard.world import make_prompts

    prompt = make_prompts(1, seed=0, split="test")[0]
    return RendererProposals().images([prompt], 64, 64), prompt


def stored_scores() -> dict[str, float]:
    """Scores of the bundled picture by reward and checkpoint, as `score_key` names them."""
    text = resources.files("recast_lightning").joinpath("rewards/check_scores.json").read_text(encoding="utf-8")
    scores: dict[str, float] = json.loads(text)
    return scores


def score_key(reward: RewardModel) -> str:
    """Name of a reward with its checkpoint."""
    checkpoint = getattr(reward, "model", None) or getattr(getattr(reward, "detector", None), "model", None)
    return f"{reward.name} {reward.version} {checkpoint or ''}".strip()


class Remark(Exception):
    """Not wrong, but worth a look."""


def _finding_of(part: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(part, "ok", check())
    except Remark as note:
        return Finding(part, "note", str(note))
    except Exception as error:
        return Finding(part, "FAILED", " ".join(f"{error}".split()) or type(error).__name__)


def _devices(trainer: L.Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    text = f"{trainer.world_size} × {device.type} ({name}), precision {trainer.precision}, torch {torch.__version__}"
    if device.type == "cpu" and torch.cuda.is_available():
        raise Remark(f"{text}; there are {torch.cuda.device_count()} GPUs, which trainer.accelerator leaves alone")
    return text


def _policy(model: RecastModule, load: bool) -> str:
    policy = model.policy
    policy.validate()
    if not load:
        return f"{policy.path} is there"
    policy.load(model.seed)
    condition = policy.encode_prompts(["a sign"])
    noise = torch.randn(1, *policy.latent_shape, device=policy.device)
    velocity = policy(noise, torch.ones(1, device=policy.device), condition)
    picture = policy.decode(noise)
    if not velocity.isfinite().all() or picture.shape[-2:] != (policy.height, policy.width):
        raise ValueError(f"{policy.path} gives velocities that are not finite, or pictures of {list(picture.shape)}.")
    trained = sum(p.numel() for p in policy.adapter_parameters("default"))
    return f"{policy.path}: latents {list(policy.latent_shape)}, {trained / 1e6:.2f} M trained weights, velocity finite"


def _prompts(model: RecastModule, data: PromptDataModule) -> str:
    data.load_for(model.rewards.values())
    return ", ".join(f"{len(prompts)} for {name}" for name, prompts in data.prompts.items())


def _reward(reward: RewardModel, load: bool) -> str:
    reward.validate()
    if not load:
        return "its files are there"
    image, prompt = check_picture()
    score = float(reward(image, [prompt])[0])
    if score != score:
        raise ValueError("it could not score the bundled picture (NaN): the log has the reason.")
    known = stored_scores().get(score_key(reward))
    if known is None:
        raise Remark(f"scored the bundled picture {score:.4f}; no value is stored for {score_key(reward)!r}")
    if abs(score - known) > _TOLERANCE * max(1.0, abs(known)):
        raise ValueError(f"scored the bundled picture {score:.4f}, but {known:.4f} is stored: another checkpoint?")
    return f"scored the bundled picture {score:.4f}, as stored"


def _logger(logger: Any) -> str:
    folder = Path(logger.save_dir or ".")
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{folder} cannot be written to.")
    free = f"{shutil.disk_usage(existing).free / 2**30:.0f} GiB free in {folder}"
    if isinstance(logger, WandbLogger):
        try:
            check_wandb(logger)
        except ValueError as error:
            raise Remark(f"{free}; {error}") from error
    return free
