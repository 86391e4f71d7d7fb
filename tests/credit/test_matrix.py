import json

import pytest
import torch

from recast_lightning.credit import CreditMatrix, Profile, normalized_gains, shrunk_gains, sinkhorn_projection

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


def profile(divergence, gains_stderr):
    num_rewards, num_levels = gains_stderr.shape
    return Profile(
        divergence=divergence,
        stderr=torch.zeros(num_rewards, num_levels + 1),
        gains_stderr=gains_stderr,
        mean_rewards=divergence.exp(),
        sigmas=torch.linspace(0, 1, num_levels + 1),
        rewards=["clip", "ocr", "geneval"],
        order=2.0,
        posterior="sde2",
        rollouts=1,
        num_proposals=5,
        failed={},
        network_calls=0,
    )


def test_from_profile_takes_the_budgeted_rows_in_the_order_of_the_budgets():
    curves = torch.rand(3, 9, dtype=F64).sort(descending=True).values
    measured = profile(curves, torch.zeros(3, 8, dtype=F64))
    matrix = CreditMatrix.from_profile(measured, {"geneval": 2.0, "clip": 1.0})
    expected = CreditMatrix.from_gains(measured.gains[[2, 0]], {"geneval": 2.0, "clip": 1.0})
    torch.testing.assert_close(matrix.weights, expected.weights)
    assert matrix.sigmas.equal(measured.sigmas)
    with pytest.raises(ValueError, match="The profile has no reward 'pick'; it measured clip, ocr, geneval"):
        CreditMatrix.from_profile(measured, {"pick": 1.0})


def test_from_profile_takes_monotone_gains_even_without_shrinkage():
    measured = profile(torch.tensor([[5.0, 3.0, 4.0, 0.0]] * 3, dtype=F64), torch.ones(3, 3, dtype=F64))
    matrix = CreditMatrix.from_profile(measured, BUDGETS, shrinkage="none")
    assert matrix.gains.equal(measured.monotone_gains)
    assert (measured.gains < 0).any()
    assert (matrix.normalized != 1).any()


def test_from_profile_flattens_what_is_noise():
    curves = torch.rand(3, 9, dtype=F64).sort(descending=True).values
    curves[1] = 0.001 * torch.randn(9, dtype=F64)
    stderr = torch.full((3, 8), 0.002, dtype=F64)
    matrix = CreditMatrix.from_profile(profile(curves, stderr), BUDGETS)
    assert (matrix.normalized[1] == 1).all()
    assert (matrix.normalized[0] != 1).any()


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
    assert matrix.save(tmp_path / "deep" / name) == tmp_path / "deep" / f"{stem}.safetensors"
    loaded = CreditMatrix.load(tmp_path / "deep" / name)
    for field, value in vars(matrix).items():
        other = getattr(loaded, field)
        assert other.equal(value) if isinstance(value, torch.Tensor) else other == value, field
    assert list(loaded.budgets) == list(matrix.budgets)
    readable = json.loads((tmp_path / "deep" / f"{stem}.json").read_text())
    assert readable["weights"] == matrix.weights.tolist()
    assert readable["budgets"] == matrix.budgets
