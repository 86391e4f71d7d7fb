"""Killed or stopped at any point and resumed by the same command, a run ends as if nothing had happened, to the bit."""

import errno
import json
import os
import shutil
import signal
from functools import cache

import pytest
import torch
from helpers.commands import finish, start, with_callback, with_killer
from helpers.same_run import assert_same_run
from integration.tiny import config, fit, newest_run, with_wandb

from recast_lightning.cli import main

SMALL = {"data__group_size": 2, "model__rollout__micro_batch_size": 2, "trainer__accumulate_grad_batches": 2}
DOUBLE = {**SMALL, "model__rollout__micro_batch_size": 1, "trainer__devices": 2}
FSDP2 = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
STRATEGIES = {
    "ddp": "ddp",
    "fsdp2": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": FSDP2},
}
MODULE = "recast_lightning.training.module.RecastModule"
POINTS = {
    "in the base evaluation": (f"{MODULE}.validation_step", 2),
    "in the profile": ("recast_lightning.policy.Policy.forward", 24),
    "while a rollout is drawn": (f"{MODULE}.collect", 1),
    "as the next stage begins": (f"{MODULE}.collect", 3),
    "within an accumulation": (f"{MODULE}.training_step", 4),
    "at an optimizer step": (f"{MODULE}.on_before_optimizer_step", 5),
    "in an evaluation": (f"{MODULE}.validation_step", 4),
    "while the records are written": ("recast_lightning.callbacks.run_report._append", 3),
    "while a checkpoint is written": ("os.fsync", 12),
    "before a checkpoint is put in its place": ("recast_lightning.files.os.replace", 14),
    "between rollouts": ("recast_lightning.callbacks.RunReport.on_train_epoch_end", 2),
}
QUICK = ("while a checkpoint is written",)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One uninterrupted run."""
    return fit(tmp_path_factory.mktemp("straight"), **SMALL)


def resumed(file):
    """The folder of a run that goes on by the same command."""
    code, out, errors = finish(start("fit", "--config", str(file), "--ckpt_path", "last"))
    assert code == 0, errors[-3000:]
    assert "Report: " in out
    return newest_run(file.parent)


@pytest.mark.parametrize("point", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
def test_killed_anywhere_it_ends_the_same(straight, tmp_path, point):
    file = config(tmp_path, **SMALL)
    code, _, errors = finish(start("fit", "--config", str(with_killer(file, *POINTS[point]))))
    assert code == -signal.SIGKILL, errors[-3000:]
    unwritten = newest_run(tmp_path) / "checkpoints"
    assert any(unwritten.glob(".last.ckpt.*.part")) == ("a checkpoint" in point)
    assert_same_run(straight, resumed(file))
    assert not any(unwritten.glob(".*"))


@pytest.mark.slow
def test_killed_again_and_again_at_one_place_it_ends_the_same(straight, tmp_path):
    """Found by random kills: Lightning counts epochs differently after the second start of one."""
    file = config(tmp_path, **SMALL)
    for target, call in (("collect", 2), ("collect", 1), ("collect", 1), ("training_step", 3), ("training_step", 3)):
        deadly = with_killer(file, f"{MODULE}.{target}", call)
        code, _, errors = finish(start("fit", "--config", str(deadly), "--ckpt_path", "last"))
        assert code == -signal.SIGKILL, errors[-3000:]
    assert_same_run(straight, resumed(file))


@pytest.mark.parametrize(
    "point",
    [
        "within an accumulation",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("in the profile", "while a rollout is drawn", "in an evaluation")),
    ],
)  # fmt: skip
def test_a_signal_stops_it_cleanly_and_loses_nothing(straight, tmp_path, point):
    file, number = config(tmp_path, **SMALL), signal.SIGINT if point == "while a rollout is drawn" else signal.SIGTERM
    code, _, errors = finish(start("fit", "--config", str(with_killer(file, *POINTS[point], number=number))))
    assert code == 128 + number, errors[-3000:]
    assert errors.splitlines()[-1] == (
        f"recast: stopped by {number.name}; the same command with --ckpt_path last goes on from here."
    )
    assert_same_run(straight, resumed(file))


@pytest.mark.slow
def test_slurm_s_warning_requeues_the_job(straight, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    file = config(tmp_path, **SMALL)
    deadly = with_killer(file, *POINTS["within an accumulation"], number=signal.SIGUSR1)
    process = start("fit", "--config", str(deadly), SLURM_JOB_ID="41", PATH=f"{tmp_path}:/usr/bin:/bin")
    code, _, errors = finish(process)
    assert code == 128 + signal.SIGUSR1, errors[-3000:]
    assert "recast: requeued job 41" in errors
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
    assert_same_run(straight, resumed(file))


@pytest.fixture(scope="module")
def doubles(tmp_path_factory):
    """An uninterrupted run of two processes under each strategy, made when first asked for."""

    @cache
    def run(strategy):
        file = config(tmp_path_factory.mktemp(strategy), **DOUBLE, trainer__strategy=STRATEGIES[strategy])
        code, _, errors = finish(start("fit", "--config", str(file)))
        assert code == 0, errors[-3000:]
        return newest_run(file.parent)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("point", ["in the profile", "within an accumulation", "in an evaluation"])
def test_two_killed_processes_end_the_same(doubles, tmp_path, strategy, point):
    file = config(tmp_path, **DOUBLE, trainer__strategy=STRATEGIES[strategy])
    target, call = POINTS[point]
    code, _, errors = finish(start("fit", "--config", str(with_killer(file, target, call))))
    assert code == -signal.SIGKILL, errors[-3000:]
    assert_same_run(doubles(strategy), resumed(file))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("point", ["within an accumulation", "in an evaluation"])
def test_a_signal_to_one_of_two_processes_stops_both_at_one_place(doubles, tmp_path, strategy, point):
    file = config(tmp_path, **DOUBLE, trainer__strategy=STRATEGIES[strategy])
    deadly = with_killer(file, *POINTS[point], number=signal.SIGTERM, rank=1)
    code, _, errors = finish(start("fit", "--config", str(deadly)))
    assert code == 128 + signal.SIGTERM, errors[-3000:]
    assert_same_run(doubles(strategy), resumed(file))


def test_resuming_starts_afresh_where_there_is_nothing_and_leaves_other_runs_alone(straight, tmp_path, capsys):
    other = shutil.copytree(straight, tmp_path / "other/version_0")
    run = fit(tmp_path, "--ckpt_path", "last", "--trainer.max_epochs", "1", **SMALL)
    assert "has a checkpoint yet: starting afresh." in capsys.readouterr().out
    other = other.rename(run.parent / "version_1")  # its checkpoint is older
    before = {p: p.read_bytes() for p in other.rglob("*") if p.is_file()}
    for _ in range(2):  # the second time it is finished already, and nothing changes
        main(["fit", "--config", str(config(tmp_path, **SMALL)), "--ckpt_path", "last"])
        assert_same_run(straight, run)
    assert {p: p.read_bytes() for p in other.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_a_run_that_max_steps_ended_within_a_rollout_goes_on(straight, tmp_path):
    fit(tmp_path, "--trainer.max_steps", "4", **SMALL)
    assert_same_run(straight, fit(tmp_path, "--ckpt_path", "last", **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 6])
def test_cadence_is_in_rollouts_however_many_steps_they_have(tmp_path, accumulate):
    changes = {"trainer__accumulate_grad_batches": accumulate, "trainer__check_val_every_n_epoch": 2}
    run = fit(tmp_path, **{**SMALL, **changes, "trainer__callbacks__4__init_args": {"every_n_epochs": 2}})
    evaluations = [json.loads(line)["rollout"] for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert evaluations == [0, 2]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["last.ckpt", "rollout-0002.ckpt"]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 18 // accumulate


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(tmp_path):
    changes = {**SMALL, "trainer__logger": with_wandb(tmp_path)}
    fit(tmp_path, "--trainer.max_epochs", "1", **changes)
    fit(tmp_path, "--ckpt_path", "last", **changes)
    names = [folder.name.rpartition("-")[2] for folder in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(names) == 2
    assert len(set(names)) == 1


CONFLICTS = {
    "another number of steps": ({"model__policy__init_args__num_steps": 2}, "was trained at 3 levels, but num_steps is 2"),
    "another scale": ({"model__policy__init_args__lora_alpha": 8}, "policy.lora_alpha is 32"),
    "another rank": ({"model__policy__init_args__lora_rank": 8}, "has adapters of rank 4, but lora_rank is 8"),
    "another reward": (
        {"model__rewards__hpsv2__init_args": {"model": "signboard:clip"}},
        "rewards.hpsv2.model is 'signboard:hpsv2' in the checkpoint and 'signboard:clip' in the configuration",
    ),
    "other evaluation prompts": ({"data__validation": "signboard:test:3"}, "evaluation prompts is '"),
    "other training prompts": ({"data__train": "signboard:test:12"}, "training prompts is '12 ("),
    "another solver": ({"model__policy__init_args__solver": "euler"}, "policy.solver is 'dpm2' in the checkpoint"),
    "other text tokens": (
        {"model__policy__init_args__max_sequence_length": 4}, "policy.max_sequence_length is 0 in the checkpoint and 4",
    ),
    "another group within a rollout": ({"data__group_size": 4}, "data.group_size is 2 in the checkpoint and 4"),
    "another seed within a rollout": ({"model__seed": 9}, "model.seed is 0 in the checkpoint and 9"),
    "other budgets within a stage": ({"model__stages__0__budgets": {"clip": 3, "hpsv2": 1}}, "clip 3, hpsv2 1"),
    "other credit within a stage": ({"model__stages__0__credit": "static"}, "W is of recast credit"),
}  # fmt: skip


@pytest.fixture(scope="module")
def within(tmp_path_factory):
    """A checkpoint written within the first rollout."""
    file = config(tmp_path_factory.mktemp("within"), **SMALL)
    finish(start("fit", "--config", str(with_killer(file, *POINTS["within an accumulation"]))))
    return newest_run(file.parent) / "checkpoints/last.ckpt"


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_checkpoint_that_does_not_belong_is_refused(within, tmp_path, capsys, case):
    changes, expected = CONFLICTS[case]
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, "--ckpt_path", str(within), **{**SMALL, **changes})
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("recast: error: ")
    assert expected in error


def test_accepted_changes_start_the_record_of_evaluations_anew(straight, tmp_path, capsys):
    checkpoint = straight / "checkpoints/rollout-0001.ckpt"
    changes = {**SMALL, "data__validation": "signboard:test:3", "trainer__gradient_clip_val": 0.5}
    run = fit(tmp_path, "--ckpt_path", str(checkpoint), "--accept-changes", "--trainer.max_epochs", "2", **changes)
    printed = capsys.readouterr().out
    assert "now trainer.gradient_clip_val 1.0 → 0.5" in printed
    assert "; the record of evaluations starts anew" in printed
    (line,) = map(json.loads, (run / "evaluation.jsonl").read_text().splitlines())
    assert line["rollout"] == 2
    assert line["settings"]["evaluation prompts"].startswith("3 (")
    assert line["settings"]["rewards.clip.model"] == "signboard:clip"
    assert line["versions"]["torch"] == torch.__version__
    before = [json.loads(text) for text in (run / "before-rollout-0002/evaluation.jsonl").read_text().splitlines()]
    assert [line["rollout"] for line in before[:2]] == [0, 1]
    assert not (run / "images/rollout-0000").exists()
    assert (run / "before-rollout-0002/images/rollout-0000").is_dir()


def test_the_configuration_s_learning_rate_holds_over_the_checkpoint_s(within, tmp_path, capsys):
    changes = {
        "model__optimizer__learning_rate": 1e-5,
        "model__objective__beta": 0.2,
        "model__optimizer__warmup_steps": 0,
    }
    run = fit(tmp_path, "--ckpt_path", str(within), "--trainer.max_epochs", "1", **{**SMALL, **changes})
    group = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert group["lr"] == 1e-5
    printed = capsys.readouterr().out
    assert "2 of 6 items" in printed
    assert "now model.optimizer.learning_rate 0.0008 → 1e-05" in printed
    assert "now model.objective.beta 0.1 → 0.2" in printed


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path):
    """After the first step, no file may grow as large as a checkpoint."""
    file = with_callback(config(tmp_path, **SMALL), "helpers.killer.FillDisk", limit=300_000)
    code, _, errors = finish(start("fit", "--config", str(file)))
    assert code == 2, errors[-3000:]
    assert errors.splitlines()[-1].startswith("recast: error: The checkpoint ")
    assert "could not be written (File too large); the one before it is whole" in errors
    folder = newest_run(tmp_path) / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["last.ckpt"]
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 0


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys, monkeypatch):
    def refuse(path, *arguments, **keywords):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    file = config(tmp_path, **SMALL)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(file)])
    assert stop.value.code == 2
    assert f"Could not write to '{tmp_path / 'run'}" in capsys.readouterr().err
