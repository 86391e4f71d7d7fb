import ot
import pytest
import torch

from recast_lightning.credit import normalized_gains, sinkhorn_projection
from recast_lightning.credit.sinkhorn import project

F64 = torch.float64


def margins(num_rows, num_columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(num_rows, dtype=F64, generator=generator) + 0.1
    columns = torch.rand(num_columns, dtype=F64, generator=generator) + 0.1
    return rows / rows.sum(), columns / columns.sum()


def random_gains(num_rows, num_columns, kind, seed):
    """Normalised gains: `mild` peaks at about 2 times the mean, `peaked` at about 15, `spike` at about T times."""
    generator = torch.Generator().manual_seed(seed)
    gains = torch.rand(num_rows, num_columns, dtype=F64, generator=generator)
    if kind == "peaked":
        gains = gains**30
    elif kind == "spike":
        gains = 1e-4 * gains
        gains[torch.arange(num_rows), torch.randint(num_columns, (num_rows,), generator=generator)] = 1.0
    return normalized_gains(gains)


def pot_sinkhorn(log_kernel, rows, columns):
    """The projection by POT's solver in the log domain, as entropic transport at cost -log K."""
    cost = -log_kernel.numpy()
    plan = ot.sinkhorn(
        rows.numpy(), columns.numpy(), cost, 1.0, "sinkhorn_log", numItermax=20_000, stopThr=1e-13, warn=False
    )
    return torch.from_numpy(plan)


def plain_sinkhorn(log_kernel, rows, columns, iterations):
    kernel = log_kernel.exp()
    for _ in range(iterations):
        kernel = kernel * (rows / kernel.sum(1)).unsqueeze(1)
        kernel = kernel * (columns / kernel.sum(0))
    return kernel


def assert_margins(weights, rows, columns):
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), rows, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights.sum(0), columns, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (1, 10), (4, 1), (2, 2), (5, 10), (4, 25)])
def test_margins_and_agreement_with_textbook_sinkhorn(num_rows, num_columns):
    kernel = torch.randn(num_rows, num_columns, dtype=F64)
    rows, columns = margins(num_rows, num_columns)
    weights = sinkhorn_projection(kernel, rows, columns)
    assert_margins(weights, rows, columns)
    torch.testing.assert_close(weights, plain_sinkhorn(kernel, rows, columns, 3000), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("kind", ["mild", "peaked", "spike"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(3, 10), (5, 25), (8, 50)])
@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_pot(num_rows, num_columns, kind, seed):
    kernel = random_gains(num_rows, num_columns, kind, seed)
    rows, columns = margins(num_rows, num_columns, seed)
    expected = pot_sinkhorn(kernel, rows, columns)
    assert_margins(expected, rows, columns)  # POT converged
    torch.testing.assert_close(sinkhorn_projection(kernel, rows, columns), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["mild", "peaked", "spike"])
@pytest.mark.parametrize("num_columns", [10, 25, 50])
@pytest.mark.parametrize("num_rows", range(3, 9))
def test_few_iterations_on_the_sizes_of_the_paper(num_rows, num_columns, kind):
    for seed in range(5):
        kernel = random_gains(num_rows, num_columns, kind, seed)
        rows, columns = margins(num_rows, num_columns, seed)
        weights, iterations = project(kernel, rows, columns)
        assert 0 < iterations < 50
        assert_margins(weights, rows, columns)
        assert weights.equal(sinkhorn_projection(kernel, rows, columns))


def test_two_by_two_closed_form():
    """The odds ratio of K is kept: with even margins W_11 = s / (2 (1 + s)), s its square root."""
    odds = 9.0
    kernel = torch.tensor([[odds, 1.0], [1.0, 1.0]], dtype=F64).log()
    half = torch.tensor([0.5, 0.5], dtype=F64)
    x = odds**0.5 / (2 * (1 + odds**0.5))
    expected = torch.tensor([[x, 0.5 - x], [0.5 - x, x]], dtype=F64)
    torch.testing.assert_close(sinkhorn_projection(kernel, half, half), expected)


def test_nothing_of_the_same_margins_is_closer_to_the_kernel():
    kernel = torch.randn(3, 6, dtype=F64)
    rows, columns = margins(3, 6)
    best = sinkhorn_projection(kernel, rows, columns)

    def divergence(weights):
        return float((weights * (weights.log() - kernel)).sum())

    for _ in range(20):
        change = torch.randn(3, 6, dtype=F64)
        change = change - change.mean(0) - change.mean(1, keepdim=True) + change.mean()
        assert divergence(best + 1e-3 * best.min() * change) > divergence(best)


def test_scaling_rows_or_columns_of_the_kernel_changes_nothing():
    kernel = torch.randn(3, 8, dtype=F64)
    rows, columns = margins(3, 8)
    scaled = kernel + 30 * torch.randn(3, 1, dtype=F64) + 30 * torch.randn(8, dtype=F64)
    torch.testing.assert_close(sinkhorn_projection(scaled, rows, columns), sinkhorn_projection(kernel, rows, columns))


def test_flat_kernel_gives_the_outer_product():
    rows = torch.tensor([1.0, 2.0, 5.0], dtype=F64)
    columns = torch.tensor([2.0, 4.0, 1.0, 1.0], dtype=F64)
    weights, iterations = project(torch.ones(3, 4) * torch.tensor([[3.0], [0.0], [-7.0]]), rows, columns)
    assert iterations == 0
    assert weights.equal(torch.outer(rows, columns) / 8)


def test_rows_and_columns_of_sum_zero_are_exactly_zero():
    kernel = torch.randn(3, 5, dtype=F64)
    rows = torch.tensor([0.4, 0.0, 0.6], dtype=F64)
    columns = torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=F64)
    weights = sinkhorn_projection(kernel, rows, columns)
    assert_margins(weights, rows, columns)
    assert (weights[1] == 0).all()
    assert (weights[:, 2] == 0).all()
    others = sinkhorn_projection(kernel[[0, 2]], rows[[0, 2]], columns)
    assert weights[[0, 2]].equal(others)


