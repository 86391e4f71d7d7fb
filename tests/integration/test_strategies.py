"""The same numbers on one process, under DDP and under FSDP2, through the command line (gloo, CPU)."""

import json
import os
import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from integration.tiny import ROOT, adapters, config, newest_run
from lightning.pytorch.strategies import ModelParallelStrategy
from PIL import Image
from safetensors.torch import load_file

from recast_lightning.cli import main
from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.policy import Policy
from recast_lightning.training.strategies import check_strategy

STAGES = [{"name": "only", "epochs": 2, "budgets": {"clip": 1, "hpsv2": 2}}]
FSDP = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}
PLAIN = (2, "ddp")  # with Lightning's own use_distributed_sampler=True
STRATEGIES = {"single": (1, "auto"), "ddp2": (2, "ddp"), "ddp4": (4, "ddp"), "fsdp2": (2, FSDP), "plain": PLAIN}
REWARDS = {
    "clip": {"class_path": "recast_lightning.rewards.ClipScore", "init_args": {"model": "signboard:clip"}},
    "hpsv2": {"class_path": "recast_lightning.rewards.HPSv2", "init_args": {"model": "signboard:hpsv2"}},
}


def configured(folder, name, callback=None, **changes):
    """Two rollouts of 4 prompts × 4 pictures, four optimizer steps, a profile, evaluations of 7 prompts."""
    processes, strategy = STRATEGIES[name]
    file = config(
        folder,
        keep_steps=True,
        **{
            "model__stages": STAGES,
            "model__rewards": REWARDS,
            "model__rollout__micro_batch_size": 8 // processes,
            "data__prompts_per_rollout": 4,
            "data__validation": "signboard:test:7",
            "trainer__devices": processes,
            "trainer__strategy": strategy,
            "trainer__callbacks__0__init_args__measure_after": False,
            "trainer__use_distributed_sampler": name == "plain",
            **changes,
        },
    )
    if callback is not None:
        written = yaml.safe_load(file.read_text())
        written["trainer"]["callbacks"].append(callback)
        file.write_text(yaml.safe_dump(written))
    return file


def recast(*arguments):
    """Run the command line in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recast_lightning", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


class Runs:
    """Runs `recast fit` under a strategy when it is first asked for."""

    def __init__(self, folder):
        self.folder, self.done = folder, {}

    def __getitem__(self, name):
        if name not in self.done:
            folder = self.folder / name
            record = {"class_path": "helpers.recorder.Recorder", "init_args": {"folder": str(folder / "record")}}
            file = configured(folder, name, record)
            recast("fit", "--config", file)
            self.done[name] = folder
        return self.done[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("strategies"))


SEVERAL = [
    "fsdp2",
    pytest.param("ddp2", marks=pytest.mark.slow),
    pytest.param("ddp4", marks=pytest.mark.slow),
    pytest.param("plain", marks=pytest.mark.slow),
]


def records(folder):
    """Of all processes: training items by (epoch, level, prompt, noise), scores, evaluated pictures."""
    loaded = [torch.load(file, weights_only=False) for file in sorted((folder / "record").glob("rank-*.pt"))]
    items = [
        (e, level, text, noise.numpy().tobytes(), x0, r)
        for part, _, _ in loaded
        for e, level, text, noise, x0, r in part
    ]
    pictures = [picture for _, _, part in loaded for picture in part]
    assert len({item[:4] for item in items}) == len(items), "an image was trained on twice at a level"
    assert len({key for key, _ in pictures}) == len(pictures), "a picture was counted twice"
    return {item[:4]: item[4:] for item in items}, loaded[0][1], dict(pictures)


@pytest.mark.parametrize("name", SEVERAL)
def test_every_image_is_drawn_once_and_means_the_same(runs, name):
    ours, scores, _ = records(runs["single"])
    theirs, their_scores, _ = records(runs[name])
    assert len(ours) == 2 * 16 * 3
    assert ours.keys() == theirs.keys()  # prompts, levels and noise, bitwise
    for key, (x0, r) in ours.items():
        torch.testing.assert_close(theirs[key][0], x0, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs[key][1], r, atol=2e-6, rtol=0)
    for a, b in zip(scores, their_scores, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", SEVERAL)
def test_four_optimizer_steps_train_the_same_adapter(runs, name):
    single, several = (
        torch.load(newest_run(runs[n]) / "checkpoints/last.ckpt", weights_only=True) for n in ("single", name)
    )
    assert single["global_step"] == several["global_step"] == 4
    assert single["state_dict"].keys() == several["state_dict"].keys()
    for key, value in single["state_dict"].items():
        torch.testing.assert_close(several["state_dict"][key], value, atol=1e-5, rtol=0)
    ours, theirs = (load_file(newest_run(runs[n]) / "lora/pytorch_lora_weights.safetensors") for n in ("single", name))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5, rtol=0) for key in ours)
    assert max(float(value.abs().max()) for key, value in ours.items() if "lora_B" in key) > 0


@pytest.mark.parametrize("name", SEVERAL)
def test_profile_and_credit_are_the_same(runs, name):
    folders = [newest_run(runs[n]) / "stages/1-only" for n in ("single", name)]
    one, other = (Profile.load(folder / "profile") for folder in folders)
    torch.testing.assert_close(one.divergence, other.divergence, atol=1e-6, rtol=0)
    torch.testing.assert_close(one.stderr, other.stderr, atol=1e-6, rtol=0)
    assert one.metadata["fingerprints"] == other.metadata["fingerprints"]
    assert one.network_calls == other.network_calls
    weights = [CreditMatrix.load(folder / "credit").weights for folder in folders]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SEVERAL)
def test_an_evaluation_of_seven_prompts_counts_seven_and_draws_the_same_pictures(runs, name):
    """Batches differ, so values differ by float32's rounding: a pixel may only be off by one next to where it rounds."""
    ours, theirs = (newest_run(runs[n]) for n in ("single", name))
    rows = [
        [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()] for run in (ours, theirs)
    ]
    assert [row["rollout"] for row in rows[1]] == [0, 1, 2]
    for a, b in zip(*rows, strict=True):
        assert a["count"] == b["count"] == 7
        assert a["metrics"] == pytest.approx(b["metrics"], abs=5e-6)
    exact = records(runs["single"])[2]
    assert exact.keys() == records(runs[name])[2].keys() == {(e, i) for e in (0, 1, 2) for i in range(7)}
    for (rollout, index), picture in exact.items():
        place = f"images/rollout-{rollout:04d}/{index:03d}.png"
        one, other = (np.asarray(Image.open(run / place)).astype(int) for run in (ours, theirs))
        values = (picture * 255).permute(1, 2, 0).numpy()
        differing = one != other
        assert np.abs(one - other).max() <= 1
        assert np.abs(values[differing] % 1 - 0.5).max(initial=0) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("single", "fsdp2"), ("fsdp2", "single"), ("ddp2", "fsdp2")])
