"""A whole run of a FLUX.1 policy: the demo's configuration cut down, of which only path and picture size change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from helpers import tiny_flux
from integration.tiny import ROOT, adapters, config, fit, newest_run
from PIL import Image

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.policy.families.flux import pack
from recast_lightning.seeds import noise

FSDP = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}


def changes(pipeline: Path) -> dict:
    policy = {"path": str(pipeline), "height": 48, "width": 80}
    return {f"model__policy__init_args__{key}": value for key, value in policy.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Path]:
    """The pipeline's folder and the run's."""
    place = tmp_path_factory.mktemp("flux")
    pipeline = tiny_flux.save_pipeline(place / "pipeline")
    return pipeline, fit(place, **changes(pipeline))


def test_flux_is_profiled_trained_evaluated_and_exported(run):
    _, folder = run
    profile, credit = (
        Profile.load(folder / "stages/1-warmup/profile"),
        CreditMatrix.load(folder / "stages/1-warmup/credit"),
    )
    assert profile.rewards == credit.rewards == ["clip", "hpsv2"]
    assert torch.equal(profile.sigmas, credit.sigmas)
    mu = 0.5 + (15 - 256) * 0.65 / 3840  # 3 × 5 tokens
    expected = [1 / (1 + torch.tensor(-mu).exp() * (1 / (k / 3) - 1)) for k in (1, 2, 3)]
    torch.testing.assert_close(profile.sigmas[1:].float(), torch.stack(expected), atol=1e-6, rtol=0)
    evaluations = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert [e["rollout"] for e in evaluations] == [0, 1, 2, 3]
    assert evaluations[0]["metrics"] != evaluations[-1]["metrics"]
    weights = adapters(folder / "checkpoints/last.ckpt")
    assert all(value.isfinite().all() for value in weights.values())
    moved = {key for key in weights if "lora_B.default" in key and weights[key].abs().sum() > 0}
    assert moved == {key for key in weights if "lora_B.default" in key}
    assert {key.split(".")[2] for key in moved} == {"transformer_blocks", "single_transformer_blocks"}
    with Image.open(next((folder / "images").rglob("*.png"))) as picture:
        assert picture.size == (80, 48)


def test_diffusers_draws_with_the_exported_adapter(run):
    pipeline, folder = run
    flux = FluxPipeline.from_pretrained(pipeline)
    flux.set_progress_bar_config(disable=True)
    start = pack(noise((16, 6, 10), [("test", 0)]))

    def draw() -> torch.Tensor:
        latents: torch.Tensor = flux(
            "a red sign", height=48, width=80, num_inference_steps=3, latents=start, output_type="latent"
        ).images
        return latents

    base = draw()
    flux.load_lora_weights(folder / "lora")
    assert flux.get_list_adapters()
    assert not torch.allclose(draw(), base, atol=1e-4)


@pytest.mark.slow
def test_sharded_over_two_processes_flux_trains_the_same_adapter(run, tmp_path):
    """One optimizer step a rollout: of six items on one process, of three on each of two."""
    alone = fit(tmp_path / "alone", **changes(run[0]), trainer__accumulate_grad_batches=6)
    file = config(tmp_path / "sharded", **changes(run[0]), trainer__devices=2, trainer__strategy=FSDP)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "recast_lightning", "fit", "--config", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = (adapters(r / "checkpoints/last.ckpt") for r in (alone, newest_run(tmp_path / "sharded")))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, atol=1e-4, rtol=0)
