import math

import pytest
import torch

from recast_lightning.credit import (
    monotone_divergence,
    monotone_gains,
    normalized_gains,
    renyi_divergence,
    shrunk_gains,
)
from recast_lightning.credit.gains import flat_rows

F64 = torch.float64


def test_renyi_divergence_by_hand():
    m = torch.tensor([[1.0, 4.0], [2.0, 2.0]])
    torch.testing.assert_close(renyi_divergence(m, 2.0), torch.tensor([2.5, 2.0], dtype=F64).log())
    torch.testing.assert_close(renyi_divergence(m, 1.0), torch.tensor([2.0, 2.0], dtype=F64).log())
    torch.testing.assert_close(renyi_divergence(m, 3.0), torch.tensor([8.5, 4.0], dtype=F64).log() / 2)
    torch.testing.assert_close(renyi_divergence(m, 0.5), -2 * torch.tensor([0.75, 0.5**0.5], dtype=F64).log())


def test_renyi_divergence_is_continuous_and_rises_in_its_order():
    m = torch.rand(3, 50, dtype=F64) + 0.1
    torch.testing.assert_close(renyi_divergence(m, 1 + 1e-7), renyi_divergence(m, 1.0), rtol=0, atol=1e-6)
    curve = torch.stack([renyi_divergence(m, order) for order in (0.3, 1.0, 1.5, 2.0, 5.0, 50.0)])
    assert (curve.diff(dim=0) > 0).all()


def test_renyi_divergence_does_not_underflow():
    m = torch.tensor([1e-200, 3e-200], dtype=F64)
    assert float(renyi_divergence(m, 3.0)) == pytest.approx(math.log(1e-200) + math.log(5.0) / 2)


def test_renyi_divergence_of_nothing_is_minus_infinity():
    assert float(renyi_divergence(torch.zeros(3), 2.0)) == -math.inf
    assert float(renyi_divergence(torch.tensor([0.0, 1.0]), 1.0)) == -math.inf
    assert math.isfinite(renyi_divergence(torch.tensor([0.0, 1.0]), 2.0))


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_renyi_order_must_be_positive(order):
    with pytest.raises(ValueError, match="order must be positive"):
        renyi_divergence(torch.rand(3), order)


def test_normalized_gains_keep_shape_only():
    gains = torch.tensor([[1.0, 2.0, 6.0], [0.5, -0.1, 0.2]], dtype=F64)
    expected = torch.tensor([[1.0, 2.0, 6.0], [2.5, -0.5, 1.0]], dtype=F64) / torch.tensor([[3.0], [1.0]])
    torch.testing.assert_close(normalized_gains(gains), expected)
    torch.testing.assert_close(normalized_gains(gains * torch.tensor([[1e-6], [1e6]])), expected)
    torch.testing.assert_close(normalized_gains(normalized_gains(gains)), expected)


@pytest.mark.parametrize("row", [[0.0] * 3, [0.1] * 3, [-0.1] * 3, [1.0, -1.0, 0.0], [-2.0, 1.0, 0.5], [1 / 3] * 3])
def test_rows_without_shape_are_exactly_flat(row):
    out = normalized_gains(torch.tensor([row, [1.0, 2.0, 3.0]], dtype=F64))
    assert out[0].equal(torch.ones(3, dtype=F64))
    assert out[1].equal(torch.tensor([0.5, 1.0, 1.5], dtype=F64))


@pytest.mark.parametrize("gains", [torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, torch.inf]]), torch.rand(3)])
def test_gains_must_be_a_finite_matrix(gains):
    with pytest.raises(ValueError, match="gains must be a finite matrix"):
        normalized_gains(gains)


def test_monotone_divergence_pools_violators():
    curve = torch.tensor([[5.0, 3.0, 4.0, 1.0, 1.5, 0.0]])
    expected = torch.tensor([[5.0, 3.5, 3.5, 1.25, 1.25, 0.0]], dtype=F64)
    torch.testing.assert_close(monotone_divergence(curve), expected)
    torch.testing.assert_close(monotone_gains(-curve.diff(dim=1)), -expected.diff(dim=1))
    falling = torch.rand(3, 9, dtype=F64).sort(descending=True).values
    torch.testing.assert_close(monotone_divergence(falling), falling)
    assert (monotone_gains(torch.randn(5, 10)) >= 0).all()


