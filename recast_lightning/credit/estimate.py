"""Measures when in denoising each reward tells good from bad (ReCAST, arXiv 2609.13425).

Shape legend: N proposals, J rollouts a proposal, R rewards, T noise levels, B batch; ``...`` is any data shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.gains import renyi_divergence
from recast_lightning.credit.profile import Profile
from recast_lightning.flow import Posterior, Velocity, noise_to, sample_posterior
from recast_lightning.seeds import noise as keyed_noise

Reward = Callable[[Tensor, Tensor], Tensor]
"""``reward(x0 [B, ...], index [B]) -> [B]``, non-negative; ``index`` is the row of the proposal."""


def profile_cost(num_proposals: int, num_levels: int, rollouts: int = 1) -> int:
    """Velocity evaluations of `estimate_profile`, in samples: N J T (T + 1) / 2."""
    return num_proposals * rollouts * num_levels * (num_levels + 1) // 2


@torch.no_grad()
def estimate_profile(
    velocity: Velocity,
    proposals: Tensor,
    rewards: dict[str, Reward],
    sigmas: Tensor,
    *,
    rollouts: int = 1,
    order: float = 2.0,
    posterior: Posterior = "sde2",
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Profile:
    """Discriminability D_t of every reward at every level, from one set of proposals.

    Proposals stand in for samples of the positive policies. Each is noised to level t, x_t, and J rollouts
    x0 ~ p(x0 | x_t) of the policy are scored: their mean is m(x_t), and D_t = renyi_divergence(m). At order 2 any J is
    unbiased; other orders bend with the noise of m, so give them several rollouts. Level 0 scores the proposals
    themselves.

    Noise is keyed by (seed, proposal, rollout), so the batch size changes nothing, and is common to all levels: every
    level alone is sampled correctly, and differences between levels, the gains, are paired.

    A proposal with a score that is not finite is left out of that reward at all levels. A level whose every score is
    exactly 0 is taken to hold half of one top score (log 0 is no estimate); a reward that is 0 everywhere has a flat
    curve.

    Args:
        velocity: Policy, see `Velocity`; ``index`` is the row of ``proposals``.
        proposals: Clean data of a strong generator, in the policy's space, [N, ...].
        rewards: Name to non-negative reward.
        sigmas: Ascending levels from 0, [T + 1].
        rollouts: J >= 1.
        order: Renyi order alpha > 0.
        posterior: Sampler of the rollouts, see `sample_posterior`.
        generator: Gives one seed; default torch's global generator.
        batch_size: Rollouts in one network call.
        progress: Called with the velocity evaluations done so far, of `profile_cost`.
        metadata: JSON-able facts to keep with the profile.

    Returns:
        The measured `Profile`.
    """
    num_proposals = len(proposals)
    if min(num_proposals, rollouts, batch_size, len(rewards)) < 1:
        raise ValueError(
            "proposals, rollouts, rewards and batch_size must each be at least one, got "
            f"{num_proposals}, {rollouts}, {len(rewards)} and {batch_size}."
        )
    if not order > 0:
        raise ValueError(f"order must be positive, got {order}.")
    device = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    scores, network_calls = _measure(
        velocity, proposals, rewards, sigmas, rollouts, posterior, seed, batch_size, progress or (lambda _: None)
    )
    measured = {name: _posterior_rewards(name, score) for name, score in zip(rewards, scores, strict=True)}
    curves = [_curve(name, m, order, rollouts) for name, m in measured.items()]
    divergence, stderr, gains_stderr = (torch.stack(parts) for parts in zip(*curves, strict=True))
    return Profile(
        divergence=divergence,
        stderr=stderr,
        gains_stderr=gains_stderr,
        mean_rewards=torch.stack([m.mean(0) for m in measured.values()]),
        sigmas=sigmas.detach().cpu().clone(),
        rewards=list(rewards),
        order=float(order),
        posterior=posterior,
        rollouts=rollouts,
        num_proposals=num_proposals,
        failed={name: num_proposals - len(m) for name, m in measured.items()},
        network_calls=network_calls,
        metadata=metadata or {},
    )


def _measure(
    velocity: Velocity,
    proposals: Tensor,
    rewards: dict[str, Reward],
    sigmas: Tensor,
    rollouts: int,
    posterior: Posterior,
    seed: int,
    batch_size: int,
    progress: Callable[[int], None],
) -> tuple[Tensor, int]:
    """Scores of every rollout, [R, N, J, T + 1], and the velocity evaluations they took."""
    num_proposals, num_levels = len(proposals), len(sigmas) - 1
    scores = torch.empty(len(rewards), num_proposals, rollouts, num_levels + 1, dtype=torch.float64)
    for index in torch.split(torch.arange(num_proposals), batch_size):
        at = index.to(proposals.device)
        scores[:, index, :, 0] = _score(rewards, proposals[at], at).unsqueeze(2)
    network_calls = 0
    for rows in torch.split(torch.arange(num_proposals * rollouts), batch_size):
        index, rollout = rows // rollouts, rows % rollouts
        at = index.to(proposals.device)
        noise, path = _noise(seed, proposals[at], index, rollout, num_levels)
        for t in range(1, num_levels + 1):
            x_t = noise_to(proposals[at].to(noise.dtype), noise, float(sigmas[t]))
            x0 = sample_posterior(velocity, x_t, sigmas, t, method=posterior, noise=path.__getitem__, index=at)
            scores[:, index, rollout, t] = _score(rewards, x0, at)
            network_calls += t * len(rows)
            progress(network_calls)
    return scores, network_calls


def _noise(seed: int, like: Tensor, index: Tensor, rollout: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Forward noise [B, ...] of each proposal and path noise [T, B, ...] of each rollout; row k is for level k."""
    shape = like.shape[1:]
    forward = keyed_noise(shape, [(seed, "forward", i) for i in index.tolist()])
    pairs = zip(index.tolist(), rollout.tolist(), strict=True)
    path = keyed_noise((num_levels, *shape), [(seed, "path", i, j) for i, j in pairs]).transpose(0, 1)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return forward.to(like.device, dtype), path.to(like.device, dtype)


