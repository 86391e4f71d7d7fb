"""Measures when in denoising each reward tells good from bad (ReCAST, arXiv 2609.13425).

Shape legend: N proposals, J completions of a proposal at a level, R rewards, T noise levels, B batch; ``...`` is any
data shape.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.completions import Completions, Keeper
from recast_lightning.credit.curves import Curve, bootstrap_weights, estimate_curve, interpolate
from recast_lightning.credit.plan import Plan, Steps, check_order, make_plan
from recast_lightning.credit.profile import Profile
from recast_lightning.files import content_hash
from recast_lightning.flow.noising import Velocity
from recast_lightning.flow.posterior import Posterior
from recast_lightning.seeds import derive_seed

Reward = Callable[[Tensor, Tensor], Tensor]
"""``reward(x0 [B, ...], index [B]) -> [B]``, non-negative; ``index`` is the row of the proposal."""

NUM_REPLICATES = 400


def profile_cost(
    num_proposals: int,
    sigmas: Tensor,
    rollouts: int | Sequence[int] = 1,
    *,
    steps: Steps = "auto",
    levels: int | Sequence[int] | None = None,
) -> int:
    """Velocity evaluations of `estimate_profile`, in samples; at most N J T (T + 1) / 2 with ``auto`` or ``grid``."""
    return num_proposals * make_plan(sigmas, rollouts=rollouts, steps=steps, levels=levels).cost


@torch.no_grad()
def estimate_profile(
    velocity: Velocity,
    proposals: Tensor,
    rewards: dict[str, Reward],
    sigmas: Tensor,
    *,
    rollouts: int | Sequence[int] = 1,
    order: float = 2.0,
    posterior: Posterior = "sde2",
    steps: Steps = "auto",
    levels: int | Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    importance: bool = False,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
    metadata: dict[str, Any] | None = None,
    unfinished: str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Profile:
    """Discriminability D_t of every reward at every level, from one set of proposals, with error bars.

    Proposals stand in for samples of the positive policies. Each is noised to level t, x_t, and J completions
    x0 ~ p(x0 | x_t) of the policy are scored: their mean is m(x_t), and D_t = renyi_divergence(m). Order 2 takes any J
    without bias; other orders are nested and need J >= 2 (`Profile.nested_bias`). Level 0 scores the proposals
    themselves. A proposal with a score that is not finite is left out of that reward at all levels, and counted.
    Noise is keyed by (seed, proposal), so neither ``batch_size`` nor the number of processes changes what is drawn.

    Args:
        velocity: The policy's; ``index`` is the row of ``proposals``.
        proposals: Clean data of a strong generator, in the policy's space, [N, ...].
        rewards: Name to non-negative reward.
        sigmas: Ascending levels from 0, [T + 1].
        rollouts: Completions J of each proposal at each level, one number or one for each measured level.
        order: Renyi order alpha > 0.
        posterior: Sampler of the completions, see `posterior_steps`.
        steps: Network calls of a completion from pure noise, see `posterior_grid`; ``auto``: as many as cost no more
            than the sampler's own grid; ``grid``: that grid (t calls from level t, as in the paper).
        levels: Measured levels (how many, or which); monotone interpolation fills the others. Default all.
        prompts: Number of each proposal's prompt, [N]; what belongs together in the error bars. Default: all differ.
        importance: Whether the proposals are the policy's own, each standing for the positive policy of a reward with
            the weight of its score, normalised within its prompt.
        generator: Gives one seed; default torch's global generator.
        batch_size: Completions in one network call.
        progress: Called with the velocity evaluations done so far by all processes, of `profile_cost`.
        metadata: JSON-able facts to keep with the profile.
        unfinished: File (without suffix) that keeps the scores until the profile is there; a killed call, made again,
            goes on from it.
        rank: Number of this process.
        world_size: Number of processes, which share the proposals out.
        total: Sums a tensor over processes.

    Returns:
        The measured `Profile`, the same in every process.

    Raises:
        ValueError: If an argument is out of range, or a reward is negative, fails throughout or cannot be measured.
    """
    plan = make_plan(sigmas, rollouts=rollouts, steps=steps, levels=levels, posterior=posterior)
    groups = _checked(proposals, rewards, order, plan.completions, batch_size, prompts)
    device = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    work = Completions(
        velocity, proposals, torch.arange(rank, len(proposals), world_size), plan, partial(_score, rewards),
        len(rewards), seed=seed, fresh=order == 2, batch_size=batch_size,
    )  # fmt: skip
    settings = {
        "rewards": list(rewards), "proposals": _fingerprint(proposals), "seed": seed, "plan": _fingerprint(plan.sigmas),
        "rollouts": plan.completions, "posterior": posterior, "order": order, "processes": [rank, world_size],
        "metadata": metadata or {},
    }  # fmt: skip
    keep = None if unfinished is None else Keeper(Path(f"{unfinished}-{rank}"), settings)
    scores = _scores_by_level(work, len(rewards), keep, progress, world_size, total or (lambda tensor: tensor))
    curves = _curves(list(rewards), scores, groups, order, importance, seed)
    if keep is not None:
        keep.delete()
    facts = {
        "sigmas": sigmas.detach().cpu().clone(), "order": float(order), "posterior": posterior, "steps": steps,
        "num_proposals": len(proposals), "num_prompts": len(groups.unique()), "metadata": metadata or {},
        "network_calls": plan.cost * len(proposals),
    }  # fmt: skip
    return _assembled(curves, plan, importance, facts)


def _scores_by_level(
    work: Completions,
    num_rewards: int,
    keep: Keeper | None,
    progress: Callable[[int], None] | None,
    world_size: int,
    total: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Scores of all processes' proposals at level 0 and at each measured level, [R, N, J] each."""
    num_proposals, network_calls = len(work.proposals), work.plan.cost * len(work.proposals)
    scores = torch.zeros(num_rewards, num_proposals, len(work.jobs), dtype=torch.float64)
    scores[:, work.own] = work.run(
        lambda calls: progress(min(calls * world_size, network_calls)) if progress else None,
        keep=keep,
        any_busy=lambda busy: bool(total(torch.tensor(float(busy))) > 0),
    )
    return work.by_level(total(scores))


