"""Policies whose posteriors are known, to hold estimates against: mixtures of Gaussians, and rewards on them.

Shape legend: K components, d coordinates, B points, S calls of a completion.
"""

import math
from dataclasses import dataclass

import torch

from recast_lightning.flow.posterior import posterior_steps

F64 = torch.float64


def grid(num_levels, shift=1.0):
    """The sampler's levels, as FlowMatchEulerDiscreteScheduler shifts them."""
    u = torch.linspace(0, 1, num_levels + 1, dtype=F64)
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True)
class Mixture:
    """sum_k weights_k N(means_k, diag variances_k): weights [K], means and variances [K, d]."""

    weights: torch.Tensor
    means: torch.Tensor
    variances: torch.Tensor

    def noised(self, sigma):
        """Law of x_sigma."""
        return Mixture(self.weights, (1 - sigma) * self.means, (1 - sigma) ** 2 * self.variances + sigma**2)

    def log_density(self, x):
        """Of each component with its weight, [B, K]."""
        square = ((x[:, None] - self.means) ** 2 / self.variances + (2 * math.pi * self.variances).log()).sum(-1)
        return self.weights.log() - 0.5 * square

    def posterior(self, x, sigma):
        """p(x0 | x_sigma), for a sigma of each row [B] or a number: weights [B, K], means and variances [B, K, d]."""
        sigma = torch.as_tensor(sigma, dtype=F64).view(-1, 1, 1)
        variances = (1 - sigma) ** 2 * self.variances + sigma**2
        gap = x.to(F64)[:, None] - (1 - sigma) * self.means
        weights = (self.weights.log() - 0.5 * (gap**2 / variances + variances.log()).sum(-1)).softmax(1)
        return (
            weights,
            self.means + (1 - sigma) * self.variances / variances * gap,
            self.variances * sigma**2 / variances,
        )

    def velocity(self, x, sigma, index=None):
        """The exact velocity, (x - E[x0 | x_sigma]) / sigma."""
        weights, means, _ = self.posterior(x, sigma)
        x0_hat = (weights[..., None] * means).sum(1)
        return ((x - x0_hat) / torch.as_tensor(sigma, dtype=F64).view(-1, 1)).to(x.dtype)

    def sample(self, uniform):
        """From uniform [B, 1 + d]: the first number chooses the component."""
        chosen = torch.searchsorted(self.weights.cumsum(0), uniform[:, 0].contiguous()).clamp(max=len(self.weights) - 1)
        return self.means[chosen] + self.variances[chosen].sqrt() * normal(uniform[:, 1:])


def gaussian(mean, variance, dim=1):
    """One component; mean and variance are numbers or one for each coordinate."""
    full = [torch.as_tensor(v, dtype=F64).expand(dim)[None].clone() for v in (mean, variance)]
    return Mixture(torch.ones(1, dtype=F64), *full)


def mixture(weights, means, variances):
    """Components with the same variance in every coordinate; means are numbers, or vectors."""
    means = torch.tensor(means, dtype=F64).view(len(weights), -1)
    variances = torch.tensor(variances, dtype=F64)[:, None].expand_as(means).clone()
    return Mixture(torch.tensor(weights, dtype=F64), means, variances)


@dataclass(frozen=True)
class Bump:
    """r(x0) = exp(-sum_d (x0 - center)^2 / (2 width)); width inf leaves a coordinate out."""

    center: torch.Tensor
    width: torch.Tensor

    def __call__(self, x0, index=None):
        return torch.exp(-((x0 - self.center) ** 2 / (2 * self.width)).sum(-1))

    def posterior_mean(self, policy, x, sigma):
        weights, means, variances = policy.posterior(x, sigma)
        return (weights * self._smoothed(means, variances)).sum(1)

    def positive(self, policy):
        """pi+ of a policy: a mixture again."""
        mass = policy.weights * self._smoothed(policy.means, policy.variances)
        variances = 1 / (1 / policy.variances + 1 / self.width)
        means = variances * (policy.means / policy.variances + self.center / self.width)
        return Mixture(mass / mass.sum(), means, variances)

    def _smoothed(self, means, variances):
        """E[r] of N(means, variances)."""
        square = (means - self.center) ** 2 / (self.width + variances) + (1 + variances / self.width).log()
        return torch.exp(-0.5 * square.sum(-1))


def bump(center, width, dim=1):
    """Center and width are numbers or one for each coordinate."""
    return Bump(*(torch.as_tensor(v, dtype=F64).expand(dim).clone() for v in (center, width)))


@dataclass(frozen=True)
class Membership:
    """r(x0) = p(component | x0) of a policy: nearly 0 or 1. It is a martingale, so E[r | x_t] = p(component | x_t)."""

    policy: Mixture
    component: int

    def __call__(self, x0, index=None):
        return self.policy.log_density(x0.to(F64)).softmax(1)[:, self.component]

    def posterior_mean(self, policy, x, sigma):
        return policy.posterior(x, sigma)[0][:, self.component]

    def positive(self, policy):
        k = self.component
        return Mixture(torch.ones(1, dtype=F64), policy.means[[k]], policy.variances[[k]])


def normal(uniform):
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))


