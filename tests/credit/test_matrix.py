import json

import pytest
import torch
from helpers.profiles import assert_same, falling_curves, make_profile

from recast_lightning.credit import (
    CreditMatrix,
    monotone_divergence,
    normalized_gains,
    shrunk_gains,
    sinkhorn_projection,
)
from recast_lightning.credit.artefact import save_artefact

F64 = torch.float64
BUDGETS = {"clip": 1.0, "ocr": 2.0, "geneval": 0.5}


def gains(seed=0):
    return torch.rand(3, 8, dtype=F64, generator=torch.Generator().manual_seed(seed))


def shares():
    return torch.tensor([1.0, 2.0, 0.5], dtype=F64) / 3.5


def test_recast_keeps_budgets_and_levels():
    matrix = CreditMatrix.from_gains(gains(), BUDGETS)
    torch.testing.assert_close(matrix.weights.sum(1), shares(), rtol=0, atol=1e-10)
    torch.testing.assert_close(matrix.weights.sum(0), torch.full((8,), 1 / 8, dtype=F64), rtol=0, atol=1e-10)
    torch.testing.assert_close(matrix.level_weights.sum(0), torch.ones(8, dtype=F64))
    assert max(matrix.residuals) < 1e-10
    assert matrix.rewards == ["clip", "ocr", "geneval"]
    kernel = normalized_gains(gains())
    assert matrix.weights.equal(sinkhorn_projection(kernel, shares(), torch.full((8,), 1 / 8, dtype=F64)))


def test_credit_goes_where_the_gain_is():
    shaped = torch.ones(3, 8, dtype=F64)
    shaped[1, 6] = 20.0
    weights = CreditMatrix.from_gains(shaped, BUDGETS).weights
    assert weights[1].argmax() == 6
    assert weights[0].argmin() == 6


def test_static_is_the_budget_over_levels_exactly():
    matrix = CreditMatrix.from_gains(gains(), BUDGETS, "static")
    assert matrix.weights.equal((shares() / 8).unsqueeze(1).expand(3, 8))
    rewards = torch.rand(3, dtype=F64)
    torch.testing.assert_close(matrix.level_weights.T @ rewards, (shares() @ rewards).expand(8))


@pytest.mark.parametrize("flat", [torch.zeros(3, 25), torch.full((3, 10), 0.1), torch.ones(3, 7), -gains()])
@pytest.mark.parametrize("method", ["recast", "unprojected"])
def test_flat_gains_are_static_exactly(flat, method):
    static = CreditMatrix.from_gains(flat, BUDGETS, "static")
    assert CreditMatrix.from_gains(flat, BUDGETS, method).weights.equal(static.weights)


def test_unprojected_keeps_budgets_only():
    matrix = CreditMatrix.from_gains(gains(), BUDGETS, "unprojected")
    expected = normalized_gains(gains()).exp()
    expected = shares().unsqueeze(1) * expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(matrix.weights, expected)
    rows, columns = matrix.residuals
    assert rows < 1e-12
    assert columns > 1e-3


def test_only_ratios_of_budgets_matter():
    scaled = {name: 7 * budget for name, budget in BUDGETS.items()}
    one, other = (CreditMatrix.from_gains(gains(), budgets) for budgets in (BUDGETS, scaled))
    torch.testing.assert_close(one.weights, other.weights)
    assert other.budgets == scaled


@pytest.mark.parametrize("method", ["recast", "static", "unprojected"])
@pytest.mark.parametrize("scale", [8e307, 1e-300])
def test_budgets_at_the_ends_of_float64_count_by_their_ratios(scale, method):
    scaled = {name: scale * budget for name, budget in BUDGETS.items()}
    one, other = (CreditMatrix.from_gains(gains(), budgets, method) for budgets in (BUDGETS, scaled))
    torch.testing.assert_close(other.weights, one.weights)


@pytest.mark.parametrize("method", ["recast", "unprojected"])
def test_a_temperature_that_leaves_float64_is_refused(method):
    with pytest.raises(ValueError, match="temperature 1e-310 is too small: .* Take 0.001 or more"):
        CreditMatrix.from_gains(gains(), BUDGETS, method, temperature=1e-310)


def test_gains_whose_sum_leaves_float64_are_refused():
    with pytest.raises(ValueError, match="gains must be a finite matrix"):
        CreditMatrix.from_gains(gains().clamp(0.5) * 1e308, BUDGETS)


def test_a_budget_of_zero_is_a_row_of_zeros_and_leaves_the_others_alone():
    matrix = CreditMatrix.from_gains(gains(), {**BUDGETS, "ocr": 0.0})
    assert (matrix.weights[1] == 0).all()
    without = CreditMatrix.from_gains(gains()[[0, 2]], {"clip": 1.0, "geneval": 0.5})
    torch.testing.assert_close(matrix.weights[[0, 2]], without.weights)


