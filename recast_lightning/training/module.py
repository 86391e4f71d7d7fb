"""DiffusionNFT with credit in time, as a LightningModule. One epoch is one rollout.

Shape legend: N samples on this process, M over all processes, R rewards, T levels, B micro-batch, C H W latents.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from recast_lightning.checkpointing.run_state import dump, restore
from recast_lightning.credit import CreditMatrix
from recast_lightning.credit.stages import Stage
from recast_lightning.flow.noising import noise_to
from recast_lightning.objective.advantages import level_advantages, optimality_probability
from recast_lightning.objective.nft_loss import nft_terms
from recast_lightning.objective.old_policy import old_policy_decay
from recast_lightning.policy import Policy
from recast_lightning.ranges import TRAINING, check_ranges
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout.finite import OnNonfinite, total_norm
from recast_lightning.rollout.metrics import rollout_metrics
from recast_lightning.rollout.samples import RolloutBuffer, Sample, TrainItem, check_sizes, plan_samples
from recast_lightning.seeds import generator
from recast_lightning.seeds import noise as keyed_noise
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.optimizer import set_rates, started_adamw, with_warm_up
from recast_lightning.training.staged import StagedModule
from recast_lightning.training.step_means import StepMeans
from recast_lightning.training.strategies import check_strategy, keep_adapters_exact
from recast_lightning.training.trainer import progress_of


class RecastModule(StagedModule):
    """Trains a policy on several rewards whose weights differ by noise level.

    Args:
        policy: the text-to-image policy.
        rewards: name → reward model; all are evaluated, those with a budget are trained on.
        stages: what is trained on, in order.
        rollout_batch_size: images sampled at once.
        micro_batch_size: images in one training step; must divide the images of a rollout on each process.
        timestep_fraction: share of the levels that each micro-batch trains at, drawn anew for each.
        beta: β of DiffusionNFT.
        kl_weight: weight of mean (v_θ − v_ref)²; 0 spares the reference's forward.
        advantage_clip: c of DiffusionNFT.
        advantage_std: `level` (all samples of a level, as published) or `group`.
        aggregation: `sum` (advantages of the weighted sum, as published) or `per_reward` (of each reward, then summed).
        num_workers: processes, and as many threads, in which slow rewards score while sampling goes on; 0 for none.
        reward_device: where rewards score, e.g. `cuda:1`, or a list, one a process of a machine; default the policy's device.
        reward_offload: keep the rewards' weights on the CPU except while they score.
        failure_share: a rollout in which more than this share of a reward's scores failed stops the run.
        on_nonfinite: what NaN or inf in samples, loss or gradient does: `stop` the run, or `skip` the image or step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        warmup_steps: optimizer steps over which the learning rate rises to its value; AdamW's first steps are mostly noise.
        ema_decay: per optimizer step, of the adapter that is evaluated.
        old_rate: growth of the old policy's decay η per rollout.
        old_flat: rollouts during which η is 0 (the old policy is the trained one).
        old_maximum: largest η.
        seed: keys everything random in training.
    """

    strict_loading = False  # checkpoints hold the adapters only

    def __init__(
        self,
        policy: Policy,
        rewards: dict[str, RewardModel],
        stages: list[Stage],
        rollout_batch_size: int = 48,
        micro_batch_size: int = 24,
        timestep_fraction: float = 1.0,
        beta: float = 0.1,
        kl_weight: float = 1e-4,
        advantage_clip: float = 5.0,
        advantage_std: Literal["level", "group"] = "level",
        aggregation: Literal["sum", "per_reward"] = "sum",
        num_workers: int = 0,
        reward_device: str | list[str] | None = None,
        reward_offload: bool = False,
        failure_share: float = 0.5,
        on_nonfinite: OnNonfinite = "stop",
        learning_rate: float = 3e-4,
        weight_decay: float = 1e-4,
        warmup_steps: int = 0,
        ema_decay: float = 0.9,
        old_rate: float = 0.001,
        old_flat: int = 0,
        old_maximum: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, rewards, stages, num_workers, reward_device, reward_offload, on_nonfinite)
        self.rollout_batch_size, self.micro_batch_size = rollout_batch_size, micro_batch_size
        check_ranges(locals(), TRAINING)
        if aggregation not in ("sum", "per_reward"):
            raise ValueError(f"aggregation must be 'sum' or 'per_reward', got {aggregation!r}.")
        self.timestep_fraction = timestep_fraction
        self.levels_per_batch = max(1, round(timestep_fraction * policy.num_steps))
        self.beta, self.kl_weight = beta, kl_weight
        self.advantage_clip, self.advantage_std = advantage_clip, advantage_std
        self.aggregation, self.failure_share = aggregation, failure_share
        self.skipping = False  # the optimizer step at hand, because something in it is not finite
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.ema_decay, self.seed = ema_decay, seed
        self.old_rate, self.old_flat, self.old_maximum = old_rate, old_flat, old_maximum
        self.synced_rollout = 0  # the rollout that the old policy was last updated for
        self.rollout_metrics: dict[str, float] = {}
        self.logged_rollout = -1
        self.step_means = StepMeans()
        self.resumed = ""  # what a checkpoint brought, in a sentence

    # Configuration -----------------------------------------------------------------------------------------------

    def validate_config(self, data: PromptDataModule, world_size: int = 1) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ValueError: naming the first thing that is wrong.
        """
        check_sizes(data.prompts_per_rollout, data.group_size, self.micro_batch_size, world_size)
        self.check_inputs(data)

    def setup(self, stage: str) -> None:
        """Check the configuration once more, for runs that do not come through the command line."""
        check_strategy(self.trainer)
        keep_adapters_exact(self.trainer, self.policy)
        self.validate_config(self.data, self.trainer.world_size)
        self.place_rewards()

    def configure_model(self) -> None:
        """Load the policy, and share it out under `ModelParallelStrategy` (once)."""
        self.policy.load(self.seed)
        self.policy.shard(self.device_mesh and self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """AdamW on the trained adapter, with a linear warm-up."""
        parameters = self.policy.adapter_parameters("default")
        return with_warm_up(started_adamw(parameters, self.learning_rate, self.weight_decay), self.warmup_steps)

    # Rollout -----------------------------------------------------------------------------------------------------

    @property
    def items_per_rollout(self) -> int:
        """Training steps in an epoch of this process: micro-batches × levels."""
        return self.items_of(self.data, self.trainer.world_size)

    def items_of(self, data: PromptDataModule, world_size: int) -> int:
        """See `items_per_rollout`."""
        samples = data.prompts_per_rollout // world_size * data.group_size
        return samples // self.micro_batch_size * self.levels_per_batch

    @torch.no_grad()
    def collect(self, rollout: int) -> RolloutBuffer:
        """Draw and score a rollout with the old policy, and turn scores into r at each level."""
        self._update_old(rollout)
        credit, rank, world = self.current_credit(), self.trainer.global_rank, self.trainer.world_size
        planned = self.data.rollout_prompts(rollout, self.seed)
        samples = plan_samples(planned, self.data.group_size, rank, world, self.seed, rollout)
        prompts = [self.data.prompts["train"][s.prompt] for s in samples]
        drawn, thumbnails, scores, started = [], [], [], time.perf_counter()
        bar = progress_of(self.trainer, f"rollout {rollout + 1}: sampling", len(samples))
        with self.scoring.running(), bar as advance:
            for start in range(0, len(samples), self.rollout_batch_size):
                chunk = slice(start, start + self.rollout_batch_size)
                keys = [(self.seed, "rollout", rollout, s.group, s.image) for s in samples[chunk]]
                x0 = self.draw(keys, prompts[chunk], "old")
                images = self.policy.decode(x0)
                scores.append(self.scoring.submit(images, prompts[chunk], credit.rewards))
                drawn.append(x0.cpu())
                thumbnails.append(adaptive_avg_pool2d(images, 32).cpu())
                advance(len(keys))
                self.safe_point()
            rewards = torch.cat([batch.result() for batch in scores])
        seconds = time.perf_counter() - started
        latents, texts = torch.cat(drawn), [p.text for p in prompts]
        looks = self.examine(rollout, samples, texts, latents, torch.cat(thumbnails), rewards)
        first = slice(self.rollout_batch_size)
        keys = [(self.seed, "deviation", rollout, s.group, s.image) for s in samples[first]]
        looks["rollout/deviation"] = self.deviation(latents[first], keys, texts[first])
        optimality = self._optimality(rewards, samples, credit, rollout)
        total = len(samples) * world
        self.rollout_metrics |= looks | {"rollout/images_per_second": total / seconds, "rollout/seconds": seconds}
        trained = [name for name, budget in credit.budgets.items() if budget]  # others may fail without harm
        if rollout > self.logged_rollout:  # else resumed within it
            self.logged_rollout = rollout
            self.step_means.start()
            self.log_rollout(self.rollout_metrics)
        self.refuse_failures(trained, self.rollout_metrics, total, self.failure_share)
        return RolloutBuffer(samples, latents, texts, optimality)

    def _update_old(self, rollout: int) -> None:
        """θ_old ← η θ_old + (1 − η) θ, once a rollout; behind a saved counter, so a resumed epoch does not repeat it."""
        if rollout > self.synced_rollout:
            eta = old_policy_decay(rollout, rate=self.old_rate, flat=self.old_flat, maximum=self.old_maximum)
            self.policy.blend("old", "default", keep=eta)
            self.synced_rollout = rollout

    def _optimality(self, rewards: Tensor, samples: list[Sample], credit: CreditMatrix, rollout: int) -> Tensor:
        """R [N, T] of this process's rewards [N, R]; group and level statistics are over all processes."""
        rewards, groups = self.gather_scores(rewards, [s.group for s in samples])
        advantages = level_advantages(
            rewards, credit.level_weights, groups, aggregation=self.aggregation, std=self.advantage_std
        )
        self.warn_of_constants(credit.rewards, rewards, rollout)
        r = optimality_probability(advantages, self.advantage_clip).float()
        place = {"rollout": float(rollout + 1), "stage": float(self.stage_index)}
        self.rollout_metrics = place | rollout_metrics(credit.rewards, rewards, advantages, r)
        mine = slice(self.trainer.global_rank * len(samples), (self.trainer.global_rank + 1) * len(samples))
        return r[mine]

    def train_item(self, buffer: RolloutBuffer, rollout: int, place: int) -> TrainItem:
        """Item `place` of an epoch: micro-batches in order, each at some or all levels in an order of its own."""
        batch, turn = divmod(place, self.levels_per_batch)
        order = torch.randperm(self.policy.num_steps, generator=generator(self.seed, "levels", rollout, batch))
        level = int(order[turn]) + 1
        rows = slice(batch * self.micro_batch_size, (batch + 1) * self.micro_batch_size)
        keys = [(self.seed, "train", rollout, level, s.group, s.image) for s in buffer.samples[rows]]
        noise = keyed_noise(self.policy.latent_shape, keys)
        return TrainItem(buffer.latents[rows], noise, level, buffer.texts[rows], buffer.optimality[rows, level - 1])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Items move themselves: they are not plain collections of tensors."""
        return batch.to(device) if isinstance(batch, TrainItem) else batch

    # Training ----------------------------------------------------------------------------------------------------

    def training_step(self, item: TrainItem, batch_idx: int) -> Tensor:
        """The DiffusionNFT loss of one micro-batch at one level."""
        x0, valid = item.latents, item.optimality.isfinite()
        sigma = self.policy.sigmas[item.level].to(x0).expand(len(x0))
        x_sigma, condition = noise_to(x0, item.noise, sigma), self.policy.encode_prompts(item.texts)
        with self.policy.adapter("old"):
            velocity_old = self.policy(x_sigma, sigma, condition)
        velocity_reference = None
        if self.kl_weight:
            with self.policy.adapter(None):
                velocity_reference = self.policy(x_sigma, sigma, condition)
        velocity = self.policy(x_sigma, sigma, condition)
        r = item.optimality.nan_to_num(0.5)
        terms = nft_terms(
            velocity, velocity_old, x_sigma, x0, sigma, r, beta=self.beta, advantage_clip=self.advantage_clip
        )
        kl = torch.zeros_like(terms.loss)
        if velocity_reference is not None:
            kl = (velocity - velocity_reference).square().flatten(1).mean(1)
        share = valid.float() / len(x0)
        losses = (terms.loss + self.kl_weight * kl) * share
        place = f"Rollout {self.current_epoch + 1}, micro-batch {batch_idx // self.levels_per_batch + 1}, level {item.level}"
        velocities = {"old policy's velocity": velocity_old, "trained policy's velocity": velocity}
        self.finite.note(place, item.texts, {"latents": x0, **velocities, "loss": losses})
        loss = losses.sum()
        self.step_means.add(
            loss=loss,
            positive=(terms.positive * share).sum(),
            negative=(terms.negative * share).sum(),
            kl=kl.mean(),
            old_deviation=(velocity - velocity_old).square().mean(),
            x0_norm=x0.square().mean().sqrt(),
        )
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradient's norm; see to it that a step with NaN or inf is not made."""
        norm = total_norm(self.policy.parameters())
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        self.skipping = self.finite.refuses_step(norm, self.policy.named_parameters(), scaled=scaled)
        if self.skipping:
            optimizer.zero_grad()  # AdamW leaves weights without gradients, and their moments, alone
        rate = torch.tensor(optimizer.param_groups[0]["lr"], device=self.device)
        self.step_means.add(grad_norm=norm, learning_rate=rate)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, let the evaluated adapter follow, and log the step."""
        super().optimizer_step(*args, **kwargs)
        if self.skipping:
            means = self.step_means.skip()
        else:
            self.policy.blend("ema", "default", keep=self.ema_decay)
            means = self.step_means.close(self.trainer.strategy.reduce)
        for logger in self.trainer.loggers:
            logger.log_metrics({f"train/{name}": value for name, value in means.items()}, step=self.global_step)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See `resume.dump`."""
        dump(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See `resume.restore`."""
        self.resumed = restore(self, checkpoint)

    def on_train_start(self) -> None:
        """The configuration's learning rate holds over a checkpoint's."""
        if self.resumed:
            set_rates(self.trainer, self.learning_rate, self.weight_decay, self.warmup_steps)
