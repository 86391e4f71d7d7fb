"""DiffusionNFT with credit in time, as a LightningModule. One epoch is one rollout.

Shape legend: B micro-batch, R rewards, C H W latents.
"""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import torch
from torch import Tensor

from recast_lightning.checkpointing.interruption import Interruption
from recast_lightning.checkpointing.restoring import Restored, restore
from recast_lightning.checkpointing.run_state import KEY, RunState
from recast_lightning.credit import CreditSchedule, Stage
from recast_lightning.evaluation import Evaluation, EvaluationBatch, EvaluationMetrics, Evaluator
from recast_lightning.objective import Advantages, NFTLoss, OldPolicySchedule, ema_decay
from recast_lightning.policy import Policy
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout import (
    FiniteCheck,
    OnNonfinite,
    RolloutBuffer,
    RolloutCollector,
    RolloutOptions,
    RolloutStream,
    RunContext,
    ScoringOptions,
    ScoringPool,
    TrainItem,
    TrainItems,
    check_failures,
    check_sizes,
    encode_ahead,
    plan_samples,
    total_norm,
)  # fmt: skip
from recast_lightning.training.context import context_of
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.item_loss import item_loss
from recast_lightning.training.optimizer import OptimizerOptions
from recast_lightning.training.run_settings import settings_of
from recast_lightning.training.strategies import check_strategy, keep_adapters_in_float32, number_weights_by_place