def test_one_reward_or_one_level_leaves_nothing_to_choose():
    one = CreditMatrix.from_gains(gains()[:1], {"ocr": 3.0}).weights
    torch.testing.assert_close(one, torch.full((1, 8), 1 / 8, dtype=F64))
    torch.testing.assert_close(CreditMatrix.from_gains(gains()[:, :1], BUDGETS).weights.squeeze(1), shares())


def test_temperature_goes_from_static_to_sharp():
    static = CreditMatrix.from_gains(gains(), BUDGETS, "static").weights
    far = [(CreditMatrix.from_gains(gains(), BUDGETS, temperature=t).weights - static).norm() for t in (1e6, 2.0, 0.5)]
    assert far[0] < 1e-6 < far[1] < far[2]


def test_shrinkage_is_used_when_there_are_error_bars_and_only_then():
    stderr = torch.full((3, 8), 0.1, dtype=F64)
    auto = CreditMatrix.from_gains(gains(), BUDGETS, gains_stderr=stderr)
    assert auto.normalized.equal(shrunk_gains(gains(), stderr))
    assert not auto.normalized.equal(normalized_gains(gains()))
    for plain in (
        CreditMatrix.from_gains(gains(), BUDGETS),
        CreditMatrix.from_gains(gains(), BUDGETS, gains_stderr=stderr, shrinkage="none"),
    ):
        assert plain.normalized.equal(normalized_gains(gains()))


def test_from_profile_takes_the_budgeted_rows_in_the_order_of_the_budgets():
    measured = make_profile(["clip", "ocr", "geneval"])
    matrix = CreditMatrix.from_profile(measured, {"geneval": 2.0, "clip": 1.0})
    rows = [2, 0]
    noise = measured.gains_covariance[rows]
    expected = CreditMatrix.from_gains(measured.gains[rows], {"geneval": 2.0, "clip": 1.0}, gains_stderr=noise)
    assert matrix.weights.equal(expected.weights)
    assert matrix.iterations == expected.iterations > 0
    assert matrix.sigmas.equal(measured.sigmas)
    with pytest.raises(ValueError, match="The profile has no reward 'pick'; it measured clip, ocr, geneval"):
        CreditMatrix.from_profile(measured, {"pick": 1.0})
    with pytest.raises(ValueError, match="At least one budget must be positive, got none"):
        CreditMatrix.from_profile(measured, {})


def test_from_profile_takes_monotone_gains_even_without_shrinkage():
    curves = torch.tensor([[5.0, 3.0, 4.0, 0.0]] * 3, dtype=F64)
    measured = make_profile(BUDGETS, divergence=curves, noise=1.0)
    matrix = CreditMatrix.from_profile(measured, BUDGETS, shrinkage="none")
    torch.testing.assert_close(matrix.gains, measured.monotone_gains)
    assert (measured.gains < 0).any()
    assert (matrix.gains >= 0).all()
    assert (matrix.normalized != 1).any()


def test_from_profile_flattens_what_is_noise():
    curves = falling_curves(["clip", "straight", "geneval"], 8)
    curves[1] += 0.01 * torch.randn(9, dtype=F64)
    matrix = CreditMatrix.from_profile(make_profile(BUDGETS, divergence=curves), BUDGETS)
    assert (matrix.normalized[1] == 1).all()
    assert (matrix.normalized[[0, 2]] != 1).any(1).all()


def test_without_error_bars_shrinkage_gives_the_static_matrix():
    measured = make_profile(BUDGETS, num_replicates=0)
    matrix = CreditMatrix.from_profile(measured, BUDGETS)
    assert matrix.weights.equal(CreditMatrix.from_gains(gains(), BUDGETS, "static").weights)
    assert matrix.weights_stderr is None
    assert matrix.normalized_stderr is None
    plain = CreditMatrix.from_profile(measured, BUDGETS, shrinkage="none")
    torch.testing.assert_close(plain.weights, CreditMatrix.from_gains(measured.gains, BUDGETS).weights)
    assert not plain.weights.equal(matrix.weights)


@pytest.mark.parametrize("shrinkage", ["auto", "none"])
@pytest.mark.parametrize("method", ["recast", "unprojected", "static"])
def test_error_bars_are_the_spread_of_w_over_the_replicates(method, shrinkage):
    measured = make_profile(BUDGETS, num_replicates=6, noise=0.03)
    matrix = CreditMatrix.from_profile(measured, BUDGETS, method, shrinkage=shrinkage, temperature=0.8)
    again = [
        CreditMatrix.from_gains(
            -(monotone_divergence(replicate, measured.stderr) if shrinkage == "none" else replicate).diff(dim=1),
            BUDGETS,
            method,
            gains_stderr=measured.gains_covariance,
            shrinkage=shrinkage,
            temperature=0.8,
        )
        for replicate in measured.replicates
    ]
    torch.testing.assert_close(matrix.weights_stderr, torch.stack([w.weights for w in again]).std(0))
    torch.testing.assert_close(matrix.normalized_stderr, torch.stack([w.normalized for w in again]).std(0))
    assert (matrix.weights_stderr.max() > 0.001) if method != "static" else (matrix.weights_stderr == 0).all()


