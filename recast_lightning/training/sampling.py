"""Draws and scores: the part of the LightningModule that everything else stands on.

Shape legend: B batch, N samples on this process, M over all processes, R rewards, C H W latents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.flow.noising import noise_to
from recast_lightning.policy import Adapter, Policy
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout.diversity import within_group_spread
from recast_lightning.rollout.finite import FiniteCheck, OnNonfinite
from recast_lightning.rollout.metrics import check_failures, constant_rewards
from recast_lightning.rollout.processes import gather_values
from recast_lightning.rollout.samples import Sample
from recast_lightning.rollout.scoring import ScoringPool
from recast_lightning.seeds import noise as keyed_noise
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.trainer import progress_of


class SamplingModule(L.LightningModule):
    """A policy and its rewards in a Trainer.

    Args:
        policy: the text-to-image policy.
        rewards: name → reward model; all are evaluated.
        num_workers: of `ScoringPool`.
        reward_device: where inline rewards score, for all processes or one a process of a machine; default where the
            images are.
        reward_offload: bring each reward's weights back to the CPU after each batch that it scores.
        on_nonfinite: of `FiniteCheck`.
    """

    seed: int  # set by the subclass

    def __init__(
        self,
        policy: Policy,
        rewards: dict[str, RewardModel],
        num_workers: int = 0,
        reward_device: str | list[str] | None = None,
        reward_offload: bool = False,
        on_nonfinite: OnNonfinite = "stop",
    ) -> None:
        super().__init__()
        for name in rewards:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"Reward name {name!r} must be made of letters, digits and '_'.")
        self.policy = policy
        self.reward_models = rewards
        self.reward_device = reward_device
        for device in reward_device if isinstance(reward_device, list) else [reward_device]:
            _device(device)
        for model in rewards.values():
            model.offloaded = reward_offload
        self.scoring = ScoringPool(rewards, num_workers)
        self.safe_point: Callable[[], None] = lambda: None  # where a signal may stop the run
        self.called_constant: set[str] = set()
        self.finite = FiniteCheck(on_nonfinite)

    @property
    def data(self) -> PromptDataModule:
        """The data module of the run."""
        data: PromptDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def check_inputs(self, data: PromptDataModule) -> None:
        """Check policy, rewards and prompts without loading a model.

        Raises:
            ValueError: naming the first thing that is wrong.
        """
        self.policy.validate()
        for model in self.reward_models.values():
            model.validate()
        data.load(ocr=any("ocr" in model.needs for model in self.reward_models.values()))
        for model in self.reward_models.values():
            for prompts in data.prompts.values():
                model.check_prompts(prompts)

    def place_rewards(self) -> None:
        """Let this process's rewards score on their device.

        Raises:
            UserError: if it is not there, or there are not as many as processes on a machine.
        """
        given, processes = self.reward_device, self.trainer.num_devices
        if isinstance(given, list) and len(given) != processes:
            raise UserError(
                f"reward_device lists {len(given)} devices for {processes} processes on each machine: give one for each "
                "process, or one value for all."
            )
        device = _device(given[self.trainer.local_rank] if isinstance(given, list) else given)
        count = torch.cuda.device_count()
        if device is not None and device.type == "cuda" and (device.index or 0) >= count:
            raise UserError(f"reward_device {str(device)!r} is not there: this machine has {count} CUDA devices.")
        self.scoring.device = device

    # Prompts -----------------------------------------------------------------------------------------------------

    def encode_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Have the embedding of every prompt on disk, each encoded by one process, and let the text encoders go.

        A collective call that does nothing without an `embedding_folder`.

        Raises:
            UserError: if the folder cannot be written to, or processes do not see each other's files.
        """
        if self.policy.embedding_folder is None:
            return
        texts, strategy = list(dict.fromkeys(p.text for p in prompts)), self.trainer.strategy
        share, failure = texts[self.trainer.global_rank :: self.trainer.world_size], None
        with progress_of(self.trainer, "encoding prompts", len(share)) as advance:
            try:
                self.policy.encode_ahead(share, advance)
            except UserError as error:
                failure = error
        if not strategy.reduce_boolean_decision(failure is None):  # waits for all, too
            raise failure or UserError("Another process could not encode its prompts; its own message says why.")
        if not all(map(self.policy.has_embedding, texts)):
            raise UserError(
                f"embedding_folder {self.policy.embedding_folder!r} lacks what other processes wrote to it: give a folder "
                "that all nodes share."
            )

    def on_fit_start(self) -> None:
        """Encode the prompts of the rollouts to come, and those of the evaluations."""
        rollouts = range(self.current_epoch, self.trainer.max_epochs or 0)
        self.encode_ahead(self.data.fit_prompts(rollouts, self.seed))

    def on_validation_start(self) -> None:
        """Encode the validation prompts, in a fit for the first time only."""
        self.encode_ahead(self.data.prompts["validation"])

    def on_test_start(self) -> None:
        """As in validation."""
        self.on_validation_start()

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Encode all prompts before the first is drawn (here, since a profile starts like a prediction)."""
        if batch_idx == 0:
            self.encode_ahead(self.data.prompts["predict"])

    # Drawing and scoring -----------------------------------------------------------------------------------------

    def score(self, images: Tensor, prompts: Sequence[Prompt], names: Sequence[str]) -> Tensor:
        """Scores [B, R] of images [B, 3, H, W] in [0, 1] by the named rewards; NaN where one could not score.

        Autocast is for the policy: scores are the same with and without it.
        """
        with self.scoring.running(), torch.autocast(images.device.type, enabled=False):
            return self.scoring.submit(images, prompts, names).result()

    def teardown(self, stage: str) -> None:
        """End the workers that score."""
        self.scoring.close()

    def gather_scores(self, rewards: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Scores [M, R] and groups [M] of all processes, from those of this one, [N, R] and [N]."""
        own = torch.cat([rewards, torch.tensor([[float(group)] for group in groups])], 1).to(self.device)
        gathered: Any = self.all_gather(own)
        everyone = gathered.reshape(-1, own.shape[1]).cpu()
        return everyone[:, :-1], everyone[:, -1].long()

    def log_rollout(self, metrics: dict[str, float]) -> None:
        """Hand a rollout's numbers to the loggers."""
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.global_step)

    def refuse_failures(self, trained: list[str], metrics: dict[str, float], images: int, failure_share: float) -> None:
        """See `rollout.check_failures`."""
        check_failures(trained, metrics, images, failure_share)

    def warn_of_constants(self, names: list[str], rewards: Tensor, rollout: int) -> None:
        """Name the rewards that cannot tell any of the images of a rollout apart, each once; scores are [N, R]."""
        for name, score in constant_rewards(names, rewards).items():
            if name not in self.called_constant:
                self.called_constant.add(name)
                rank_zero_warn(
                    f"Reward {name!r} gave all images of rollout {rollout + 1} the same score, {score:g}: "
                    "it trains nothing as long as that is so (said once)."
                )

    def draw(self, keys: Sequence[tuple[str | int, ...]], prompts: Sequence[Prompt], adapter: Adapter | None) -> Tensor:
        """Latents x_0 [B, C, H, W] of prompts, from noise keyed by `keys`."""
        noise = keyed_noise(self.policy.latent_shape, keys).to(self.device)
        with self.trainer.precision_plugin.forward_context():
            return self.policy.sample(noise, self.policy.encode_prompts([p.text for p in prompts]), adapter)

    def examine(
        self,
        rollout: int,
        samples: Sequence[Sample],
        texts: Sequence[str],
        latents: Tensor,
        thumbnails: Tensor,
        rewards: Tensor,
    ) -> dict[str, float]:
        """Leave out what is not finite of a rollout, in place, and tell how alike its images are.

        Args:
            rollout: its number, from 0.
            samples: its images, [N].
            texts: their prompts, [N].
            latents: x_0 [N, C, H, W]; rows that are not finite become 0.
            thumbnails: of the decoded images, [N, 3, 32, 32].
            rewards: [N, R]; rows that are not finite become NaN.

        Raises:
            UserError: if `on_nonfinite` is `stop` and one is not finite.
        """
        broken, count = self.finite.broken_images(rollout + 1, latents, thumbnails, texts)
        latents[broken], rewards[broken] = 0.0, torch.nan
        return {
            "rollout/nonfinite_images": float(count),
            "rollout/image_std": within_group_spread(thumbnails, [s.group for s in samples]),
        }

    @torch.no_grad()
    def deviation(self, x0: Tensor, keys: Sequence[tuple[str | int, ...]], texts: Sequence[str]) -> float:
        """How far the policy that samples has left the reference: mean (v_old − v_ref)² / mean v_ref², over all processes.

        Args:
            x0: latents [B, C, H, W], whose rows take turns through all levels.
            keys: of their noise.
            texts: their prompts.
        """
        levels = 1 + torch.arange(len(x0)) % self.policy.num_steps
        sigma = self.policy.sigmas[levels].to(self.device, x0.dtype)
        x_sigma = noise_to(x0.to(self.device), keyed_noise(self.policy.latent_shape, keys).to(self.device), sigma)
        with self.trainer.precision_plugin.forward_context():
            condition = self.policy.encode_prompts(texts)
            with self.policy.adapter("old"):
                velocity = self.policy(x_sigma, sigma, condition)
            with self.policy.adapter(None):
                reference = self.policy(x_sigma, sigma, condition)
        ratio = (velocity - reference).square().mean() / reference.square().mean()
        everyone = gather_values(ratio.item())
        return sum(everyone) / len(everyone)


def _device(name: str | None) -> torch.device | None:
    try:
        return None if name is None else torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"reward_device is {name!r}: expected cpu, cuda or, e.g., cuda:1.") from error
