"""From posterior mean rewards to divergences, and from gains to their shape (ReCAST, arXiv 2609.13425).

Shape legend: R rewards, T noise levels, N proposals; column t - 1 of a gain matrix is the step from level t to t - 1.
"""

import scipy  # which loads its parts when they are used
import torch
from torch import Tensor

_LEVEL = 0.05  # of the test for a flat row: how often noise around a flat row passes for shape
_CLEAR = 3.0  # standard errors by which the mean gain must exceed 0
_CORRELATION = 0.25  # length, in shares of the T levels, over which true gains are taken to resemble each other


def renyi_divergence(posterior_rewards: Tensor, order: float) -> Tensor:
    """Renyi divergence of a positive policy from its base, up to -log p: D = 1 / (alpha - 1) log mean m^(alpha - 1).

    docs/credit.md, (3) to (5).

    Over proposals x_t that stand in for the positive policy at level t, m(x_t) = E[r(x_0) | x_t]. Order 2 is log mean
    m; order 1 is the limit, the Kullback-Leibler divergence, mean log m. What is left out, log p = log E_pi[r],
    depends on no level: gains do not see it.

    Args:
        posterior_rewards: m >= 0, [..., N].
        order: alpha > 0.

    Returns:
        D + log p, [...], float64; -inf where no m is positive (for order <= 1: where one is not).
    """
    if not order > 0:
        raise ValueError(f"order must be positive, got {order}.")
    log_m = posterior_rewards.double().log()
    if order == 1:
        return log_m.mean(-1)
    log_moment = torch.logsumexp((order - 1) * log_m, -1)
    return (log_moment - torch.tensor(float(log_m.shape[-1]), dtype=torch.float64).log()) / (order - 1)


def monotone_divergence(divergence: Tensor, stderr: Tensor | None = None) -> Tensor:
    """Closest curves (least squares) that do not rise with noise, as (6) of docs/credit.md demands of the true ones.

    Args:
        divergence: Measured curves, column t is level t, [R, T + 1].
        stderr: Standard errors; a level counts as 1 / stderr^2, [R, T + 1]. Without them, and in a row where one is 0
            or not finite, all levels count the same.

    Returns:
        Non-increasing curves, [R, T + 1], float64; their gains are non-negative (data processing inequality).

    Raises:
        ValueError: If the shapes differ.
    """
    curves = divergence.detach().double().cpu()
    errors = torch.ones_like(curves) if stderr is None else stderr.detach().double().cpu()
    if errors.shape != curves.shape:
        raise ValueError(f"stderr must be {list(curves.shape)} as the divergence is, got {list(errors.shape)}.")
    usable = (errors.isfinite() & (errors > 0)).all(1, keepdim=True)
    weights = torch.where(usable, errors.amin(1, keepdim=True) / errors, 1.0).square()
    rows = [
        torch.from_numpy(
            scipy.optimize.isotonic_regression(curve.numpy(), weights=weight.numpy(), increasing=False).x.copy()
        )
        for curve, weight in zip(curves, weights, strict=True)
    ]
    return torch.stack(rows)


def monotone_gains(gains: Tensor) -> Tensor:
    """Gains of the closest curve that does not rise with noise (`monotone_divergence`): none negative.

    Args:
        gains: dD, [R, T].

    Returns:
        [R, T], float64.
    """
    curve = torch.nn.functional.pad(-gains.double().cumsum(1), (1, 0))
    return (-monotone_divergence(curve).diff(dim=1)).clamp(min=0)


def normalized_gains(gains: Tensor) -> Tensor:
    """Shape of the gains: each row over its mean, g~_t = dD_t / mean_t dD_t (docs/credit.md, (10)).

    A row that has no shape (all equal, or a mean that is not positive, as of a dead reward) becomes exactly ones, the
    flat row, which the projection turns into the static weights.

    Args:
        gains: dD, [R, T].

    Returns:
        g~ with row means 1, [R, T], float64.
    """
    if gains.ndim != 2 or not gains.double().sum(1).isfinite().all():
        raise ValueError(f"gains must be a finite matrix [rewards, levels] with finite sums, got {gains.tolist()}.")
    gains = gains.double()
    mean = gains.mean(1, keepdim=True)
    flat = (mean <= 0) | (gains == gains[:, :1]).all(1, keepdim=True)
    return torch.where(flat, 1.0, gains / mean.where(~flat, 1.0))


