"""The whole job through the command line: what it leaves, that it resumes exactly, that two processes agree with one."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.same_run import assert_same_run
from integration.tiny import ROOT, adapters, config, fit, newest_run, with_wandb

from recast_lightning.cli import main
from recast_lightning.credit import CreditMatrix, Profile


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One uninterrupted run."""
    return fit(tmp_path_factory.mktemp("straight"))


def test_a_run_leaves_profile_credit_evaluations_report_and_adapter(run):
    profile = Profile.load(run / "stages/1-warmup/profile")
    credit = CreditMatrix.load(run / "stages/1-warmup/credit")
    assert profile.rewards == credit.rewards == ["clip", "hpsv2"]
    assert profile.network_calls == 4 * 5
    assert profile.metadata["fingerprints"].keys() == {"policy", "prompts"}
    after = Profile.load(run / "stages/1-warmup/after")
    assert after.rewards == profile.rewards
    assert after.metadata["fingerprints"]["prompts"] == profile.metadata["fingerprints"]["prompts"]
    assert after.metadata["fingerprints"]["policy"] != profile.metadata["fingerprints"]["policy"]
    assert not (run / "stages/2-text/after.safetensors").exists()  # static: never measured
    assert max(credit.residuals) < 1e-6
    assert CreditMatrix.load(run / "stages/2-text/credit").level_weights.tolist() == [[1 / 3] * 3, [2 / 3] * 3]
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [e["rollout"] for e in evaluations] == [0, 1, 2, 3]
    assert all(set(e["metrics"]) == {"clip", "hpsv2", "pickscore", "ocr", "geneval"} for e in evaluations)
    assert all(e["count"] == 5 for e in evaluations)
    assert (run / "lora/pytorch_lora_weights.safetensors").is_file()
    report = (run / "report.html").read_text()
    assert "warmup" in report
    assert "://" not in report.split("<details")[0]
    for name in ("gain_curves", "normalized_gains", "weights"):
        assert (run / f"stages/1-warmup/{name}.png").stat().st_size > 5000


def test_training_moved_the_trained_adapter_and_the_old_one_followed(run):
    weights = adapters(run / "checkpoints/last.ckpt")
    default = {k: v for k, v in weights.items() if ".default." in k}
    moved = [float((v - weights[k.replace(".default.", ".old.")]).abs().max()) for k, v in default.items()]
    assert max(moved) > 0
    assert max(float(v.abs().max()) for k, v in weights.items() if "lora_B.old" in k) > 0


def test_a_checkpoint_holds_adapters_and_no_base(run):
    assert all(".lora_" in key for key in adapters(run / "checkpoints/last.ckpt"))


def test_the_log_has_every_term_that_one_debugs_with(run):
    header = (run / "metrics.csv").read_text().splitlines()[0]
    for name in (
        "train/loss", "train/positive", "train/negative", "train/kl", "train/old_deviation", "train/grad_norm",
        "train/x0_norm", "reward/clip/mean", "reward/clip/std", "r/mean", "r/std", "advantage/dead_share",
        "rollout/images_per_second", "val/ocr", "val/geneval/overall", "val/geneval/colors", "reward/clip/failed",
    ):  # fmt: skip
        assert name in header


def test_going_on_from_a_kept_checkpoint_gives_the_whole_run_in_a_new_folder(run, tmp_path, capsys):
    resumed = fit(tmp_path, "--ckpt_path", str(run / "checkpoints/rollout-0001.ckpt"))
    assert_same_run(run, resumed)
    printed = capsys.readouterr().out
    assert "optimizer step 2, 1 rollouts done, W of stage 'warmup' (2 rewards × 3 levels)" in printed
    assert "base policy" not in printed


@pytest.mark.slow
def test_two_processes_give_the_single_process_adapter(run, tmp_path):
    """Through gloo: same prompts, noise, statistics and steps; half the micro-batch on each."""
    changes = {"model__rollout__micro_batch_size": 2, "trainer__devices": 2, "trainer__strategy": "ddp"}
    file = config(tmp_path, trainer__logger=with_wandb(tmp_path), **changes)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "recast_lightning", "fit", "--config", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    double = newest_run(tmp_path)
    single_weights, double_weights = (adapters(r / "checkpoints/last.ckpt") for r in (run, double))
    for key, value in single_weights.items():
        torch.testing.assert_close(double_weights[key], value, atol=1e-5, rtol=0)
    ours, theirs = ((r / "evaluation.jsonl").read_text().splitlines() for r in (run, double))
    for a, b in zip(map(json.loads, ours), map(json.loads, theirs), strict=True):
        assert a["count"] == b["count"] == 5
        assert a["metrics"] == pytest.approx(b["metrics"], abs=1e-3)
    assert done.stdout.strip().splitlines()[-1].startswith("Report: ")


def test_validate_and_predict_use_a_checkpoint(run, tmp_path, capsys):
    file = config(tmp_path)
    checkpoint = str(run / "checkpoints/last.ckpt")
    main(["validate", "--config", str(file), "--ckpt_path", checkpoint])
    main(["predict", "--config", str(file), "--ckpt_path", checkpoint])
    printed = capsys.readouterr().out
    assert f"Pictures: {newest_run(tmp_path) / 'predictions'}" in printed
    assert "geneval" in printed
    assert "geneval/" not in printed.partition("Validate metric")[0]  # means over tags are for the log
    rows = [json.loads(x) for x in (newest_run(tmp_path) / "predictions/metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    last = json.loads((run / "evaluation.jsonl").read_text().splitlines()[-1])
    assert sum(row["scores"]["clip"] for row in rows) / 5 == pytest.approx(last["metrics"]["clip"], abs=1e-5)
    assert (newest_run(tmp_path) / "predictions" / rows[0]["file_name"]).is_file()


@pytest.mark.parametrize("change", [{"lora_targets": ["attn.to_q"]}, {"lora_rank": 8}])
def test_a_checkpoint_of_another_adapter_is_refused(run, tmp_path, change):
    (key, value), *_ = change.items()
    file = config(tmp_path, **{f"model__policy__init_args__{key}": value})
    with pytest.raises(SystemExit) as stop:
        main(["validate", "--config", str(file), "--ckpt_path", str(run / "checkpoints/last.ckpt")])
    assert stop.value.code == 2


def test_a_saved_profile_is_reused_and_wandb_records_offline(run, tmp_path):
    saved = run / "stages/1-warmup/profile.safetensors"
    again = fit(
        tmp_path, "--trainer.max_epochs", "1",
        trainer__logger=with_wandb(tmp_path), trainer__callbacks__0__init_args__profile=str(saved),
    )  # fmt: skip
    first, second = (CreditMatrix.load(r / "stages/1-warmup/credit") for r in (run, again))
    assert torch.equal(first.weights, second.weights)
    offline = next((tmp_path / "wandb").glob("offline-run-*"))
    assert len(list((offline / "files/media/images").rglob("*.png"))) >= 3 + 5


def test_nothing_is_written_where_there_is_no_run_folder(run, tmp_path, monkeypatch):
    file = config(tmp_path / "config", trainer__logger=False)
    monkeypatch.chdir(tmp_path)
    main(["validate", "--config", str(file), "--ckpt_path", str(run / "checkpoints/last.ckpt")])
    assert [p.name for p in tmp_path.iterdir()] == ["config"]