def test_error_bars_are_about_the_spread_over_repeated_profiles():
    truth, noise = falling_curves(BUDGETS, 8), 0.02
    runs = []
    for seed in range(25):
        source = torch.Generator().manual_seed(1000 + seed)
        curves = truth + noise * torch.randn(truth.shape, dtype=F64, generator=source)
        measured = make_profile(BUDGETS, divergence=curves, noise=noise, num_replicates=40, seed=seed)
        runs.append(CreditMatrix.from_profile(measured, BUDGETS))
    for value in ("weights", "normalized"):
        spread = torch.stack([getattr(run, value) for run in runs]).std(0).square().mean().sqrt()
        claimed = torch.stack([getattr(run, f"{value}_stderr") for run in runs]).square().mean().sqrt()
        assert 0.75 < claimed / spread < 1.35, (value, claimed / spread)


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({"a": 1.0, "b": -1.0, "c": 1.0}, "The budget of 'b' must be non-negative and finite, got -1.0"),
        ({"a": 1.0, "b": 1.0, "c": float("nan")}, "The budget of 'c' must be non-negative and finite"),
        ({"a": float("inf"), "b": 1.0, "c": 1.0}, "The budget of 'a' must be non-negative and finite"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, "At least one budget must be positive"),
        ({"a": 1.0, "b": 1.0}, "budgets must name the 3 rows of gains, got a, b"),
    ],
)
@pytest.mark.parametrize("method", ["recast", "static", "unprojected"])
def test_bad_budgets_are_refused(budgets, message, method):
    with pytest.raises(ValueError, match=message):
        CreditMatrix.from_gains(gains(), budgets, method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sinkhorn"}, "method must be 'recast', 'static' or 'unprojected', got 'sinkhorn'"),
        ({"shrinkage": "half"}, "shrinkage must be 'auto' or 'none', got 'half'"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0"),
        ({"sigmas": torch.linspace(0, 1, 8)}, "sigmas must hold 9 levels for gains of 8, got 8"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CreditMatrix.from_gains(gains(), BUDGETS, **options)


@pytest.mark.parametrize("sigmas", [None, torch.linspace(0, 1, 9)])
@pytest.mark.parametrize(("name", "stem"), [("w.safetensors", "w"), ("w.json", "w"), ("run-1.5", "run-1.5")])
def test_round_trip_is_exact(tmp_path, sigmas, name, stem):
    matrix = CreditMatrix.from_gains(gains(), {**BUDGETS, "ocr": 1 / 3}, sigmas=sigmas, temperature=0.7)
    assert matrix.weights_stderr is None
    assert matrix.save(tmp_path / "deep" / name) == tmp_path / "deep" / f"{stem}.safetensors"
    loaded = CreditMatrix.load(tmp_path / "deep" / name)
    assert_same(matrix, loaded)
    assert list(loaded.budgets) == list(matrix.budgets)
    readable = json.loads((tmp_path / "deep" / f"{stem}.json").read_text())
    assert readable["weights"] == matrix.weights.tolist()
    assert readable["budgets"] == matrix.budgets


def test_round_trip_keeps_error_bars_and_the_json_has_margins_and_iterations(tmp_path):
    matrix = CreditMatrix.from_profile(make_profile(BUDGETS), BUDGETS, temperature=0.5)
    assert matrix.weights_stderr.any()
    matrix.save(tmp_path / "credit")
    assert_same(matrix, CreditMatrix.load(tmp_path / "credit"))
    readable = json.loads((tmp_path / "credit.json").read_text())
    assert (readable["row_residual"], readable["column_residual"]) == matrix.residuals
    assert readable["iterations"] == matrix.iterations > 1
    for field in ("weights_stderr", "normalized_stderr"):
        assert readable[field] == getattr(matrix, field).tolist()


@pytest.mark.parametrize("missing", ["format", "temperature"])
def test_files_of_other_versions_are_refused(tmp_path, missing):
    matrix = CreditMatrix.from_gains(gains(), BUDGETS)
    header = {"format": 2, "row_residual": 0.0, "column_residual": 0.0, "budgets": BUDGETS, "method": "recast"}
    header |= {"temperature": 1.0, "iterations": 3}
    tensors = {"weights": matrix.weights, "gains": matrix.gains, "normalized": matrix.normalized}
    save_artefact(tmp_path / "w", "recast credit matrix", tensors, header)
    assert CreditMatrix.load(tmp_path / "w").weights.equal(matrix.weights)
    del header[missing]
    save_artefact(tmp_path / "w", "recast credit matrix", tensors, header)
    with pytest.raises(ValueError, match="The W in .* is of another version of recast_lightning: build it anew"):
        CreditMatrix.load(tmp_path / "w")
