"""From scores of completions to curves with error bars.

Shape legend: N proposals, C prompts, J completions of a proposal at a level, L measured levels, T levels,
B bootstrap replicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

_CHUNK = 4_000_000  # numbers in one block of bootstrap weights


@dataclass(frozen=True)
class Curve:
    """One reward's divergence along the measured levels, the first being level 0.

    Attributes:
        divergence: D + log p, [L + 1].
        replicates: Bootstrap replicates of ``divergence``, [B, L + 1]; empty if there is one prompt only.
        nested_bias: What the jackknife took off, [L + 1]; zero at order 2.
        mean_rewards: Mean score, [L + 1].
        failed: Proposals left out.
        effective_samples: Of the importance weights, a prompt (mean); the proposals a prompt without them.
    """

    divergence: Tensor
    replicates: Tensor
    nested_bias: Tensor
    mean_rewards: Tensor
    failed: int
    effective_samples: float


def bootstrap_weights(prompts: Tensor, num_replicates: int, seed: int) -> list[Tensor]:
    """Weights of all proposals in each replicate, in blocks [b, N]: Rubin's Bayesian bootstrap over prompts.

    Every prompt gets an exponential weight, shared by its proposals, so that no replicate loses a prompt altogether and
    none has a logarithm of nothing.

    Args:
        prompts: Number of each proposal's prompt, [N].
        num_replicates: B.
        seed: Of the weights.
    """
    source, count = np.random.default_rng(seed), int(prompts.max()) + 1
    rows = max(1, min(num_replicates, _CHUNK // len(prompts)))
    blocks = [min(rows, num_replicates - start) for start in range(0, num_replicates, rows)]
    return [torch.from_numpy(source.exponential(size=(block, count)))[:, prompts] for block in blocks]


def estimate_curve(
    name: str,
    scores: Sequence[Tensor],
    prompts: Tensor,
    replicate_weights: Sequence[Tensor],
    *,
    order: float,
    importance: bool,
) -> Curve:
    """Divergence of one reward from scores of completions (ReCAST, arXiv 2609.13425; docs/credit.md, (3) to (5), (9)).

    At level t, D = 1 / k log E[m^k] with k = order - 1 (order 1: E[log m]), where m is the mean score of a proposal's
    completions. Except at k = 1, noise of m biases m^k: the jackknife over completions takes the bias off, to first
    order in 1 / J.

    A proposal with a score that is not finite is left out at all levels. At orders above 1, a level with no success
    at all is taken to hold half of one (log 0 is no estimate), and a reward that is 0 everywhere has a flat curve.

    Args:
        name: Of the reward, for messages.
        scores: Of level 0, then of each measured level, [N, J] each.
        prompts: Number of each proposal's prompt, [N].
        replicate_weights: See `bootstrap_weights`.
        order: Alpha.
        importance: Whether the proposals are the policy's own and stand for the positive policy with the weight of
            their score at level 0, normalised within each prompt.

    Raises:
        ValueError: If nothing is left, or order <= 1 meets a mean of 0.
    """
    valid = torch.stack([level.isfinite().all(1) for level in scores]).all(0)
    if not valid.any():
        raise ValueError(f"Reward {name!r} failed on every proposal: none of them has finite scores at all levels.")
    weights = torch.ones(int(valid.sum()), dtype=torch.float64)
    effective = len(weights) / len(prompts[valid].unique())
    if importance:
        weights, effective = importance_weights(name, scores[0][valid, 0], prompts[valid])
    every = [torch.ones(1, len(prompts), dtype=torch.float64), *replicate_weights]
    kept = [block[:, valid] * weights for block in every]
    top = float(max(level[valid].max() for level in scores))
    levels = [_level(name, level[valid], kept, order, top) for level in scores]
    estimates, bias = torch.stack([d for d, _ in levels], 1), torch.stack([b for _, b in levels])
    divergence, replicates = estimates[0], estimates[1:]
    count = len(prompts[valid].unique())
    if count > 1:  # Dirichlet weights understate the variance of few prompts by (C - 1) / (C + 1)
        replicates = divergence + ((count + 1) / (count - 1)) ** 0.5 * (replicates - divergence)
    mean = torch.stack([(weights @ level[valid].mean(1)) / weights.sum() for level in scores])
    return Curve(
        divergence, replicates[: len(replicates) if count > 1 else 0], bias, mean, int((~valid).sum()), effective
    )


def interpolate(values: Tensor, levels: Sequence[int], num_levels: int) -> Tensor:
    """Curves on all levels 0 ... T from those measured at 0 and ``levels``, by monotone cubics (PCHIP), [..., T + 1]."""
    if len(levels) == num_levels:
        return values
    cubic = scipy.interpolate.PchipInterpolator([0, *levels], values.numpy(), axis=-1)
    return torch.from_numpy(cubic(np.arange(num_levels + 1)))


def importance_weights(name: str, own: Tensor, prompts: Tensor) -> tuple[Tensor, float]:
    """Weights of the policy's own images for the positive policy of a reward, r / E[r] within each prompt.

    Args:
        name: Of the reward.
        own: Its scores r >= 0, [N].
        prompts: Number of each image's prompt, [N].

    Returns:
        Weights [N], of sum K for each prompt of K images (0 where no image has a reward), and how many images a prompt
        they are worth (Kish: (sum w)^2 / sum w^2; the mean over prompts, one without any reward counting 0).

    Raises:
        ValueError: If every score is 0.
    """
    _, prompts, counts = prompts.unique(return_inverse=True, return_counts=True)
    total = torch.zeros(len(counts), dtype=torch.float64).index_add(0, prompts, own)
    squares = torch.zeros_like(total).index_add(0, prompts, own.square())
    if not total.any():
        raise ValueError(f"Reward {name!r} is 0 on every image of the policy's own: it cannot weight them.")
    weights = own / total.where(total > 0, 1.0)[prompts] * counts[prompts]
    alive = total > 0
    return weights, float((total[alive].square() / squares[alive]).sum() / len(counts))


def _level(name: str, scores: Tensor, weights: list[Tensor], order: float, top: float) -> tuple[Tensor, Tensor]:
    """D of one level under each row of weights [1 + B], and the bias of the first, from scores [N, J]."""
    k, (num_proposals, count) = order - 1, scores.shape
    m = scores.mean(1, keepdim=True)
    nested = k != 1 and count > 1 and bool((scores != scores[:, :1]).any())
    if nested:
        m = torch.cat([m, (count * m - scores) / (count - 1)], 1)  # and the means without completion j
    if top == 0:
        return torch.zeros(sum(map(len, weights)), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if k <= 0 and (m <= 0).any():
        raise ValueError(
            f"Reward {name!r} is 0 in all completions (or all but one) of some proposal, which order {order:g} cannot "
            "measure: use order 2."
        )
    m = m / top  # powers of small numbers underflow
    powers = m.log() if k == 0 else m**k
    moments = torch.cat([(block @ powers) / block.sum(1, keepdim=True) for block in weights])
    if k > 0:
        moments = moments.clamp(min=(0.5 / count) ** k / num_proposals)
    divergence = (moments if k == 0 else moments.log() / k) + np.log(top)
    whole = divergence[:, 0]
    if not nested:
        return whole, torch.zeros((), dtype=torch.float64)
    corrected = count * whole - (count - 1) * divergence[:, 1:].mean(1)
    return corrected, whole[0] - corrected[0]
