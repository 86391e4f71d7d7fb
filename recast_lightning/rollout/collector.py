"""Collects rollouts: samples them with the old policy, scores them, and turns scores into r at each level.

Shape legend: N samples on this process, M over all processes, R rewards, T levels, C H W latents.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from recast_lightning.credit import CreditMatrix
from recast_lightning.errors import RunWarning
from recast_lightning.objective import Advantages, optimality_probability
from recast_lightning.policy import Policy
from recast_lightning.prompts import Prompt
from recast_lightning.rollout.context import RunContext
from recast_lightning.rollout.finite import FiniteCheck
from recast_lightning.rollout.metrics import constant_rewards, rollout_metrics, within_group_spread
from recast_lightning.rollout.samples import RolloutBuffer, SampleId
from recast_lightning.rollout.sampling import reference_deviation, sample_latents
from recast_lightning.rollout.scoring import ScoringPool


class RolloutCollector:
    """Draws and scores rollouts with the old policy.

    Args:
        policy: whose `old` adapter samples.
        scoring: scores images.
        finite: judges what is not finite.
        advantages: from rewards to advantages.
        advantage_clip: c of DiffusionNFT.
        batch_size: images sampled at once.
        seed: keys the noise.
    """

    def __init__(
        self,
        policy: Policy,
        scoring: ScoringPool,
        finite: FiniteCheck,
        advantages: Advantages,
        advantage_clip: float,
        batch_size: int,
        seed: int,
    ) -> None:
        self.policy, self.scoring, self.finite = policy, scoring, finite
        self.advantages, self.advantage_clip = advantages, advantage_clip
        self.batch_size, self.seed = batch_size, seed
        self._named_constant: set[str] = set()

    @torch.no_grad()
    def collect(
        self,
        rollout: int,
        samples: list[SampleId],
        prompts: Sequence[Prompt],
        credit: CreditMatrix,
        context: RunContext,
    ) -> tuple[RolloutBuffer, dict[str, float]]:
        """Draw and score a rollout; a collective call.

        Args:
            rollout: its number, from 0.
            samples: those of this process, [N].
            prompts: their prompts, [N].
            credit: W.
            context: of the run.

        Returns:
            What is trained on, and the rollout in numbers, over all processes.

        Raises:
            UserError: if samples are not finite and `on_nonfinite` is `stop`.
        """
        started = time.perf_counter()
        latents, thumbnails, rewards = self._draw(rollout, samples, prompts, credit.rewards, context)
        seconds = time.perf_counter() - started
        texts = [prompt.text for prompt in prompts]
        broken, count = self.finite.broken_images(rollout + 1, latents, thumbnails, texts)
        latents[broken], rewards[broken] = 0.0, torch.nan
        first = slice(self.batch_size)
        keys = [(self.seed, "deviation", rollout, s.group, s.image) for s in samples[first]]
        checks = {
            "rollout/nonfinite_images": float(count),
            "rollout/image_std": within_group_spread(thumbnails, [s.group for s in samples]),
            "rollout/deviation": reference_deviation(self.policy, latents[first], keys, texts[first], context),
        }
        r, metrics = self.judge(rollout, rewards, samples, credit, context)
        speed = len(samples) * context.world_size / seconds
        metrics |= checks | {"rollout/images_per_second": speed, "rollout/seconds": seconds}
        return RolloutBuffer(samples, latents, texts, r), metrics

    def _draw(
        self,
        rollout: int,
        samples: list[SampleId],
        prompts: Sequence[Prompt],
        names: list[str],
        context: RunContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [N, C, H, W], thumbnails [N, 3, 32, 32] of the images, and scores [N, R], all on the CPU."""
        latents, thumbnails, scores = [], [], []
        bar = context.progress(f"rollout {rollout + 1}: sampling", len(samples))
        with self.scoring.running(), bar as advance:
            for start in range(0, len(samples), self.batch_size):
                chunk = slice(start, start + self.batch_size)
                keys = [(self.seed, "rollout", rollout, s.group, s.image) for s in samples[chunk]]
                x0 = sample_latents(self.policy, keys, [p.text for p in prompts[chunk]], "old", context)
                images = self.policy.decode(x0)
                scores.append(self.scoring.submit(images, prompts[chunk], names))
                latents.append(x0.cpu())
                thumbnails.append(adaptive_avg_pool2d(images, 32).cpu())
                advance(len(keys))
                context.stop_point()
            rewards = torch.cat([batch.result() for batch in scores])
        return torch.cat(latents), torch.cat(thumbnails), rewards

    def judge(
        self, rollout: int, rewards: Tensor, samples: list[SampleId], credit: CreditMatrix, context: RunContext
    ) -> tuple[Tensor, dict[str, float]]:
        """R [N, T] of this process's rewards [N, R], and the rollout in numbers; statistics are over all processes."""
        own = torch.cat([rewards, torch.tensor([[float(s.group)] for s in samples])], 1).to(context.device)
        gathered = context.gather(own).reshape(-1, own.shape[1]).cpu()
        rewards, groups = gathered[:, :-1], gathered[:, -1].long()
        advantages = self.advantages(rewards, credit.level_weights, groups)
        if context.rank == 0:
            self._name_constants(credit.rewards, rewards, rollout)
        r = optimality_probability(advantages, self.advantage_clip).float()
        metrics = {"rollout": float(rollout + 1)} | rollout_metrics(credit.rewards, rewards, advantages, r)
        return r[context.rank * len(samples) : (context.rank + 1) * len(samples)], metrics

    def _name_constants(self, names: list[str], rewards: Tensor, rollout: int) -> None:
        """Warn of rewards [M, R] that cannot tell any of the images of a rollout apart, of each once."""
        for name, score in constant_rewards(names, rewards).items():
            if name not in self._named_constant:
                self._named_constant.add(name)
                warnings.warn(
                    f"Reward {name!r} gave all images of rollout {rollout + 1} the same score, {score:g}: "
                    "it trains nothing as long as that is so (said once).",
                    RunWarning,
                    stacklevel=2,
                )