def _score(rewards: dict[str, Reward], x0: Tensor, index: Tensor) -> Tensor:
    """Scores of a batch, [R, B]."""
    scores = []
    for name, reward in rewards.items():
        score = reward(x0, index)
        if score.shape != index.shape:
            raise ValueError(f"Reward {name!r} must give one score a sample, [{len(index)}], got {list(score.shape)}.")
        if (score < 0).any():
            raise ValueError(
                f"Reward {name!r} gave {float(score[score < 0][0]):g}, but rewards must be non-negative: "
                "pass a signed reward through an increasing positive transform first, such as exp or a sigmoid."
            )
        scores.append(score.double().cpu())
    return torch.stack(scores)


def _posterior_rewards(name: str, scores: Tensor) -> Tensor:
    """m(x_t) of the proposals without a failed score, [N, T + 1], from scores [N, J, T + 1]."""
    valid = scores.isfinite().all(2).all(1)
    if not valid.any():
        raise ValueError(f"Reward {name!r} failed on every proposal: none of them has finite scores at all levels.")
    return scores[valid].mean(1)


def _curve(name: str, m: Tensor, order: float, rollouts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence [T + 1], its standard error [T + 1] and that of the gains [T], from m [N, T + 1].

    Error bars by the delta method over proposals: D = 1/k log mean m^k, k = alpha - 1, has the influence function
    psi_t = (m_t^k / mean m_t^k - 1) / k (order 1: log m_t - mean log m_t), and the gain at t has psi_{t-1} - psi_t.
    """
    dead = (m == 0).all(0)
    if dead.all():
        m = torch.ones_like(m)
    elif dead.any():
        m = m.clone()
        m[0, dead] = m.max() / (2 * rollouts)
    divergence = renyi_divergence(m.T, order)
    if not divergence.isfinite().all():
        raise ValueError(f"Reward {name!r} is 0 on some proposals, which order {order:g} cannot measure: use order 2.")
    log_ratio = m.log() - divergence
    influence = log_ratio if order == 1 else torch.expm1((order - 1) * log_ratio) / (order - 1)
    if len(m) == 1:
        return divergence, torch.full_like(divergence, torch.inf), torch.full_like(divergence[1:], torch.inf)
    return divergence, influence.std(0) / len(m) ** 0.5, influence.diff(dim=1).std(0) / len(m) ** 0.5
