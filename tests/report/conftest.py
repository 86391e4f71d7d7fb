"""A synthetic run folder: a warm-up on two rewards, then a static stage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from recast_lightning.credit import CreditMatrix, Profile

LEVELS = 10
PROMPTS = ['A sign with "<script>alert(1)</script>" & a red circle', "Two blue squares", "A third prompt"]


def _make_profile(rewards: list[str], levels: int = LEVELS) -> Profile:
    t = torch.arange(levels + 1, dtype=torch.float64) / levels
    curves = [0.9 * torch.sigmoid((where - t) * 12) for where in (0.3, 0.7, 0.5, 0.2, 0.9)][: len(rewards)]
    divergence = torch.stack(curves)
    divergence[0, 8] += 0.05  # one gain that noise turned negative
    if "flat" in rewards:
        divergence[rewards.index("flat")] = -0.1 * t
    errors = torch.full((len(rewards), levels), 0.02, dtype=torch.float64)
    return Profile(
        divergence=divergence,
        stderr=torch.full_like(divergence, 0.02),
        gains_stderr=errors,
        mean_rewards=divergence.exp() / 3,
        sigmas=t,
        rewards=rewards,
        order=2.0,
        posterior="sde2",
        rollouts=1,
        num_proposals=64,
        failed={name: 3 * (name == "ocr") for name in rewards},
        network_calls=64 * levels * (levels + 1) // 2,
    )


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
def make_run() -> Callable[[Path], Path]:
    return _make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return _make_run(tmp_path / "my-run")


def _make_run(folder: Path) -> Path:
    profile = _make_profile(["ocr", "geneval", "flat"])
    first, second = folder / "stages" / "1-warmup", folder / "stages" / "2-second"
    profile.save(first / "profile")
    CreditMatrix.from_profile(profile, {"ocr": 2.0, "geneval": 1.0, "flat": 1.0}).save(first / "credit")
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
