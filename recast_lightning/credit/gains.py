"""From rewards of rollouts to discriminability gains, and from gains to their shape (ReCAST, arXiv 2609.13425).

Shape legend: R rewards, T noise levels, N proposals; column t - 1 of a gain matrix is the step from level t to t - 1.
"""

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor


def renyi_divergence(posterior_rewards: Tensor, order: float) -> Tensor:
    """Renyi divergence of a positive policy from its base, up to -log p: D = 1 / (alpha - 1) log mean m^(alpha - 1).

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


def monotone_divergence(divergence: Tensor) -> Tensor:
    """Closest curves (least squares) that do not rise with noise: noising cannot tell policies apart better.

    Args:
        divergence: Measured curves, column t is level t, [R, T + 1].

    Returns:
        Non-increasing curves, [R, T + 1], float64; their gains are non-negative (data processing inequality).
    """
    rows = [isotonic_regression(row.numpy(), increasing=False).x.copy() for row in divergence.double().cpu()]
    return torch.stack([torch.from_numpy(row) for row in rows])


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
    """Shape of the gains: each row over its mean, g~_t = dD_t / mean_t dD_t.

    A row that has no shape (all equal, or a mean that is not positive, as of a dead reward) becomes exactly ones, the
    flat row, which the projection turns into the static weights.

    Args:
        gains: dD, [R, T].

    Returns:
        g~ with row means 1, [R, T], float64.
    """
    if gains.ndim != 2 or not gains.isfinite().all():
        raise ValueError(f"gains must be a finite matrix [rewards, levels], got {gains.tolist()}.")
    gains = gains.double()
    mean = gains.mean(1, keepdim=True)
    flat = (mean <= 0) | (gains == gains[:, :1]).all(1, keepdim=True)
    return torch.where(flat, 1.0, gains / mean.where(~flat, 1.0))


def shrunk_gains(gains: Tensor, gains_stderr: Tensor) -> Tensor:
    """Normalised gains for gains with error bars: made monotone, then pulled towards flat by their share of noise.

    Empirical Bayes (James-Stein, positive part), per row: 1 + f (g~ - 1) with

        f = max(0, 1 - mean_t se_t^2 / mean_t (dD_t - mean dD)^2).

    A row that cannot be told from flat becomes exactly ones; without this, dividing by its mean blows its noise up. The
    error bars are those before the monotone fit, which quietens noise: doubtful rows are rather flattened.

    Args:
        gains: dD, [R, T].
        gains_stderr: Standard errors of dD, [R, T].

    Returns:
        [R, T], float64, row means 1.
    """
    if gains_stderr.shape != gains.shape or not (gains_stderr >= 0).all():
        raise ValueError(f"gains_stderr must be non-negative and {list(gains.shape)} as gains are, got {gains_stderr}.")
    gains = monotone_gains(gains)
    noise = gains_stderr.to(gains).square().mean(1, keepdim=True)
    observed = gains.var(1, correction=0, keepdim=True)
    keep = (1 - noise / observed).where(observed > 0, 0.0).clamp(min=0)
    return torch.where(keep > 0, 1 + keep * (normalized_gains(gains) - 1), 1.0)
