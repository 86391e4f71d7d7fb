"""Profiles through the command line: alone, by several processes, anew within a stage, and from the policy's own images."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.same_run import assert_same_run
from integration.tiny import ROOT, config, fit

from recast_lightning.callbacks.renyi_profiler import has_drifted
from recast_lightning.cli import main
from recast_lightning.credit import CreditMatrix, Profile

ONE_STAGE = [{"name": "only", "epochs": 3, "budgets": {"clip": 1, "hpsv2": 1}}]
PROFILER = "trainer__callbacks__0__init_args__"


def options(**changes):
    return {PROFILER + name: value for name, value in changes.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A stage in which W is built anew before every rollout."""
    return fit(tmp_path_factory.mktemp("refresh"), keep_steps=True, model__stages=ONE_STAGE, **options(refresh=1))


def test_refreshing_measures_the_policy_anew_within_a_stage(run):
    folders = [run / "stages/1-only", run / "stages/1-only/rollout-1", run / "stages/1-only/rollout-2"]
    profiles = [Profile.load(folder / "profile") for folder in folders]
    assert len({p.metadata["fingerprints"]["policy"] for p in profiles}) == 3
    assert len({p.metadata["fingerprints"]["prompts"] for p in profiles}) == 1
    assert profiles[0].mean_rewards[:, 0].equal(profiles[1].mean_rewards[:, 0])  # the same proposals
    assert not profiles[0].divergence.equal(profiles[1].divergence)
    assert all(CreditMatrix.load(folder / "credit").rewards == ["clip", "hpsv2"] for folder in folders)
    assert Profile.load(run / "stages/1-only/after").metadata["rollout"] == 3
    report = (run / "report.html").read_text()
    assert "Measured again before rollout 2" in report
    assert "D₀ − D_T (nats)" in report
    assert json.loads((run / "stages/1-only/after.json").read_text())["network_calls"] == 20


@pytest.mark.slow
def test_a_resumed_run_refreshes_when_the_straight_one_does(run, tmp_path):
    checkpoint = run / "checkpoints/step=3.ckpt"  # in the middle of rollout 1, W already built anew
    resumed = fit(tmp_path, "--ckpt_path", str(checkpoint), model__stages=ONE_STAGE, **options(refresh=1))
    assert_same_run(run, resumed)


@pytest.mark.parametrize(("drift", "refreshed"), [(1e-9, True), pytest.param(1e9, False, marks=pytest.mark.slow)])
def test_drift_decides_whether_to_measure_anew(tmp_path, drift, refreshed):
    stages = [{**ONE_STAGE[0], "epochs": 2}]
    changes = options(drift=drift, drift_prompts=4, measure_after=False)
    folder = fit(tmp_path, model__stages=stages, **changes) / "stages/1-only"
    assert (folder / "rollout-1/profile.safetensors").exists() == refreshed
    assert not (folder / "after.safetensors").exists()


def test_drift_is_a_share_of_what_was():
    assert has_drifted(2.0, 1.4, 0.25)
    assert has_drifted(2.0, 2.6, 0.25)
    assert not has_drifted(2.0, 1.6, 0.25)
    assert has_drifted(None, 1.0, 10.0)


def test_profile_alone_is_the_one_that_a_run_begins_with(run, tmp_path, capsys):
    file = config(tmp_path, model__stages=ONE_STAGE)
    main(["profile", "--config", str(file), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert printed.strip().splitlines()[-1] == f"Profile: {tmp_path / 'out/profile.safetensors'}"
    assert "hpsv2" in printed
    alone, first = Profile.load(tmp_path / "out/profile"), Profile.load(run / "stages/1-only/profile")
    assert alone.divergence.equal(first.divergence)
    assert alone.metadata["fingerprints"] == first.metadata["fingerprints"]
    assert (tmp_path / "out/gain_curves.png").stat().st_size > 5000
    assert not list(tmp_path.rglob("unfinished/*"))


@pytest.mark.slow
def test_profile_takes_a_checkpoint_and_any_rewards_and_two_processes(run, tmp_path):
    checkpoint = str(run / "checkpoints/last.ckpt")
    profiles = []
    for devices in (1, 2):
        file = config(tmp_path, model__stages=ONE_STAGE, trainer__devices=devices,
                      trainer__strategy="ddp" if devices == 2 else "auto", **options(num_prompts=5))  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "recast_lightning",
            "profile",
            "--config",
            str(file),
            "--ckpt_path",
            checkpoint,
        ]
        command += ["--rewards", "[ocr,clip]", "--output", str(tmp_path / f"out-{devices}")]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        profiles.append(Profile.load(tmp_path / f"out-{devices}/profile"))
    one, two = profiles
    assert one.rewards == two.rewards == ["ocr", "clip"]
    torch.testing.assert_close(one.divergence, two.divergence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.stderr, two.stderr, rtol=1e-3, atol=1e-4)
    assert one.network_calls == two.network_calls == 5 * 5
    trained = Profile.load(run / "stages/1-only/after").metadata["fingerprints"]["policy"]
    assert one.metadata["fingerprints"]["policy"] == two.metadata["fingerprints"]["policy"] == trained


def own_images(**init):
    return {"class_path": "recast_lightning.proposals.PolicyProposals", "init_args": init}


def test_the_policys_own_images_serve_where_they_are_good_enough(tmp_path):
    file = config(tmp_path, model__stages=ONE_STAGE, **options(proposals=own_images(per_prompt=3, minimum_share=0.1)))
    main(["profile", "--config", str(file), "--output", str(tmp_path / "out")])
    profile = Profile.load(tmp_path / "out/profile")
    assert (profile.num_prompts, profile.num_proposals) == (4, 12)
    assert all(1 <= n <= 3 for n in profile.effective_samples.values())


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--rewards", "[beauty]"], {}, "There is no reward 'beauty' to profile; configured are clip, geneval, hpsv2"),
        ([], {"trainer__callbacks": []}, "There is nothing to profile with: add RenyiProfilerCallback"),
        (
            [],
            options(proposals=own_images(per_prompt=3, minimum_share=1.0)),
            "fewer than minimum_share 1 asks for: they cannot stand for its positive policy",
        ),
        (
            [],
            {
                "model__rewards__geneval__init_args__mode": "upstream_partial",
                "model__stages": [{"name": "only", "epochs": 1, "budgets": {"geneval": 1}}],
            },
            "geneval can score below 0 (down to -inf), which is no weight of a positive policy: give it a positive_map",
        ),
        ([], options(levels=6), "levels must be 2 to 3, or a list of levels, got 6"),
        ([], options(order=1.0), "Order 1 needs at least 2 completions a proposal and level, got 1"),
        ([], options(refresh=0), "refresh must be at least 1 epoch, got 0"),
        ([], options(drift=-1.0), "drift must be a positive share, got -1.0"),
        ([], options(drift=0.5, profile="x"), "refresh and drift measure anew, but the profile 'x' is given"),
        ([], options(proposals=own_images(per_prompt=1)), "per_prompt must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_a_sentence(tmp_path, capsys, arguments, changes, message):
    file = config(tmp_path, **{"model__stages": ONE_STAGE, **changes})
    with pytest.raises(SystemExit) as stop:
        main(["profile", "--config", str(file), "--output", str(tmp_path / "out"), *arguments])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1
