"""A synthetic run folder: a warm-up on three rewards, measured again on its way and after it, then a static stage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recast_lightning.credit import CreditMatrix, Profile

LEVELS = 10
PROMPTS = ['A sign with "<script>alert(1)</script>" & a red circle', "Two blue squares", "A third prompt"]


def _make_profile(
    rewards: list[str],
    levels: int = LEVELS,
    *,
    scale: float = 1.0,
    measured: list[int] | None = None,
    importance: bool = False,
    **changed: Any,
) -> Profile:
    """Gains that peak at different levels for the rewards, none for "flat", with bootstrap replicates."""
    t = torch.arange(levels + 1, dtype=torch.float64) / levels
    curves = [scale * 0.9 * torch.sigmoid((where - t) * 12) for where in (0.3, 0.7, 0.5, 0.2, 0.9)][: len(rewards)]
    divergence = torch.stack(curves)
    divergence[0, 8:9] += 0.05 * scale  # one gain that noise turned negative
    if "flat" in rewards:
        divergence[rewards.index("flat")] = -0.1 * t
    noise = torch.randn(100, len(rewards), levels + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values: dict[str, Any] = {
        "divergence": divergence,
        "replicates": divergence + 0.01 * noise,
        "nested_bias": torch.zeros_like(divergence),
        "mean_rewards": divergence.exp() / 3,
        "sigmas": t,
        "rewards": rewards,
        "order": 2.0,
        "posterior": "sde2",
        "steps": "auto",
        "levels": measured or list(range(1, levels + 1)),
        "rollouts": [1] * len(measured or range(levels)),
        "num_proposals": 64,
        "num_prompts": 16,
        "failed": {name: 3 * (name == "ocr") for name in rewards},
        "effective_samples": dict.fromkeys(rewards, 2.5) if importance else {},
        "network_calls": 64 * levels * (levels + 1) // 2,
    }
    return Profile(**{**values, **changed})


def _make_evaluations() -> list[dict]:
    values = {0: (0.41, 0.60, 2.5), 2: (0.50, 0.58, 2.5), 4: (0.62, 0.55, 2.5)}
    return [
        {
            "rollout": rollout,
            "stage": {0: "", 2: "warmup", 4: "second"}[rollout],
            "metrics": dict(zip(["ocr", "geneval", "hpsv2"], means, strict=True)),
            "stderr": {"ocr": 0.03, "geneval": 0.04, "hpsv2": 0.001},
            "failed": {"ocr": rollout // 2, "geneval": 0, "hpsv2": 0},
            "count": 48,
        }
        for rollout, means in values.items()
    ]


@pytest.fixture
def make_profile() -> Callable[..., Profile]:
    return _make_profile


@pytest.fixture
def evaluations() -> list[dict]:
    return _make_evaluations()


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to read only."""
    return _make_run(tmp_path_factory.mktemp("intact") / "my-run")


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> Path:
    """A run to damage."""
    return Path(shutil.copytree(intact, tmp_path / "my-run"))


def _make_run(folder: Path) -> Path:
    profile = _make_profile(["ocr", "geneval", "flat"])
    first, second = folder / "stages" / "1-warmup", folder / "stages" / "2-second"
    budgets = {"ocr": 2.0, "geneval": 1.0, "flat": 1.0}
    profile.save(first / "profile")
    CreditMatrix.from_profile(profile, budgets).save(first / "credit")
    _make_profile(["ocr", "geneval", "flat"], scale=0.1).save(first / "after")
    again = _make_profile(["ocr", "geneval", "flat"], scale=0.5)
    again.save(first / "rollout-1" / "profile")
    CreditMatrix.from_profile(again, budgets).save(first / "rollout-1" / "credit")
    CreditMatrix.from_gains(torch.ones(2, LEVELS), {"ocr": 1.0, "geneval": 3.0}, "static").save(second / "credit")
    lines = [json.dumps(line) for line in _make_evaluations()]
    (folder / "evaluation.jsonl").write_text("\n".join(lines) + "\n")
    rollouts = [
        {"rollout": n, "stage": "warmup" if n < 3 else "second", "metrics": {"reward/ocr/mean": 0.1 * n, "r/mean": 0.5}}
        for n in range(1, 5)
    ]
    (folder / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)) + "\n")
    (folder / "config.yaml").write_text("seed: 7\nname: <b>bold</b>\n")
    for rollout in (0, 2, 4):
        pictures = folder / "images" / f"rollout-{rollout:04d}"
        pictures.mkdir(parents=True)
        for i in range(len(PROMPTS)):
            Image.new("RGB", (64, 64), (60 * rollout, 80 * i, 90)).save(pictures / f"{i:03d}.png")
    (folder / "images" / "prompts.json").write_text(json.dumps(PROMPTS))
    return folder