@pytest.mark.parametrize("seed", range(20))
def test_hard_kernels(seed):
    """Gains of 50 times the mean and budgets of a millionth."""
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(5, 12, dtype=F64, generator=generator)
    kernel[torch.arange(5), torch.randint(0, 12, (5,), generator=generator)] = 50.0
    rows = 10 ** (-6 * torch.rand(5, dtype=F64, generator=generator))
    rows[0] = 1e-6 * rows.max()
    rows, columns = rows / rows.sum(), torch.full((12,), 1 / 12, dtype=F64)
    weights = sinkhorn_projection(kernel, rows, columns)
    assert_margins(weights, rows, columns)
    torch.testing.assert_close(weights.sum(1), rows, rtol=1e-9, atol=0)  # small budgets are kept to nine digits too


@pytest.mark.parametrize("budgets", ["even", "a millionth", "a millionth and a zero"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("kind", ["peaked", "spike"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 50), (3, 1), (3, 10), (8, 50)])
def test_sharp_kernels_and_uneven_budgets(num_rows, num_columns, kind, temperature, budgets):
    """Kernel entries up to 5000, where plain Sinkhorn takes thousands of iterations."""
    columns = torch.full((num_columns,), 1 / num_columns, dtype=F64)
    for seed in range(3):
        rows = torch.ones(num_rows, dtype=F64)
        if budgets != "even":
            rows[0] = 1e-6 if num_rows > 1 else 1.0
        if "zero" in budgets and num_rows > 1:
            rows[1] = 0
        rows /= rows.sum()
        kernel = random_gains(num_rows, num_columns, kind, seed) / temperature
        weights, iterations = project(kernel, rows, columns)
        assert iterations < 200
        assert_margins(weights, rows, columns)
        torch.testing.assert_close(weights.sum(1), rows, rtol=1e-9, atol=0)
        assert (weights[rows == 0] == 0).all()


@pytest.mark.parametrize("seed", range(10))
def test_the_last_digits_where_the_dual_is_large(seed):
    """Kernel entries of 20,000: rounding hides the last falls of the dual, not those of the error."""
    kernel = random_gains(8, 50, "mild", seed) / 1e-4
    rows, columns = torch.full((8,), 1 / 8, dtype=F64), torch.full((50,), 1 / 50, dtype=F64)
    weights, iterations = project(kernel, rows, columns)
    assert iterations < 500
    assert_margins(weights, rows, columns)


@pytest.mark.parametrize("temperature", [0.03, 0.01, 0.003, 0.001])
def test_ordinary_gains_at_small_temperatures(temperature):
    """Where columns are as good as decided, the dual is flat: rounding hides its falls long before the margins fit."""
    generator = torch.Generator().manual_seed(0)
    rising_and_falling = torch.tensor([[1, 2, 3, 4], [0.5, 0.4, 0.3, 0.2]], dtype=F64)
    whole = [torch.randint(1, 6, (2 + n % 4, 4 + n % 9), generator=generator).double() for n in range(100)]
    for gains in (rising_and_falling, *whole):
        rows, columns = (torch.full((size,), 1 / size, dtype=F64) for size in gains.shape)
        weights, iterations = project(normalized_gains(gains) / temperature, rows, columns)
        assert iterations < 300
        assert_margins(weights, rows, columns)


def test_a_row_that_loses_every_column_by_thousands_still_gets_its_sum():
    """exp(-2000) is 0 in float64: the row is found in the log domain only."""
    kernel = torch.randn(3, 12, dtype=F64)
    kernel[0] -= 2000
    rows, columns = margins(3, 12)
    weights = sinkhorn_projection(kernel, rows, columns)
    assert_margins(weights, rows, columns)
    torch.testing.assert_close(weights, pot_sinkhorn(kernel, rows, columns), rtol=0, atol=1e-9)


def test_a_kernel_beyond_float64_is_refused_with_a_sentence():
    rows, columns = margins(3, 12)
    with pytest.raises(ValueError, match="the kernel is too sharp, so raise the temperature or smooth the gains"):
        sinkhorn_projection(1e300 * torch.randn(3, 12, dtype=F64), rows, columns)


def test_gives_up_with_a_sentence():
    rows, columns = margins(3, 6)
    with pytest.raises(ValueError, match=r"missed its row sums by .* after 1 iterations: .* raise the temperature"):
        sinkhorn_projection(40 * torch.randn(3, 6, dtype=F64), rows, columns, max_iterations=1)


def test_single_precision_margins_are_taken_as_meant():
    rows, columns = torch.tensor([0.3, 0.7]), torch.full((10,), 0.1)
    weights = sinkhorn_projection(torch.randn(2, 10), rows, columns)
    assert weights.dtype == F64
    torch.testing.assert_close(weights.sum(1), rows.double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kernel", "rows", "columns", "message"),
    [
        (torch.zeros(2, 2), [0.5, 0.5], [0.5, 0.6], "must have one total"),
        (torch.zeros(2, 2), [1.5, -0.5], [0.5, 0.5], "row_sums must be finite, non-negative and not all zero"),
        (torch.zeros(2, 2), [0.5, 0.5], [float("nan"), 1.0], "column_sums must be finite"),
        (torch.zeros(2, 2), [float("inf"), 0.5], [0.5, 0.5], "row_sums must be finite"),
        (torch.zeros(2, 2), [0.0, 0.0], [0.0, 0.0], "not all zero"),
        (torch.full((2, 2), -torch.inf), [0.5, 0.5], [0.5, 0.5], "log_kernel must be finite"),
        (torch.zeros(2, 3), [0.5, 0.5], [0.5, 0.5], r"log_kernel must be \[R, T\]"),
        (torch.zeros(2), [0.5, 0.5], [0.5, 0.5], r"log_kernel must be \[R, T\]"),
    ],
)
def test_infeasible_problems_are_refused(kernel, rows, columns, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn_projection(kernel, torch.tensor(rows, dtype=F64), torch.tensor(columns, dtype=F64))