def flat_rows(gains: Tensor, noise: Tensor) -> Tensor:
    """Rows whose gains cannot be told from equal ones, or whose mean gain is not above 0 by three standard errors.

    Score test of a variance component (Lin 1997, Biometrika 84): with c = g~ - 1 of noise covariance N and the smooth
    prior K of `shrunk_gains`, a row is flat unless

        c' K c > tr(K N) chi2_nu(95%) / nu        nu = tr(K N)^2 / tr(K N K N)

    (Satterthwaite's chi-square). It looks for bumps several levels wide, not for the jitter that differencing leaves.

    Args:
        gains: dD, [R, T].
        noise: Standard errors [R, T], of gains taken as independent, or covariances [R, T, T].

    Returns:
        [R], bool. Truly flat rows come out False in about 5% of cases (`benchmarks/shrinkage.py`), and one whose noise
        is not finite is always True.

    Raises:
        ValueError: If the gains are no finite matrix, or the noise does not fit them or is negative or NaN.
    """
    contrasts, covariance, prior = _contrasts(gains, noise)
    signal, expected = _energy(contrasts, covariance, prior)
    smoothed = prior @ covariance
    freedom = expected.square() / (smoothed @ smoothed).diagonal(dim1=1, dim2=2).sum(1)
    critical = torch.from_numpy(scipy.special.chdtri(freedom.numpy(), _LEVEL)) / freedom
    return ~(signal > torch.where(expected > 0, expected * critical, 0.0))


def shrunk_gains(gains: Tensor, noise: Tensor) -> Tensor:
    """Normalised gains for gains with error bars: smoothed and pulled towards flat by their noise, then made monotone.

    docs/credit.md, (11).

    Empirical Bayes, per row. The shape c = g~ - 1 has noise of covariance N (that of the gains, without their mean)
    and, as prior, covariance s K with K_tu = exp(-4 |t - u| / T): true gains of neighbouring levels are alike.

        g~ = 1 + s K (s K + N)^-1 c        s = (c' K c - tr(K N)) / tr(K K)

    A row that cannot be told from flat (`flat_rows`), and no other, becomes exactly ones; without this, dividing by its
    mean blows its noise up. Gains without noise (none negative) keep their g~. `benchmarks/shrinkage.py` measures the rule.

    Args:
        gains: dD, [R, T].
        noise: Standard errors [R, T], of gains taken as independent, or covariances [R, T, T].

    Returns:
        [R, T], float64, on the CPU, none negative, row means 1.

    Raises:
        ValueError: As `flat_rows`.
    """
    contrasts, covariance, prior = _contrasts(gains, noise)
    shaped = ~flat_rows(gains, noise)
    shrunk = torch.ones_like(contrasts)
    if shaped.any():
        c, n = contrasts[shaped], covariance[shaped]
        signal, expected = _energy(c, n, prior)
        scaled = ((signal - expected) / prior.square().sum()).view(-1, 1, 1) * prior
        total = scaled + n
        constant = total.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)  # makes it invertible; c has no such part
        posterior = scaled @ torch.linalg.solve(total + constant / total.shape[-1], c.unsqueeze(2))
        shrunk[shaped] = normalized_gains(monotone_gains(1 + posterior.squeeze(2)))
    return shrunk


def _contrasts(gains: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g~ - 1 [R, T], its covariance [R, T, T] and the prior's K [T, T]; both 0 in rows without a clear mean gain."""
    normalized = normalized_gains(gains).detach().cpu()
    num_rewards, num_levels = normalized.shape
    noise = noise.detach().double().cpu()
    if noise.shape == normalized.shape:
        noise = torch.diag_embed(noise.square().where(noise >= 0, torch.nan))
    if noise.shape != (num_rewards, num_levels, num_levels):
        raise ValueError(
            f"noise must be standard errors {[num_rewards, num_levels]} or covariances "
            f"{[num_rewards, num_levels, num_levels]} of the gains, got {list(noise.shape)}."
        )
    if noise.isnan().any() or (noise.diagonal(dim1=1, dim2=2) < 0).any():
        raise ValueError("noise must be neither negative nor NaN; an error that is not known is inf.")
    mean = gains.detach().double().cpu().mean(1)
    clear = mean > _CLEAR * noise.sum((1, 2)).clamp(min=0).sqrt() / num_levels
    clear &= noise.isfinite().all(2).all(1)
    centring = torch.eye(num_levels, dtype=torch.float64) - 1 / num_levels
    level = torch.arange(num_levels, dtype=torch.float64)
    kernel = (-(level.unsqueeze(1) - level).abs() / (_CORRELATION * num_levels)).exp()
    noise = torch.where(clear.view(-1, 1, 1), noise / mean.square().view(-1, 1, 1), 0.0)
    contrasts = torch.where(clear.unsqueeze(1), normalized - 1, 0.0)
    return contrasts, centring @ noise @ centring, centring @ kernel @ centring


def _energy(contrasts: Tensor, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row c' K c and tr(K N), which is what noise alone makes of it, [R] each."""
    return torch.einsum("rt,tu,ru->r", contrasts, prior, contrasts), (prior * covariance).sum((1, 2))
