"""What `estimate_profile` measures, kept as a file: when in denoising each reward tells good from bad.

Shape legend: R rewards, T noise levels, B bootstrap replicates. A profile does not depend on the budgets, so one serves
every budget.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.artefact import load_artefact, save_artefact
from recast_lightning.credit.gains import flat_rows, monotone_divergence

_KIND = "recast profile"
_FORMAT = 2


@dataclass(frozen=True, eq=False)
class Profile:
    """Discriminability of each reward along the noise levels (ReCAST, arXiv 2609.13425), with error bars.

    Attributes:
        divergence: D_i,t + log p_i, column t is level t (0 is clean), [R, T + 1]; only differences within a row mean
            something.
        replicates: Bootstrap replicates of ``divergence`` over prompts, [B, R, T + 1]; none if there is one prompt.
        nested_bias: What the jackknife took off ``divergence``, [R, T + 1]; 0 at order 2.
        mean_rewards: A_i,t, the plain mean reward of the completions from level t, [R, T + 1].
        sigmas: Ascending noise levels, [T + 1].
        rewards: Names, in row order.
        order: Renyi order alpha.
        posterior: Sampler of the completions.
        steps: Network calls of a completion from pure noise, or ``auto`` or ``grid``.
        levels: Measured levels; the others are interpolated.
        rollouts: Number of completions of a proposal at each measured level.
        num_proposals: Proposals measured.
        num_prompts: Prompts that they are of.
        failed: Proposals left out of each reward because a score of theirs was not finite.
        effective_samples: Of the importance weights of each reward, a prompt; empty for proposals of a generator.
        network_calls: Velocity evaluations spent, in samples.
        metadata: JSON-able facts of the caller's: `fingerprints`, `versions`, `proposals`, `seed`, ...
    """

    divergence: Tensor
    replicates: Tensor
    nested_bias: Tensor
    mean_rewards: Tensor
    sigmas: Tensor
    rewards: list[str]
    order: float
    posterior: str
    steps: int | str
    levels: list[int]
    rollouts: list[int]
    num_proposals: int
    num_prompts: int
    failed: dict[str, int]
    effective_samples: dict[str, float]
    network_calls: int
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of ``divergence``, by the bootstrap over prompts, [R, T + 1]; infinite for one prompt."""
        return _spread(self.replicates, self.divergence)

    @property
    def gains(self) -> Tensor:
        """Measured gains dD_t = D_{t-1} - D_t, column t - 1 is level t, [R, T]; noise can turn one negative."""
        return -self.divergence.diff(dim=1)

    @property
    def gains_stderr(self) -> Tensor:
        """Standard errors of ``gains``, [R, T]: levels share prompts and noise, so much less than ``stderr`` would say."""
        return _spread(-self.replicates.diff(dim=2), self.gains)

    @property
    def gains_covariance(self) -> Tensor:
        """Covariances of the gains of each reward over levels, [R, T, T]; infinite for one prompt."""
        num_rewards, num_levels = self.gains.shape
        if len(self.replicates) < 2:
            return torch.full((num_rewards, num_levels, num_levels), torch.inf, dtype=torch.float64)
        rows = -self.replicates.diff(dim=2)
        rows = rows - rows.mean(0)
        return torch.einsum("brt,bru->rtu", rows, rows) / (len(rows) - 1)

    @property
    def monotone_divergence(self) -> Tensor:
        """``divergence`` made non-increasing in noise, see `gains.monotone_divergence`, [R, T + 1]."""
        return monotone_divergence(self.divergence, self.stderr)

    @property
    def monotone_gains(self) -> Tensor:
        """Gains of `monotone_divergence`, none negative, [R, T]."""
        return (-self.monotone_divergence.diff(dim=1)).clamp(min=0)

    @property
    def totals(self) -> tuple[Tensor, Tensor]:
        """D_0 - D_T of each reward in nats (how much of it the policy does not know yet), and its standard errors, [R]."""
        total = self.divergence[:, 0] - self.divergence[:, -1]
        return total, _spread(self.replicates[:, :, 0] - self.replicates[:, :, -1], total)

    @property
    def flat(self) -> list[str]:
        """Rewards whose gains cannot be told from flat."""
        flat = flat_rows(self.gains, self.gains_covariance)
        return [name for name, is_flat in zip(self.rewards, flat.tolist(), strict=True) if is_flat]

    @property
    def proposal_quality(self) -> dict[str, tuple[float, float]]:
        """Mean reward of the proposals, and of the policy itself (its completions from level T), for each reward."""
        ends = self.mean_rewards[:, [0, -1]].tolist()
        return {name: (good, own) for name, (good, own) in zip(self.rewards, ends, strict=True)}

    def save(self, path: str | Path) -> Path:
        """Writes ``path``.safetensors, exact, and ``path``.json, to read; returns the former."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        header = {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}
        shown = {name: value for name, value in tensors.items() if name != "replicates"}
        for name in ("stderr", "gains", "gains_stderr"):
            shown[name] = getattr(self, name)
        return save_artefact(path, _KIND, tensors, {"format": _FORMAT, **header}, shown=shown)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads what `save` wrote.

        Raises:
            ValueError: If the file is damaged, something else, or of another format.
        """
        tensors, header = load_artefact(path, _KIND)
        names = {"format", *(f.name for f in fields(cls))}
        if header.get("format") != _FORMAT or {*tensors, *header} != names:
            raise ValueError(f"The profile {str(path)!r} is of another version of recast_lightning: measure it anew.")
        del header["format"]
        return cls(**tensors, **header)

    def check(self, rewards: list[str], sigmas: Tensor) -> None:
        """Whether it serves these rewards on this grid of levels.

        Raises:
            ValueError: If a reward was not measured, or the levels differ.
        """
        self.rows(rewards)
        if len(sigmas) != len(self.sigmas):
            raise ValueError(
                f"The profile has {len(self.sigmas) - 1} levels, but the policy samples in {len(sigmas) - 1}."
            )
        off = (self.sigmas.double() - sigmas.cpu().double()).abs()
        if off.max() > 1e-4:
            t = int(off.argmax())
            raise ValueError(
                f"The profile is of another grid of noise levels: its sigma is {float(self.sigmas[t]):.4f} at level {t}, "
                f"the policy's {float(sigmas[t]):.4f}."
            )

    def rows(self, rewards: list[str]) -> Tensor:
        """Row numbers of the named rewards, [len(rewards)]."""
        unknown = [name for name in rewards if name not in self.rewards]
        if unknown:
            raise ValueError(f"The profile has no reward {unknown[0]!r}; it measured {', '.join(self.rewards)}.")
        return torch.tensor([self.rewards.index(name) for name in rewards], dtype=torch.long)


def _spread(replicates: Tensor, like: Tensor) -> Tensor:
    return replicates.std(0) if len(replicates) > 1 else torch.full_like(like, torch.inf)
