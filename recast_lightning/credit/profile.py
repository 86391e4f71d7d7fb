"""What `estimate_profile` measures, kept as a file: when in denoising each reward tells good from bad.

Shape legend: R rewards, T noise levels. A profile does not depend on the budgets, so one serves every budget.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.artefact import load_artefact, save_artefact
from recast_lightning.credit.gains import monotone_divergence, monotone_gains

_KIND = "recast profile"


@dataclass(frozen=True, eq=False)
class Profile:
    """Discriminability of each reward along the noise levels (ReCAST, arXiv 2609.13425), with error bars.

    Attributes:
        divergence: D_i,t + log p_i, column t is level t (0 is clean), [R, T + 1]; only differences within a row mean
            something.
        stderr: Standard errors of ``divergence``, [R, T + 1].
        gains_stderr: Standard errors of ``gains``, [R, T]; levels share proposals and noise, so these are not sums of
            ``stderr``.
        mean_rewards: A_i,t, the plain mean reward of the rollouts from level t, [R, T + 1].
        sigmas: Ascending noise levels, [T + 1].
        rewards: Names, in row order.
        order: Renyi order alpha.
        posterior: Sampler of the rollouts.
        rollouts: Rollouts a proposal and level.
        num_proposals: Proposals measured.
        failed: Proposals left out of each reward because a score of theirs was not finite.
        network_calls: Velocity evaluations spent, in samples.
        metadata: JSON-able facts of the caller's (policy, prompts, seed, ...).
    """

    divergence: Tensor
    stderr: Tensor
    gains_stderr: Tensor
    mean_rewards: Tensor
    sigmas: Tensor
    rewards: list[str]
    order: float
    posterior: str
    rollouts: int
    num_proposals: int
    failed: dict[str, int]
    network_calls: int
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def gains(self) -> Tensor:
        """Measured gains dD_t = D_{t-1} - D_t, column t - 1 is level t, [R, T]; noise can turn one negative."""
        return -self.divergence.diff(dim=1)

    @property
    def monotone_divergence(self) -> Tensor:
        """``divergence`` made non-increasing in noise, see `gains.monotone_divergence`, [R, T + 1]."""
        return monotone_divergence(self.divergence)

    @property
    def monotone_gains(self) -> Tensor:
        """Gains of `monotone_divergence`, none negative, [R, T]."""
        return monotone_gains(self.gains)

    def save(self, path: str | Path) -> Path:
        """Writes ``path``.safetensors, exact, and ``path``.json, to read; returns the former."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        header = {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}
        return save_artefact(path, _KIND, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads what `save` wrote; ValueError if the file is damaged or something else."""
        tensors, header = load_artefact(path, _KIND)
        return cls(**tensors, **header)

    def rows(self, rewards: list[str]) -> Tensor:
        """Row numbers of the named rewards, [len(rewards)]."""
        unknown = [name for name in rewards if name not in self.rewards]
        if unknown:
            raise ValueError(f"The profile has no reward {unknown[0]!r}; it measured {', '.join(self.rewards)}.")
        return torch.tensor([self.rewards.index(name) for name in rewards])
