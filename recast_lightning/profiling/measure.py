"""Measures a profile of the policy: proposals, rewards, processes, progress.

Shape legend: N proposals, B batch, C H W latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit import Profile, estimate_profile, importance_weights, profile_cost
from recast_lightning.credit.plan import Steps
from recast_lightning.errors import UserError
from recast_lightning.files import content_hash
from recast_lightning.flow import Posterior
from recast_lightning.policy import Policy
from recast_lightning.prompts import Prompt
from recast_lightning.proposals import PolicyProposals, Proposals
from recast_lightning.rollout.context import RunContext
from recast_lightning.rollout.sampling import encode_ahead, sample_latents
from recast_lightning.rollout.scoring import ScoringPool
from recast_lightning.seeds import derive_seed, generator

PACKAGES = ("recast-lightning", "torch", "diffusers", "peft")
Reward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ProfileOptions:
    """How a profile is measured; see `estimate_profile`.

    Attributes:
        completions: completions of each proposal, at all levels or at each measured one.
        order: Rényi order.
        posterior: sampler.
        steps: network calls from pure noise.
        levels: measured levels.
        batch_size: rows of a network call.
    """

    completions: int | list[int]
    order: float
    posterior: Posterior
    steps: Steps
    levels: int | list[int] | None
    batch_size: int


class Profiler:
    """Measures profiles of a policy as it is, shared out over the processes.

    All profiles of a run have the same proposals and noise, so that what changes between them is the policy.

    Args:
        policy: whose `default` adapter completes proposals.
        scoring: scores images.
        proposals: see `Proposals`.
        seed: of the run.
    """

    def __init__(self, policy: Policy, scoring: ScoringPool, proposals: Proposals, seed: int) -> None:
        self.policy, self.scoring, self.proposals, self.seed = policy, scoring, proposals, seed

    def measure(
        self,
        names: Sequence[str],
        prompts: Sequence[Prompt],
        options: ProfileOptions,
        context: RunContext,
        *,
        rollout: int,
        unfinished: Path | None = None,
    ) -> Profile:
        """Profile of the trained policy; a collective call.

        Args:
            names: rewards to measure.
            prompts: of the proposals.
            options: how to measure.
            context: of the run.
            rollout: the rollout at hand, for the record.
            unfinished: folder that keeps an unfinished profile.

        Raises:
            UserError: if a reward cannot be measured.
        """
        copies = self.proposals.per_prompt
        prompts = [prompt for prompt in prompts for _ in range(copies)]
        numbers = [i // copies for i in range(len(prompts))]
        texts = [prompt.text for prompt in prompts]
        encode_ahead(self.policy, prompts, context)
        latents = self._proposal_latents(prompts, options.batch_size, context)
        rewards = latent_rewards(self.policy, self.scoring, prompts, names)
        if isinstance(self.proposals, PolicyProposals):
            _check_share(rewards, latents, numbers, self.proposals, options.batch_size)
        conditions = self.policy.encode_prompts(texts)
        metadata = self._metadata(texts, rollout)

        def velocity(x: Tensor, sigma: Tensor, index: Tensor) -> Tensor:
            context.stop_point()  # what was computed so far is in the unfinished profile
            return self.policy(x, sigma, conditions[index])

        def total(tensor: Tensor) -> Tensor:
            return context.reduce(tensor.to(context.device), "sum").to(tensor.device)

        how: dict[str, Any] = {"rollouts": options.completions, "steps": options.steps, "levels": options.levels}
        cost = profile_cost(len(prompts), self.policy.sigmas, **how)
        what = [metadata, names, options.steps, options.levels, options.completions, options.order]
        bar = context.progress(f"profiling {', '.join(names)}", cost)
        with bar as advance, self.policy.adapter("default"), context.autocast(), user_errors():
            return estimate_profile(
                velocity,
                latents,
                rewards,
                self.policy.sigmas,
                **how,
                order=options.order,
                posterior=options.posterior,
                prompts=numbers,
                importance=isinstance(self.proposals, PolicyProposals),
                generator=generator(derive_seed(self.seed, "profile")),
                batch_size=options.batch_size,
                progress=_differences(advance),
                metadata=metadata,
                unfinished=unfinished and unfinished / f"profile-{content_hash(repr(what).encode())}",
                rank=context.rank,
                world_size=context.world_size,
                total=total if context.world_size > 1 else None,
            )

    def _proposal_latents(self, prompts: Sequence[Prompt], batch_size: int, context: RunContext) -> Tensor:
        """Latents [N, C, H, W] of the proposals."""
        policy, latents = self.policy, []
        own = isinstance(self.proposals, PolicyProposals)
        pictures = None if own else self.proposals.images(prompts, policy.height, policy.width)
        for start in range(0, len(prompts), batch_size):
            chunk = range(start, min(start + batch_size, len(prompts)))
            if pictures is None:
                keys: list[tuple[str | int, ...]] = [(self.seed, "proposal", i) for i in chunk]
                latents.append(sample_latents(policy, keys, [prompts[i].text for i in chunk], "default", context))
            else:
                latents.append(policy.encode(pictures[chunk.start : chunk.stop].to(context.device)))
        return torch.cat(latents)

    def _metadata(self, texts: Sequence[str], rollout: int) -> dict[str, Any]:
        """What a profile is of: policy, prompts, source, seed, versions."""
        prompts = content_hash(repr(list(texts)).encode())
        return {
            "policy": self.policy.path,
            "proposals": type(self.proposals).__name__,
            "seed": self.seed,
            "rollout": rollout,
            "fingerprints": {"policy": self.policy.fingerprint(), "prompts": prompts},
            "versions": {package: version(package) for package in PACKAGES},
        }


def latent_rewards(
    policy: Policy, scoring: ScoringPool, prompts: Sequence[Prompt], names: Sequence[str]
) -> dict[str, Reward]:
    """Rewards of latents, made non-negative; latents are decoded once for all rewards."""
    last: dict[str, Any] = {"latents": None}

    def make(name: str) -> Reward:
        def reward(x0: Tensor, index: Tensor) -> Tensor:
            if last["latents"] is not x0:
                last.update(latents=x0, images=policy.decode(x0))
            scores = scoring.score(last["images"], [prompts[i] for i in index.tolist()], [name])[:, 0]
            return scoring.models[name].positive(scores).to(index.device)

        return reward

    return {name: make(name) for name in names}


def _differences(advance: Callable[[int], Any]) -> Callable[[int], None]:
    """Turns totals, as `estimate_profile` reports them, into steps of a progress bar."""
    done = 0

    def progress(calls: int) -> None:
        nonlocal done
        advance(calls - done)
        done = calls

    return progress


@contextmanager
def user_errors() -> Iterator[None]:
    """A reward that cannot be profiled is the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_share(
    rewards: dict[str, Reward], latents: Tensor, numbers: list[int], proposals: PolicyProposals, batch_size: int
) -> None:
    """Refuse rewards that find too few good images among the policy's own."""
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