class RecastModule(L.LightningModule):
    """Trains a policy on several rewards whose weights differ by noise level.

    Args:
        policy: the text-to-image policy.
        rewards: name → reward model; all are evaluated, those with a budget are trained on.
        stages: what is trained on, in order.
        objective: the loss.
        advantages: from rewards to advantages.
        rollout: how a rollout is drawn and served.
        scoring: where and how rewards score.
        optimizer: AdamW.
        old_policy: how the policy that samples follows the trained one.
        ema_decay: per optimizer step, of the adapter that is evaluated.
        ema_warmup: let the decay grow to `ema_decay` over the first steps, as published; else it is that from the start,
            and the evaluated adapter holds on to the base.
        on_nonfinite: what NaN or inf in samples, loss or gradient does: `stop` the run, or `skip` the image or step.
        seed: keys everything random in training.

    Attributes:
        accept_changes: whether a resume may have other rewards, prompts or evaluation settings than its checkpoint.
        resumed: what a checkpoint brought.
    """

    strict_loading = False  # checkpoints hold the adapters only

    def __init__(
        self,
        policy: Policy,
        rewards: dict[str, RewardModel],
        stages: list[Stage],
        objective: NFTLoss = NFTLoss(),
        advantages: Advantages = Advantages(),
        rollout: RolloutOptions = RolloutOptions(),
        scoring: ScoringOptions = ScoringOptions(),
        optimizer: OptimizerOptions = OptimizerOptions(),
        old_policy: OldPolicySchedule = OldPolicySchedule(),
        ema_decay: float = 0.9,
        ema_warmup: bool = True,
        on_nonfinite: OnNonfinite = "stop",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name in rewards:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"Reward name {name!r} must be made of letters, digits and '_'.")
        check_ranges({"ema_decay": ema_decay, "seed": seed}, {"ema_decay": "[0, 1)", "seed": "[0, inf)"})
        self.policy, self.rewards, self.objective = policy, rewards, objective
        self.advantages, self.rollout, self.optimizer, self.old_policy = advantages, rollout, optimizer, old_policy
        self.scoring_options, self.ema_decay, self.ema_warmup, self.seed = scoring, ema_decay, ema_warmup, seed
        self.context, self.interruption = RunContext(), Interruption()
        self.finite, self.skipping = FiniteCheck(on_nonfinite), False
        self.scoring = ScoringPool(rewards, scoring.num_workers, offload=scoring.offload)
        self.collector = RolloutCollector(
            policy, self.scoring, self.finite, advantages, objective.advantage_clip, rollout.batch_size, seed
        )
        self.items = TrainItems(rollout, policy.num_steps, seed)
        self.evaluator, self.evaluation_metrics = Evaluator(policy, self.scoring), EvaluationMetrics(rewards)
        self.credit = CreditSchedule(stages, rewards)
        self.run_state = RunState(self.credit)
        self.resumed, self.accept_changes = Restored(), False

    # Configuration -----------------------------------------------------------------------------------------------

    @property
    def data(self) -> PromptDataModule:
        """The data module of the run."""
        data: PromptDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def validate_config(self, data: PromptDataModule, world_size: int = 1) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ValueError: naming the first thing that is wrong.
        """
        check_sizes(data.prompts_per_rollout, data.group_size, self.rollout.micro_batch_size, world_size)
        self.policy.validate()
        for model in self.rewards.values():
            model.validate()
        data.load_for(self.rewards.values())

    def items_per_rollout(self, data: PromptDataModule, world_size: int) -> int:
        """Training steps of an epoch on each process."""
        return self.items.count(data.samples_per_process(world_size))

    def setup(self, stage: str) -> None:
        """Check the configuration once more, for runs that do not come through the command line."""
        check_strategy(self.trainer, self.policy)
        keep_adapters_in_float32(self.trainer, self.policy)
        self.validate_config(self.data, self.trainer.world_size)
        self.context = context_of(self, self.interruption)
        self.scoring.device = self.scoring_options.device_of(self.trainer.local_rank, self.trainer.num_devices)

    def configure_model(self) -> None:
        """Load the policy, and share it out under `ModelParallelStrategy` (once)."""
        self.policy.load(self.seed)
        self.policy.shard(self.device_mesh and self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """AdamW on the trained adapter, with a linear warm-up."""
        return self.optimizer.build(self.policy.adapter_parameters("default"))

    def teardown(self, stage: str) -> None:
        """End the workers that score."""
        self.scoring.close()

    # Prompts -----------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Encode the prompts of the rollouts to come, and those of the evaluations."""
        rollouts = range(self.current_epoch, self.trainer.max_epochs or 0)
        encode_ahead(self.policy, self.data.fit_prompts(rollouts, self.seed), self.context)

    def on_validation_start(self) -> None:
        """Encode the evaluation prompts, in a fit for the first time only."""
        encode_ahead(self.policy, self.data.prompts["validation"], self.context)

    on_test_start = on_validation_start

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Encode all prompts before the first is drawn (here, since a profile starts like a prediction)."""
        if batch_idx == 0:
            encode_ahead(self.policy, self.data.prompts["predict"], self.context)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Items move themselves: they are not plain collections of tensors."""
        return batch.to(device) if isinstance(batch, TrainItem) else batch

    # Rollout -----------------------------------------------------------------------------------------------------

    def rollout_stream(self) -> RolloutStream:
        """The loader of a fit."""
        num_samples = self.data.samples_per_process(self.trainer.world_size)
        return RolloutStream(lambda: self.current_epoch, self.collect, self.items, num_samples)

    def collect(self, rollout: int) -> RolloutBuffer:
        """Let the old policy follow, draw and score a rollout with it, and log it."""
        state, credit = self.run_state, self.credit.current(rollout, self.policy.sigmas)
        if rollout > state.synced_rollout:  # a saved counter, so a resumed epoch does not repeat it
            keep = self.old_policy.decay(steps=self.global_step, rollouts=rollout)
            self.policy.blend("old", "default", keep)
            state.synced_rollout = rollout
        planned = self.data.rollout_prompts(rollout, self.seed)
        place = (self.context.rank, self.context.world_size)
        samples = plan_samples(planned, self.data.group_size, *place, self.seed, rollout)
        prompts = [self.data.prompts["train"][sample.prompt] for sample in samples]
        buffer, metrics = self.collector.collect(rollout, samples, prompts, credit, self.context)
        state.metrics = {**metrics, "stage": float(self.credit.stage_index(rollout))}
        if rollout > state.logged_rollout:  # else resumed within it
            state.logged_rollout = rollout
            state.step_means.start()
            self._log_at_once(state.metrics)
        trained = [name for name, budget in credit.budgets.items() if budget]  # others may fail without harm
        images = len(samples) * self.context.world_size
        check_failures(trained, state.metrics, images, self.scoring_options.failure_share)
        return buffer

    def _log_at_once(self, metrics: dict[str, float]) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.global_step)

    # Training ----------------------------------------------------------------------------------------------------

    def training_step(self, item: TrainItem, batch_idx: int) -> Tensor:
        """The objective of one micro-batch, each image at a level of its own."""
        loss, logged, checked = item_loss(self.policy, self.objective, item)
        self.finite.note([item.where(row) for row in range(len(item.texts))], checked)
        self.run_state.step_means.add(**logged)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradient's norm; see to it that a step with NaN or inf is not made."""
        norm = total_norm(self.policy.parameters())
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        self.skipping = self.finite.refuses_step(norm, self.policy.named_parameters(), scaled=scaled)
        if self.skipping:
            optimizer.zero_grad()  # AdamW leaves weights without gradients, and their moments, alone
        rate = torch.tensor(optimizer.param_groups[0]["lr"], device=self.device)
        self.run_state.step_means.add(grad_norm=norm, learning_rate=rate)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, let the evaluated adapter follow, and log the step."""
        super().optimizer_step(*args, **kwargs)
        if self.skipping:
            means = self.run_state.step_means.skip()
        else:
            decay = ema_decay(self.global_step + 1, self.ema_decay) if self.ema_warmup else self.ema_decay
            self.policy.blend("ema", "default", keep=decay)
            means = self.run_state.step_means.close(lambda tensor: self.context.reduce(tensor, "mean"))
        self._log_at_once({f"train/{name}": value for name, value in means.items()})

    # Evaluation --------------------------------------------------------------------------------------------------

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> Any:
        """An `Evaluation`; the means of all rewards become `val/<name>`."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> Any:
        """As validation, under `test/<name>`."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> Evaluation:
        """Images and scores."""
        return self.evaluator.evaluate(batch, self.context)

    def _evaluate(self, batch: EvaluationBatch, prefix: str) -> Evaluation:
        result = self.evaluator.evaluate(batch, self.context)
        for name, mean in self.evaluation_metrics.update(batch.prompts, batch.real, result.scores).items():
            self.log(f"{prefix}/{name}", mean, on_epoch=True, batch_size=len(batch.real))
        return result

    def on_validation_epoch_end(self) -> None:
        """Log GenEval's means over tags, and their mean, as `val/<name>/overall`."""
        if self.trainer.state.fn == "fit":
            # Lightning's own count of steps is off by one after some resumes
            self.log("step", float(self.global_step), sync_dist=True)
        self._log_tags("val")

    def on_test_epoch_end(self) -> None:
        """As in validation."""
        self._log_tags("test")

    def _log_tags(self, prefix: str) -> None:
        means = self.evaluation_metrics.compute_tags()
        self.log_dict({f"{prefix}/{name}": mean for name, mean in means.items()}, sync_dist=True)

    # Checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep W, the counters and the settings; of the policy there are the adapters only, see `Policy`."""
        number_weights_by_place(checkpoint.get("optimizer_states", []), self)
        checkpoint[KEY] = {**self.run_state.state_dict(), "settings": settings_of(self)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what was kept; the configuration's values hold where they may differ.

        Raises:
            UserError: if the checkpoint does not belong to this model, rollout or stage.
        """
        settings = settings_of(self) if self.trainer.state.fn == "fit" else None
        if settings is not None:
            self.trainer.num_sanity_val_steps = 0  # it evaluates the base, and this is no longer the base
        path, own = str(self.trainer.ckpt_path), self.state_dict()
        self.resumed = restore(self.run_state, checkpoint, path, own, self.policy, settings, self.accept_changes)

    def on_train_start(self) -> None:
        """The configuration's learning rate holds over a checkpoint's."""
        if self.resumed.sentence:
            self.optimizer.apply_to(self.trainer)
