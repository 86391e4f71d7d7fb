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


def test_shrinking_by_hand():
    gains = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], dtype=F64)
    stderr = (
        torch.tensor([[1 / 3] * 3, [0.0] * 3], dtype=F64) ** 0.5
    )  # variance of the row is 2 / 3: half of it is noise
    expected = torch.tensor([[0.75, 1.0, 1.25], [0.5, 1.0, 1.5]], dtype=F64)
    torch.testing.assert_close(shrunk_gains(gains, stderr), expected)


def test_noise_is_flattened_exactly_and_signal_survives():
    """Flat curves with errors of 0.01 nats, whose bare normalisation gives 'gains' of tens of times the mean."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(200, 11, dtype=F64, generator=generator)
    stderr = torch.full((200, 10), 0.01 * 2**0.5, dtype=F64)
    assert normalized_gains(-noise.diff(dim=1)).abs().amax(1).quantile(0.75) > 5
    assert shrunk_gains(-noise.diff(dim=1), stderr).equal(torch.ones(200, 10, dtype=F64))
    steep = torch.linspace(1, 0, 11, dtype=F64).square() + noise
    truth = normalized_gains(-torch.linspace(1, 0, 11, dtype=F64).square().diff().unsqueeze(0))
    assert (shrunk_gains(-steep.diff(dim=1), stderr) - truth).abs().mean() < 0.15


@pytest.mark.parametrize("stderr", [torch.full((1, 3), torch.inf), torch.ones(1, 3)])
def test_rows_with_hopeless_error_bars_are_flat(stderr):
    assert shrunk_gains(torch.tensor([[0.1, 0.2, 0.6]]), stderr).equal(torch.ones(1, 3, dtype=F64))


@pytest.mark.parametrize("stderr", [torch.ones(1, 2), -torch.ones(1, 3), torch.full((1, 3), torch.nan)])
def test_error_bars_must_fit_the_gains(stderr):
    with pytest.raises(ValueError, match="gains_stderr must be non-negative and"):
        shrunk_gains(torch.tensor([[0.1, 0.2, 0.6]]), stderr)