def sobol(count, dim, seed):
    """Scrambled low-discrepancy points (0, 1), [count, dim]."""
    return torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(count, dtype=F64)


def exact_divergence(policy, reward, sigmas, order, *, count=1 << 16):
    """D + log p at all levels: closed forms for one Gaussian and a bump, else quadrature (1-D) or many points."""
    positive = reward.positive(policy)
    curve = []
    for sigma in sigmas.tolist():
        if isinstance(reward, Bump) and len(policy.weights) == 1:
            gain = (1 - sigma) * policy.variances / policy.noised(sigma).variances
            offset = policy.means * (1 - (1 - sigma) * gain)
            spread = policy.variances * sigma**2 / policy.noised(sigma).variances
            curve.append(affine_divergence(policy, reward, sigma, order, gain, offset, spread))
            continue
        noised = positive.noised(sigma)
        if policy.means.shape[1] == 1:
            x, weights = quadrature(noised)
        else:
            x = noised.sample(sobol(count, 1 + policy.means.shape[1], seed=7))
            weights = torch.full((count,), 1 / count, dtype=F64)
        curve.append(power_mean(reward.posterior_mean(policy, x, sigma), weights, order))
    return torch.tensor(curve, dtype=F64)


def quadrature(law, count=4001):
    """Points [count, 1] and weights [count] of a law on the line."""
    radius = 9 * law.variances.sqrt()
    x = torch.linspace(float((law.means - radius).min()), float((law.means + radius).max()), count, dtype=F64)[:, None]
    density = law.log_density(x).logsumexp(1).exp()
    return x, density / density.sum()


def power_mean(m, weights, order):
    """1 / (order - 1) log E[m^(order - 1)]."""
    k = order - 1
    return float((weights @ m.log()) if k == 0 else (weights @ m**k).log() / k)


def affine_divergence(policy, reward, sigma, order, gain, offset, spread):
    """D + log p for one Gaussian, if x0 | x_sigma is taken to be N(gain x_sigma + offset, spread)."""
    k = order - 1
    noised = reward.positive(policy).noised(sigma)
    width = reward.width + spread
    gap, nu = gain * noised.means + offset - reward.center, gain**2 * noised.variances
    logs = -0.5 * (width / reward.width).log()  # log m = logs - (gain x + offset - center)^2 / (2 width)
    if k == 0:
        terms = logs - (gap**2 + nu) / (2 * width)
    else:
        terms = logs - 0.5 / k * (1 + k * nu / width).log() - gap**2 / (2 * (width + k * nu))
    return float(terms[reward.width.expand_as(terms).isfinite()].sum())


def affine_posterior(policy, steps):
    """What a completion by ``steps`` makes of one Gaussian: gain, offset and variance of x0 given x_t, without sampling.

    Every completion is linear in x_t, 1, and the noise of its steps; W has independent increments in snr.
    """
    dim = policy.means.shape[1]
    x = torch.zeros(2 + len(steps), dim, dtype=F64)  # impulse of x_t, constant, noise of each step
    x[0], before = 1.0, torch.zeros(2 + len(steps), dim, dtype=F64)
    for k, step in enumerate(steps):
        noised = policy.noised(step.sigma)
        gain = ((1 - step.sigma) * policy.variances / noised.variances)[0]
        x0_hat = gain * x
        x0_hat[1] += policy.means[0] - gain * noised.means[0]
        if k + 1 == len(steps):
            return x0_hat[0], x0_hat[1], x0_hat[2:].square().sum(0)
        x = step.keep * x + step.pull * (x0_hat + step.slope * (x0_hat - before))
        x[2 + k] += step.spread * math.sqrt(snr(steps[k + 1].sigma) - snr(step.sigma))
        before = x0_hat
    raise ValueError("A completion has at least one step.")


def snr(sigma):
    return ((1 - sigma) / sigma) ** 2


def solved_divergence(policy, reward, sigmas, order, grids, method):
    """What a solver makes of D + log p at all levels, for one Gaussian and a bump; ``grids`` has one a level t >= 1."""
    curve = [float(exact_divergence(policy, reward, sigmas[:1], order))]
    for sigma, levels in zip(sigmas[1:].tolist(), grids, strict=True):
        moments = affine_posterior(policy, posterior_steps(levels, method))
        curve.append(affine_divergence(policy, reward, sigma, order, *moments))
    return torch.tensor(curve, dtype=F64)


def roll_out(policy, x, steps, uniform):
    """Completions from x [B, d] with the noise of uniform [B, (S - 1) d]."""
    z, before = normal(uniform).view(len(x), -1, x.shape[1]), torch.zeros_like(x)
    for k, step in enumerate(steps):
        x0_hat = x - step.sigma * policy.velocity(x, step.sigma)
        if k + 1 == len(steps):
            return x0_hat
        spread = step.spread * math.sqrt(snr(steps[k + 1].sigma) - snr(step.sigma))
        x = step.keep * x + step.pull * (x0_hat + step.slope * (x0_hat - before)) + spread * z[:, k]
        before = x0_hat
    raise ValueError("A completion has at least one step.")


def worst(curve, exact):
    """Largest errors of D and of a gain."""
    error = curve - exact
    return float(error.abs().max()), float(error.diff().abs().max())