def test_a_checkpoint_resumes_under_another_strategy(runs, tmp_path, first, second):
    """In the middle of an epoch, with the optimizer's moments."""
    checkpoint = newest_run(runs[first]) / "checkpoints/step=3.ckpt"
    recast("fit", "--config", configured(tmp_path, second), "--ckpt_path", checkpoint)
    straight, resumed = (adapters(newest_run(f) / "checkpoints/last.ckpt") for f in (runs["single"], tmp_path))
    for key, value in straight.items():
        torch.testing.assert_close(resumed[key], value, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_sharded_policy_validates_predicts_and_profiles(runs, tmp_path):
    """Seven pictures and five proposals on two processes: unequal shares must not hang."""
    file = configured(tmp_path, "fsdp2", trainer__callbacks__0__init_args__num_prompts=5)
    checkpoint = newest_run(runs["single"]) / "checkpoints/last.ckpt"
    recast("validate", "--config", file, "--ckpt_path", checkpoint)
    recast("predict", "--config", file, "--ckpt_path", checkpoint)
    rows = [json.loads(x) for x in (newest_run(tmp_path) / "predictions/metadata.jsonl").read_text().splitlines()]
    last = json.loads((newest_run(runs["single"]) / "evaluation.jsonl").read_text().splitlines()[-1])
    assert sum(row["scores"]["clip"] for row in rows) / 7 == pytest.approx(last["metrics"]["clip"], abs=1e-5)
    recast("profile", "--config", file, "--ckpt_path", checkpoint, "--output", tmp_path / "out")
    assert Profile.load(tmp_path / "out/profile").num_proposals == 5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_keeps_adapters_and_optimizer_in_float32(runs, tmp_path, precision):
    """Under FSDP2, with gradient checkpointing; the picture of the base stays close, rewards of it too."""
    changes = {"trainer__precision": precision, "model__policy__init_args__gradient_checkpointing": True}
    recast("fit", "--config", configured(tmp_path, "fsdp2", **changes))
    checkpoint = torch.load(newest_run(tmp_path) / "checkpoints/last.ckpt", weights_only=True)
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    moments = [t for state in checkpoint["optimizer_states"][0]["state"].values() for t in state.values()]
    assert {t.dtype for t in moments} == {torch.float32}
    ours, theirs = (
        json.loads((newest_run(f) / "evaluation.jsonl").open().readline()) for f in (runs["single"], tmp_path)
    )
    assert theirs["metrics"] == pytest.approx(ours["metrics"], abs=0.03)
    assert theirs["metrics"] != ours["metrics"]


REFUSED = {
    "FSDP1": ("fsdp", "trainer.strategy 'fsdp' is not supported: take configs/strategy/fsdp.yaml"),
    "FSDP1 with offload": ("fsdp_cpu_offload", "ModelParallelStrategy (FSDP2)"),
    "DeepSpeed": ("deepspeed_stage_2", "trainer.strategy 'deepspeed_stage_2' is not supported"),
    "FSDP1 as an object": (
        {"class_path": "lightning.pytorch.strategies.FSDPStrategy"},
        "FSDPStrategy' is not supported",
    ),
    "sizes left open": ({**FSDP, "init_args": {"tensor_parallel_size": 1}}, "auto, which means the number of nodes"),
    "wrong size": (
        {**FSDP, "init_args": {**FSDP["init_args"], "data_parallel_size": 4}},
        "data_parallel_size 4: set it to the number of processes (devices × num_nodes), 2.",
    ),
    "tensor parallel": (
        {**FSDP, "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 2}},
        "tensor_parallel_size 2, but policies are only sharded over data_parallel_size: set it to 1.",
    ),
    "distributed checkpoint": (
        {**FSDP, "init_args": {**FSDP["init_args"], "save_distributed_checkpoint": True}},
        "save_distributed_checkpoint true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_strategies_that_cannot_train_are_refused_in_a_sentence(case, tmp_path, capsys):
    strategy, message = REFUSED[case]
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(configured(tmp_path, "fsdp2", trainer__strategy=strategy))])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_plain_trainer_refuses_them_too():
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(), logger=False)
    with pytest.raises(ValueError, match="tensor_parallel_size auto"):
        check_strategy(trainer, Policy())
