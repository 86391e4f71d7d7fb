import json

import pytest
import torch
from safetensors.torch import save_file

from recast_lightning.credit import CreditMatrix, Profile

F64 = torch.float64


def make_profile(**changes):
    fields = {
        "divergence": torch.tensor([[0.5, 0.3, 0.4, 0.0], [1.0, 0.5, 0.25, 0.125]], dtype=F64) / 3,
        "stderr": torch.full((2, 4), 0.1, dtype=F64),
        "gains_stderr": torch.tensor([[0.1, torch.inf, 0.1], [0.2, 0.2, 0.2]], dtype=F64),
        "mean_rewards": torch.rand(2, 4, dtype=F64),
        "sigmas": torch.linspace(0, 1, 4),
        "rewards": ["ocr", "clip"],
        "order": 2.0,
        "posterior": "sde2",
        "rollouts": 3,
        "num_proposals": 17,
        "failed": {"ocr": 2, "clip": 0},
        "network_calls": 306,
        "metadata": {"policy": "signboard", "seed": 7, "note": "π, ü"},
    }
    return Profile(**{**fields, **changes})


def test_gains_telescope_and_the_monotone_ones_are_not_negative():
    profile = make_profile()
    torch.testing.assert_close(profile.gains[0], torch.tensor([0.2, -0.1, 0.4], dtype=F64) / 3)
    torch.testing.assert_close(profile.gains.sum(1), profile.divergence[:, 0] - profile.divergence[:, -1])
    torch.testing.assert_close(profile.monotone_divergence[0], torch.tensor([0.5, 0.35, 0.35, 0.0], dtype=F64) / 3)
    torch.testing.assert_close(profile.monotone_gains[0], torch.tensor([0.15, 0.0, 0.35], dtype=F64) / 3)
    torch.testing.assert_close(profile.monotone_gains[1], profile.gains[1])


def test_round_trip_is_exact(tmp_path):
    profile = make_profile()
    path = profile.save(tmp_path / "a" / "profile")
    assert path == tmp_path / "a" / "profile.safetensors"
    for name in ("profile", "profile.safetensors", "profile.json"):
        loaded = Profile.load(tmp_path / "a" / name)
        assert vars(loaded).keys() == vars(profile).keys()
        for field, value in vars(profile).items():
            other = getattr(loaded, field)
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype
                assert other.equal(value), field
            else:
                assert other == value, field


def test_the_json_beside_it_is_strict_and_complete(tmp_path):
    make_profile().save(tmp_path / "profile")

    def refuse(word):
        raise AssertionError(word)

    readable = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert readable["rewards"] == ["ocr", "clip"]
    assert readable["gains_stderr"][0] == [0.1, None, 0.1]
    assert readable["divergence"] == make_profile().divergence.tolist()
    assert readable["metadata"]["note"] == "π, ü"


def test_files_that_are_not_profiles_are_refused(tmp_path):
    make_profile().save(tmp_path / "cut")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "text": b"hello", "empty": b""}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.safetensors is damaged or not a safetensors file"):
            Profile.load(tmp_path / name)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds something else, not a recast profile"):
        Profile.load(tmp_path / "other")
    CreditMatrix.from_gains(torch.rand(1, 3), {"ocr": 1.0}).save(tmp_path / "matrix")
    with pytest.raises(ValueError, match="holds recast credit matrix, not a recast profile"):
        Profile.load(tmp_path / "matrix")
    with pytest.raises(FileNotFoundError, match="There is no recast profile at"):
        Profile.load(tmp_path / "missing")


def test_rows_look_names_up():
    assert make_profile().rows(["clip", "ocr"]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="The profile has no reward 'hps'; it measured ocr, clip"):
        make_profile().rows(["hps"])
