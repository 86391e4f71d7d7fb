"""Whole runs with an embedding folder: the same weights, and no text encoder where every prompt is known."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from integration.tiny import ROOT, adapters, config, fit, newest_run
from safetensors.torch import load_file

from recast_lightning.cli import main
from recast_lightning.policy import Condition, Policy
from recast_lightning.policy.embedding_folder import EmbeddingFolder
from recast_lightning.training.data import load_prompts


def changes(folder: Path | None) -> dict:
    embeddings = {"model__policy__init_args__embedding_folder": str(folder)} if folder else {}
    return embeddings | {
        "model__rewards": {
            "clip": {"class_path": "recast_lightning.rewards.ClipScore", "init_args": {"model": "signboard:clip"}}
        },
        "model__stages": [{"name": "only", "epochs": 1, "budgets": {"clip": 1}}],
        "trainer__callbacks__0__init_args__measure_after": False,
    }


def refuse_encoders(monkeypatch) -> None:
    load = StableDiffusion3Pipeline.from_pretrained

    def from_pretrained(path, **kwargs):
        assert kwargs.get("text_encoder", "loaded") is None, "the text encoders were loaded"
        return load(path, **kwargs)

    monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", from_pretrained)


def test_evaluation_encodes_ahead_and_prediction_adds_new_prompts(tmp_path, monkeypatch):
    folder = tmp_path / "e"
    arguments = ["--config", str(config(tmp_path, **changes(folder), data__predict="signboard:train:3"))]
    main(["validate", *arguments])
    kept = EmbeddingFolder(folder, {})
    assert len(list(folder.iterdir())) == 5
    assert all(prompt.text in kept for prompt in load_prompts("signboard:test:5", ocr=False))
    with monkeypatch.context() as patch:
        refuse_encoders(patch)
        main(["validate", *arguments])
        with pytest.raises(AssertionError, match="the text encoders were loaded"):
            main(["predict", *arguments])
    main(["predict", *arguments])
    assert len(list((newest_run(tmp_path) / "predictions").glob("*.png"))) == 3
    assert all(prompt.text in kept for prompt in load_prompts("signboard:train:3", ocr=False))


def test_a_run_with_other_encoders_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    EmbeddingFolder(tmp_path / "e", {"max_sequence_length": "0", "dtype": "bfloat16"}).write(
        "a sign", Condition({"embeddings": torch.zeros(1, 1, 8), "pooled": torch.zeros(1, 8)})
    )
    monkeypatch.setattr(Policy, "load", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, **changes(tmp_path / "e"))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("recast: error: embedding_folder ")
    assert "dtype bfloat16, but this run has dtype float32" in error
    assert len(error.splitlines()) == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without a folder, the first with one, and the folder."""
    place = tmp_path_factory.mktemp("runs")
    return fit(place / "plain", **changes(None)), fit(place / "first", **changes(place / "e")), place / "e"


def same_weights(one: Path, other: Path, tolerance: float = 0.0) -> bool:
    ours, theirs = (adapters(run / "checkpoints/last.ckpt") for run in (one, other))
    return all(float((ours[key] - theirs[key]).abs().max()) <= tolerance for key in ours)


@pytest.mark.slow
def test_a_fit_encodes_what_it_draws_and_the_next_loads_no_encoder(runs, tmp_path, monkeypatch):
    plain, first, folder = runs
    assert same_weights(plain, first)
    assert 5 + 4 <= len(list(folder.iterdir())) <= 5 + 4 + 2  # 5 to evaluate, 4 of the profile, 2 of the rollout
    refuse_encoders(monkeypatch)
    assert same_weights(plain, fit(tmp_path, **changes(folder)))


@pytest.mark.slow
def test_two_processes_with_a_folder_give_the_single_process_adapter(runs, tmp_path):
    plain, _, folder = runs
    file = config(
        tmp_path, **changes(tmp_path / "e"), model__rollout__micro_batch_size=2, trainer__devices=2, trainer__strategy="ddp",
        model__policy__init_args__offload_frozen=True, model__scoring__offload=True, model__scoring__device=["cpu", "cpu"],
    )  # fmt: skip
    command = [sys.executable, "-m", "recast_lightning", "fit", "--config", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_weights(plain, newest_run(tmp_path), tolerance=1e-5)
    new, known = list((tmp_path / "e").iterdir()), [path.name for path in folder.iterdir()]
    assert {path.name for path in new} <= set(known)
    assert all(torch.equal(load_file(p)["embeddings"], load_file(folder / p.name)["embeddings"]) for p in new)