def _assembled(curves: dict[str, Curve], plan: Plan, importance: bool, facts: dict[str, Any]) -> Profile:
    """The profile of the curves of all rewards, with unmeasured levels filled in."""

    def on_all_levels(field: str) -> Tensor:
        rows = torch.stack([getattr(curve, field) for curve in curves.values()])
        return interpolate(rows, plan.levels, len(facts["sigmas"]) - 1)

    return Profile(
        divergence=on_all_levels("divergence"),
        replicates=on_all_levels("replicates").transpose(0, 1).contiguous(),
        nested_bias=on_all_levels("nested_bias"),
        mean_rewards=on_all_levels("mean_rewards"),
        rewards=list(curves),
        levels=plan.levels,
        rollouts=plan.completions,
        failed={name: curve.failed for name, curve in curves.items()},
        effective_samples={name: curve.effective_samples for name, curve in curves.items()} if importance else {},
        **facts,
    )


def _curves(
    names: list[str], scores: list[Tensor], prompts: Tensor, order: float, importance: bool, seed: int
) -> dict[str, Curve]:
    """The curve of each reward, from scores of each level [R, N, J]; all share the bootstrap's weights."""
    weights = bootstrap_weights(prompts, NUM_REPLICATES, derive_seed(seed, "bootstrap"))
    return {
        name: estimate_curve(name, [s[row] for s in scores], prompts, weights, order=order, importance=importance)
        for row, name in enumerate(names)
    }


def _checked(
    proposals: Tensor,
    rewards: dict[str, Reward],
    order: float,
    completions: Sequence[int],
    batch_size: int,
    prompts: Sequence[int] | None,
) -> Tensor:
    """Number of each proposal's prompt, counted from 0, [N]; raises ValueError for what cannot be measured."""
    if min(len(proposals), batch_size, len(rewards)) < 1:
        raise ValueError(
            "proposals, rewards and batch_size must each be at least one, got "
            f"{len(proposals)}, {len(rewards)} and {batch_size}."
        )
    check_order(order, completions)
    if prompts is None:
        return torch.arange(len(proposals))
    if len(prompts) != len(proposals):
        raise ValueError(f"prompts must give one number a proposal, {len(proposals)}, got {len(prompts)}.")
    return torch.tensor(list(prompts)).unique(return_inverse=True)[1]


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


def _fingerprint(tensor: Tensor) -> str:
    return content_hash(tensor.detach().cpu().float().numpy().tobytes())
