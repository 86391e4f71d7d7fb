import json
import os

import pytest
import torch
from helpers.profiles import assert_same, make_profile
from safetensors import safe_open
from safetensors.torch import save_file

from recast_lightning.credit import CreditMatrix, Profile

F64 = torch.float64
CURVES = torch.tensor([[0.5, 0.3, 0.4, 0.0], [1.0, 0.5, 0.25, 0.125]], dtype=F64) / 3


def small(**changes):
    return make_profile(["ocr", "clip"], **{"divergence": CURVES, **changes})


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def with_header(path, change):
    """Rewrites the header of a saved artefact."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["header"])
    change(header)
    save_file(tensors, path, metadata={**metadata, "header": json.dumps(header)})


def test_gains_telescope_and_the_monotone_ones_are_not_negative():
    profile = small(num_replicates=0)
    torch.testing.assert_close(profile.gains[0], torch.tensor([0.2, -0.1, 0.4], dtype=F64) / 3)
    torch.testing.assert_close(profile.gains.sum(1), profile.divergence[:, 0] - profile.divergence[:, -1])
    torch.testing.assert_close(profile.monotone_divergence[0], torch.tensor([0.5, 0.35, 0.35, 0.0], dtype=F64) / 3)
    torch.testing.assert_close(profile.monotone_gains[0], torch.tensor([0.15, 0.0, 0.35], dtype=F64) / 3)
    torch.testing.assert_close(profile.monotone_gains[1], profile.gains[1])


def test_a_level_counts_by_its_error_in_the_monotone_curve():
    """Levels 1 and 2 of 'ocr' cross; level 1, with a third of the error, moves a ninth as far."""
    spread = torch.tensor([0.01, 0.01, 0.03, 0.01], dtype=F64)
    profile = small(replicates=torch.stack([CURVES - spread, CURVES + spread]))
    middle = (0.9 * CURVES[0, 1] + 0.1 * CURVES[0, 2]).expand(2)
    torch.testing.assert_close(profile.monotone_divergence[0, 1:3], middle)


def test_error_bars_are_those_of_the_replicates():
    """Two replicates, +e and -e off the curve: every variance is 2 e^2, by hand."""
    error = torch.tensor([[0.0, 0.1, 0.3, 0.2], [0.1, 0.1, 0.1, 0.1]], dtype=F64)
    profile = small(replicates=torch.stack([CURVES + error, CURVES - error]))
    torch.testing.assert_close(profile.stderr, 2**0.5 * error)
    steps = torch.tensor([[-0.1, -0.2, 0.1], [0.0, 0.0, 0.0]], dtype=F64)  # of the gains: D_{t-1} - D_t
    torch.testing.assert_close(profile.gains_stderr, 2**0.5 * steps.abs(), rtol=0, atol=1e-12)
    by_hand = torch.tensor([[0.02, 0.04, -0.02], [0.04, 0.08, -0.04], [-0.02, -0.04, 0.02]], dtype=F64)
    torch.testing.assert_close(profile.gains_covariance[0], by_hand, rtol=0, atol=1e-12)
    torch.testing.assert_close(profile.gains_covariance[1], torch.zeros(3, 3, dtype=F64), rtol=0, atol=1e-12)
    total, total_error = profile.totals
    torch.testing.assert_close(total, torch.tensor([0.5, 0.875], dtype=F64) / 3)
    torch.testing.assert_close(total_error, torch.tensor([0.2 * 2**0.5, 0.0], dtype=F64), rtol=0, atol=1e-12)


def test_one_prompt_leaves_errors_unknown_and_every_reward_flat():
    profile = small(num_replicates=0)
    for errors in (profile.stderr, profile.gains_stderr, profile.gains_covariance, profile.totals[1]):
        assert (errors == torch.inf).all()
    assert profile.gains_covariance.shape == (2, 3, 3)
    assert profile.flat == ["ocr", "clip"]


def test_flat_rewards_and_what_proposals_are_worth():
    profile = make_profile(["ocr", "straight"])
    assert profile.flat == ["straight"]
    ends = profile.mean_rewards[:, [0, -1]].tolist()
    assert profile.proposal_quality == {"ocr": tuple(ends[0]), "straight": tuple(ends[1])}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_replicates": 0},
        {"steps": 12, "order": 1.5, "rollouts": [4, 4, 2], "effective_samples": {"ocr": 1 / 3, "clip": 2.5}},
        {"divergence": torch.cat([CURVES[:, :1] / 0, CURVES[:, 1:]], 1)},
    ],
)
def test_round_trip_is_exact(tmp_path, changes):
    profile = small(**changes)
    assert profile.save(tmp_path / "a" / "profile") == tmp_path / "a" / "profile.safetensors"
    for name in ("profile", "profile.safetensors", "profile.json"):
        assert_same(profile, Profile.load(tmp_path / "a" / name))


def test_fields_may_share_their_memory(tmp_path):
    every = torch.stack([CURVES, CURVES + 0.1, CURVES - 0.1])
    profile = small(divergence=every[0], replicates=every[1:], nested_bias=every[0])
    profile.save(tmp_path / "profile")
    assert_same(profile, Profile.load(tmp_path / "profile"))


def test_the_json_beside_it_is_strict_and_has_what_a_reader_wants(tmp_path):
    profile = small(metadata={"note": "π, ü", "loss": float("nan"), "best": [float("inf"), 1.5]})
    profile.save(tmp_path / "profile")
    readable = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert "replicates" not in readable
    for name in ("divergence", "stderr", "gains", "gains_stderr"):
        assert readable[name] == getattr(profile, name).tolist()
    assert readable["rewards"] == ["ocr", "clip"]
    assert readable["failed"] == {"ocr": 2, "clip": 0}
    assert readable["metadata"] == {"note": "π, ü", "loss": None, "best": [None, 1.5]}


def test_errors_that_are_not_known_are_null_in_the_json(tmp_path):
    small(num_replicates=0).save(tmp_path / "profile")
    readable = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert readable["stderr"] == [[None] * 4] * 2
    assert readable["gains_stderr"] == [[None] * 3] * 2


@pytest.mark.parametrize("stopped", ["fsync", "replace"])
def test_a_save_that_is_stopped_leaves_the_old_files_whole(tmp_path, monkeypatch, stopped):
    def stop(*_):
        raise OSError("stopped")

    old = small()
    old.save(tmp_path / "profile")
    readable = (tmp_path / "profile.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, stopped, stop)
        with pytest.raises(OSError, match="stopped"):
            small(seed=1).save(tmp_path / "profile")
    assert_same(old, Profile.load(tmp_path / "profile"))
    assert (tmp_path / "profile.json").read_bytes() == readable


def test_files_that_are_not_profiles_are_refused(tmp_path):
    small().save(tmp_path / "cut")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "text": b"hello", "empty": b""}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.safetensors is damaged or not a safetensors file"):
            Profile.load(tmp_path / name)
    save_file({"weight": torch.zeros(2)}, tmp_path / "header.safetensors", {"kind": "recast profile", "header": "{"})
    with pytest.raises(ValueError, match="header.safetensors is damaged: its header cannot be read"):
        Profile.load(tmp_path / "header")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds something else, not a recast profile"):
        Profile.load(tmp_path / "other")
    CreditMatrix.from_gains(torch.rand(1, 3), {"ocr": 1.0}).save(tmp_path / "matrix")
    with pytest.raises(ValueError, match="holds recast credit matrix, not a recast profile"):
        Profile.load(tmp_path / "matrix")
    with pytest.raises(FileNotFoundError, match="There is no recast profile at"):
        Profile.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("format"),
        lambda header: header.update(format=1),
        lambda header: header.update(format=3),
        lambda header: header.pop("num_prompts"),
        lambda header: header.update(new_field=1),
    ],
)
def test_profiles_of_other_versions_are_refused(tmp_path, change):
    path = small().save(tmp_path / "profile")
    with_header(path, change)
    with pytest.raises(
        ValueError, match="profile.safetensors' is of another version of recast_lightning: measure it anew"
    ):
        Profile.load(path)


def test_check_takes_any_of_its_rewards_on_its_own_grid():
    profile = small()
    assert profile.check(["clip"], torch.linspace(0, 1, 4, dtype=F64) + 5e-5) is None
    with pytest.raises(ValueError, match="The profile has no reward 'hps'; it measured ocr, clip"):
        profile.check(["clip", "hps"], profile.sigmas)
    with pytest.raises(ValueError, match="The profile has 3 levels, but the policy samples in 4"):
        profile.check(["ocr"], torch.linspace(0, 1, 5))
    with pytest.raises(ValueError, match=r"another grid .*: its sigma is 0.6667 at level 2, the policy's 0.7000"):
        profile.check(["ocr"], torch.tensor([0, 1 / 3, 0.7, 1]))


def test_rows_look_names_up():
    assert small().rows(["clip", "ocr"]).tolist() == [1, 0]
    assert small().divergence[small().rows([])].shape == (0, 4)
    with pytest.raises(ValueError, match="The profile has no reward 'hps'; it measured ocr, clip"):
        small().rows(["hps"])