def test_monotone_divergence_weighs_levels_by_their_errors():
    curve = torch.tensor([[3.0, 5.0, 0.0]] * 4)
    stderr = torch.tensor([[1.0, 0.5, 7.0], [0.1, 0.1, 0.1], [1.0, 0.0, 1.0], [1.0, math.inf, 1.0]])
    expected = torch.tensor([[4.6, 4.6, 0.0], [4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [4.0, 4.0, 0.0]], dtype=F64)
    torch.testing.assert_close(monotone_divergence(curve, stderr), expected)
    torch.testing.assert_close(monotone_divergence(curve, stderr * 1e-30), expected)
    with pytest.raises(ValueError, match=r"stderr must be \[4, 3\] as the divergence is, got \[4, 2\]"):
        monotone_divergence(curve, stderr[:, 1:])


def simulated(curve, num_samples, repeats, seed=0):
    """Gains [repeats, T] and their covariances, of log mean m for rewards m with E m = exp(curve); levels correlate."""
    generator = torch.Generator().manual_seed(seed)
    shape = (repeats, num_samples, len(curve))
    m = torch.randn(shape, dtype=F64, generator=generator)
    for t in range(1, len(curve)):
        m[..., t] = 0.8 * m[..., t - 1] + 0.6 * m[..., t]
    prompt = torch.randn(repeats, num_samples, 1, dtype=F64, generator=generator)
    m = (curve + 0.6 * prompt + 0.3 * m).exp()
    influence = -(m / m.mean(1, keepdim=True)).diff(dim=2)
    covariance = influence.mT @ influence / (num_samples * (num_samples - 1))
    return -m.mean(1).log().diff(dim=1), covariance


PEAK = torch.tensor([0.02, 0.02, 0.05, 0.2, 0.4, 0.2, 0.05, 0.02, 0.02, 0.02], dtype=F64)


def test_two_levels_shrink_by_james_and_stein():
    """The only contrast, a = half the difference, keeps 1 - v / 4 a^2 of itself: v is the variance of the difference."""
    gains = torch.tensor([[1.0, 3.0]] * 3, dtype=F64)
    covariance = torch.tensor([[[0.2, 0.0], [0.0, 0.6]], [[0.5, 0.3], [0.3, 0.5]], [[0.6, 0.0], [0.0, 0.6]]], dtype=F64)
    expected = torch.tensor([[0.6, 1.4], [0.55, 1.45], [1.0, 1.0]], dtype=F64)  # 4 < 3.84 * 1.2: not significant
    torch.testing.assert_close(shrunk_gains(gains, covariance), expected)
    assert flat_rows(gains, covariance).tolist() == [False, False, True]


def test_mean_gain_must_be_clear_by_three_standard_errors():
    """A common error v of both gains leaves their difference exact, but blurs the mean by sqrt(v): 2 against 3 sqrt(v)."""
    gains = torch.tensor([[1.0, 3.0]] * 2, dtype=F64)
    covariance = torch.tensor([0.44, 0.45], dtype=F64).view(2, 1, 1).expand(2, 2, 2)
    torch.testing.assert_close(shrunk_gains(gains, covariance), torch.tensor([[0.5, 1.5], [1.0, 1.0]], dtype=F64))
    assert flat_rows(gains, covariance).tolist() == [False, True]


def test_prior_is_smooth_by_hand():
    """Three levels, where K has the eigenvectors (1, 0, -1) and (1, -2, 1), and noise v of each level is white."""
    e, v = math.exp(-4 / 3), 0.01
    slope, bend = 1 - e**2, (3 - 4 * e + e**2) / 3  # eigenvalues of K; a slope is likelier than a bend
    c = torch.tensor([-0.4, -0.1, 0.5], dtype=F64)  # 0.45 (-1, 0, 1) + 0.05 (1, -2, 1)
    scale = (slope * 2 * 0.45**2 + bend * 6 * 0.05**2 - (slope + bend) * v) / (slope**2 + bend**2)
    kept = [scale * k / (scale * k + v) for k in (slope, bend)]
    expected = 1 + kept[0] * 0.45 * torch.tensor([-1.0, 0, 1]) + kept[1] * 0.05 * torch.tensor([1.0, -2, 1])
    white = v * torch.eye(3, dtype=F64).unsqueeze(0)
    torch.testing.assert_close(shrunk_gains(1 + c.unsqueeze(0), white), expected.to(F64).unsqueeze(0))
    torch.testing.assert_close(shrunk_gains(7 + 7 * c.unsqueeze(0), 49 * white), expected.to(F64).unsqueeze(0))


def test_without_noise_gains_keep_their_shape():
    gains = torch.tensor([[1.0, 2.0, 6.0], [0.0, 1e-8, 0.0], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0]], dtype=F64)
    for noise in (torch.zeros(4, 3), torch.zeros(4, 3, 3)):
        torch.testing.assert_close(shrunk_gains(gains, noise), normalized_gains(gains))
        assert flat_rows(gains, noise).tolist() == [False, False, True, True]
    assert shrunk_gains(gains, noise)[2:].equal(torch.ones(2, 3, dtype=F64))
    pooled = torch.tensor([[0.0, 2.5, 1.0]], dtype=F64) * 3 / 3.5  # curve 3, 4, 1, 0 made 3.5, 3.5, 1, 0
    torch.testing.assert_close(shrunk_gains(torch.tensor([[-1.0, 3.0, 1.0]]), noise[:1]), pooled)


def test_standard_errors_are_a_diagonal_covariance():
    gains, covariance = simulated(1 - torch.linspace(0, 1, 11, dtype=F64).square(), 64, 20)
    stderr = covariance.diagonal(dim1=1, dim2=2).sqrt()
    shrunk = shrunk_gains(gains, stderr)
    torch.testing.assert_close(shrunk, shrunk_gains(gains, torch.diag_embed(stderr.square())))
    assert not shrunk.allclose(shrunk_gains(gains, covariance))


