"""Measures a profile of the policy in a Trainer: proposals, rewards, processes, progress.

Shape legend: N proposals, B batch, C H W latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from recast_lightning.credit import Profile, estimate_profile, importance_weights, profile_cost
from recast_lightning.credit.plan import Steps
from recast_lightning.errors import UserError
from recast_lightning.files import content_hash
from recast_lightning.flow.posterior import Posterior
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.base import Proposals
from recast_lightning.proposals.policy import PolicyProposals
from recast_lightning.seeds import derive_seed, generator
from recast_lightning.training.module import RecastModule
from recast_lightning.training.trainer import progress_of

PACKAGES = ("recast-lightning", "torch", "diffusers", "peft")


def measure_profile(
    trainer: L.Trainer,
    module: RecastModule,
    names: Sequence[str],
    proposals: Proposals,
    num_prompts: int,
    *,
    rollouts: int | list[int],
    order: float,
    posterior: Posterior,
    steps: Steps,
    levels: int | list[int] | None,
    batch_size: int,
    unfinished: Path | None = None,
) -> Profile:
    """Profile of the trained policy as it is now, shared out over the processes.

    All profiles of a run have the same proposals and noise, so that what changes between them is the policy.

    Args:
        trainer: Whose processes, precision and progress bar are used.
        module: Policy, rewards and prompts.
        names: Rewards to measure.
        proposals: See `Proposals`.
        num_prompts: The first so many training prompts.
        rollouts: See `estimate_profile`, as the next five.
        order: Renyi order.
        posterior: Sampler.
        steps: Network calls from pure noise.
        levels: Measured levels.
        batch_size: Rows of a network call.
        unfinished: Folder that keeps an unfinished profile.

    Raises:
        UserError: If a reward cannot be measured.
    """
    policy, seed = module.policy, derive_seed(module.seed, "profile")
    prompts = [p for p in module.data.prompts["train"][:num_prompts] for _ in range(proposals.per_prompt)]
    numbers = [i // proposals.per_prompt for i in range(len(prompts))]
    module.encode_ahead(prompts)
    latents = _latents(module, proposals, prompts, batch_size)
    rewards = image_rewards(module, prompts, names)
    if isinstance(proposals, PolicyProposals):
        _check_share(rewards, latents, numbers, proposals, batch_size)
    conditions = policy.encode_prompts([p.text for p in prompts])
    metadata = _metadata(trainer, module, proposals, prompts)

    def velocity(x: Tensor, sigma: Tensor, index: Tensor) -> Tensor:
        module.safe_point()  # what was computed so far is in the unfinished profile
        return policy(x, sigma, conditions[index])

    def total(tensor: Tensor) -> Tensor:
        summed: Tensor = trainer.strategy.reduce(tensor.to(module.device), reduce_op="sum")
        return summed.to(tensor.device)

    cost = profile_cost(len(prompts), policy.sigmas, rollouts, steps=steps, levels=levels)
    with progress_of(trainer, f"profiling {', '.join(names)}", cost) as advance, policy.adapter("default"):
        done = 0

        def progress(calls: int) -> None:
            nonlocal done
            advance(calls - done)
            done = calls

        with trainer.precision_plugin.forward_context(), user_errors():
            return estimate_profile(
                velocity,
                latents,
                rewards,
                policy.sigmas,
                rollouts=rollouts,
                order=order,
                posterior=posterior,
                steps=steps,
                levels=levels,
                prompts=numbers,
                importance=isinstance(proposals, PolicyProposals),
                generator=generator(seed),
                batch_size=batch_size,
                progress=progress,
                metadata=metadata,
                unfinished=unfinished
                and unfinished / f"profile-{_hash([metadata, names, steps, levels, rollouts, order])}",
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                total=total if trainer.world_size > 1 else None,
            )


def _metadata(
    trainer: L.Trainer, module: RecastModule, proposals: Proposals, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """What a profile is of: policy, prompts, source, seed, versions."""
    fingerprints = {"policy": module.policy.fingerprint(), "prompts": _hash([p.text for p in prompts])}
    return {
        "policy": module.policy.path,
        "proposals": type(proposals).__name__,
        "seed": module.seed,
        "rollout": trainer.current_epoch,
        "fingerprints": fingerprints,
        "versions": {package: version(package) for package in PACKAGES},
    }


def image_rewards(
    module: RecastModule, prompts: list[Prompt], names: Sequence[str]
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Rewards of latents, made non-negative; latents are decoded once for all rewards."""
    last: dict[str, Any] = {"latents": None}

    def make(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def reward(x0: Tensor, index: Tensor) -> Tensor:
            if last["latents"] is not x0:
                last.update(latents=x0, images=module.policy.decode(x0))
            scores = module.score(last["images"], [prompts[i] for i in index.tolist()], [name])[:, 0]
            return module.reward_models[name].positive(scores).to(index.device)

        return reward

    return {name: make(name) for name in names}


@contextmanager
def user_errors() -> Iterator[None]:
    """A reward that cannot be profiled is the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _latents(module: RecastModule, proposals: Proposals, prompts: list[Prompt], batch_size: int) -> Tensor:
    policy, latents = module.policy, []
    own = isinstance(proposals, PolicyProposals)
    pictures = None if own else proposals.images(prompts, policy.height, policy.width)
    for start in range(0, len(prompts), batch_size):
        chunk = range(start, min(start + batch_size, len(prompts)))
        if pictures is None:
            keys: list[tuple[str | int, ...]] = [(module.seed, "proposal", i) for i in chunk]
            latents.append(module.draw(keys, [prompts[i] for i in chunk], "default"))
        else:
            latents.append(policy.encode(pictures[chunk.start : chunk.stop].to(module.device)))
    return torch.cat(latents)


def _check_share(
    rewards: dict[str, Callable[[Tensor, Tensor], Tensor]],
    latents: Tensor,
    numbers: list[int],
    proposals: PolicyProposals,
    batch_size: int,
) -> None:
    """Refuses rewards that find too few good images among the policy's own."""
    rows = torch.arange(len(latents), device=latents.device).split(batch_size)
    scores = [[reward(x0, index) for reward in rewards.values()] for index in rows for x0 in [latents[index]]]
    for name, column in zip(rewards, zip(*scores, strict=True), strict=True):
        own = torch.cat(column).double().cpu()
        found = own.isfinite()
        with user_errors():
            _, effective = importance_weights(name, own[found], torch.tensor(numbers)[found])
        if effective < proposals.minimum_share * proposals.per_prompt:
            raise UserError(
                f"Of the policy's own {proposals.per_prompt} images a prompt, {name!r} makes {effective:.1f} effective ones, "
                f"fewer than minimum_share {proposals.minimum_share:g} asks for: they cannot stand for its positive policy. "
                "Take a stronger generator's images (FolderProposals), or leave it out."
            )


def _hash(value: Any) -> str:
    return content_hash(repr(value).encode())