@pytest.mark.parametrize("num_samples", [16, 64, 256])
@pytest.mark.parametrize("num_levels", [10, 25])
def test_one_flat_row_in_twenty_passes_for_shaped(num_samples, num_levels):
    curve = torch.linspace(0.5, 0, num_levels + 1, dtype=F64)
    gains, covariance = simulated(curve, num_samples, 400)
    flat = flat_rows(gains, covariance)
    assert 0.005 <= 1 - float(flat.double().mean()) <= 0.09
    shrunk = shrunk_gains(gains, covariance)
    assert (shrunk == 1).all(1).equal(flat)
    torch.testing.assert_close(shrunk.mean(1), torch.ones(400, dtype=F64))
    assert (shrunk >= 0).all()


def test_dead_rows_are_exactly_flat():
    """Their bare normalisation gives 'gains' of several times the mean, or ones because the mean is negative."""
    gains, covariance = simulated(torch.zeros(11, dtype=F64), 64, 400)
    assert normalized_gains(gains).abs().amax(1).quantile(0.6) > 5
    shrunk = shrunk_gains(gains, covariance)
    assert (shrunk == 1).all(1).double().mean() > 0.99
    assert shrunk[gains.mean(1) <= 0].eq(1).all()


def test_signal_survives():
    curve = torch.cat([PEAK.sum().reshape(1), PEAK.sum() - PEAK.cumsum(0)])
    truth = normalized_gains(PEAK.unsqueeze(0))
    errors = []
    for num_samples in (64, 256, 1024):  # the third is nearly as it was measured
        gains, covariance = simulated(curve, num_samples, 40)
        assert not flat_rows(gains, covariance).any()
        shrunk = shrunk_gains(gains, covariance)
        errors.append(float((shrunk - truth).square().mean()))
        bare = float((normalized_gains(monotone_gains(gains)) - truth).square().mean())
        assert errors[-1] < 1.02 * bare
    assert 0.1 > errors[0] > 2 * errors[1] > 4 * errors[2]


def test_noise_of_a_smooth_bump_is_smoothed_away():
    gains = 0.7 * torch.linspace(-3, 3, 25, dtype=F64).square().div(-2).softmax(0)
    truth = normalized_gains(gains.unsqueeze(0))
    gains, covariance = simulated(torch.cat([gains.new_zeros(1), -gains.cumsum(0)]), 128, 40)
    bare = (normalized_gains(monotone_gains(gains)) - truth).square().mean()
    assert (shrunk_gains(gains, covariance) - truth).square().mean() < 0.6 * bare


def hopeless(value, dims):
    return torch.full((1, *[3] * dims), value, dtype=F64)


UNBOUNDED = torch.tensor([[[0.0, -math.inf, 0.0], [-math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]], dtype=F64)


@pytest.mark.parametrize("noise", [UNBOUNDED, *(hopeless(v, d) for v in (1.0, 1e300, math.inf) for d in (1, 2))])
def test_rows_with_hopeless_error_bars_are_flat(noise):
    gains = torch.tensor([[0.1, 0.2, 0.6]])
    assert shrunk_gains(gains, noise).equal(torch.ones(1, 3, dtype=F64))
    assert flat_rows(gains, noise).all()
    both = shrunk_gains(gains.repeat(2, 1), torch.cat([noise, torch.zeros_like(noise)]))
    torch.testing.assert_close(both[1], normalized_gains(gains)[0])


def test_equal_gains_are_flat_even_where_their_only_noise_is_common():
    gains, covariance = torch.full((5, 10), 0.1, dtype=F64), torch.full((5, 10, 10), 1e-5, dtype=F64)
    covariance *= torch.linspace(0.1, 1, 5, dtype=F64).view(5, 1, 1)
    assert shrunk_gains(gains, covariance).equal(torch.ones(5, 10, dtype=F64))


def test_one_level_has_no_shape():
    assert shrunk_gains(torch.tensor([[0.3], [-0.3]]), torch.zeros(2, 1)).equal(torch.ones(2, 1, dtype=F64))


@pytest.mark.parametrize("function", [shrunk_gains, flat_rows])
def test_noise_must_fit_the_gains(function):
    gains = torch.tensor([[0.1, 0.2, 0.6]])
    for noise in (torch.ones(1, 2), torch.ones(3), torch.ones(1, 2, 2), torch.ones(2, 3, 3), torch.ones(3, 3)):
        with pytest.raises(ValueError, match=r"noise must be standard errors \[1, 3\] or covariances \[1, 3, 3\]"):
            function(gains, noise)
    for noise in (-torch.ones(1, 3), hopeless(math.nan, 1), hopeless(math.nan, 2), -torch.eye(3).unsqueeze(0)):
        with pytest.raises(
            ValueError, match="noise must be neither negative nor NaN; an error that is not known is inf"
        ):
            function(gains, noise)
    with pytest.raises(ValueError, match="gains must be a finite matrix"):
        function(gains / 0, torch.ones(1, 3))
