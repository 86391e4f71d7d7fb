"""Measures, before each stage, when in denoising every reward tells good from bad, and builds W from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from recast_lightning import report
from recast_lightning.credit import CreditMatrix, Profile, estimate_profile, profile_cost
from recast_lightning.data import PromptDataModule
from recast_lightning.errors import UserError
from recast_lightning.module import RecastModule
from recast_lightning.prompts import Prompt
from recast_lightning.proposals import Proposals
from recast_lightning.seeds import generator
from recast_lightning.trainer import progress_of, run_folder


class RenyiProfilerCallback(L.Callback):
    """Builds profile and W from the policy that enters a stage, once per stage; static stages need none.

    Writes `stages/<n>-<name>/` in the run folder: profile and W (safetensors and JSON) and their pictures.

    Args:
        proposals: a strong generator's images of the first `num_prompts` training prompts.
        num_prompts: proposals in a profile.
        rollouts: conditional rollouts from each proposal and level.
        order: Rényi order α.
        posterior: sampler of the conditional rollouts; `sde2` draws from the posterior, the others are biased.
        batch_size: rollouts in one network call.
        shrinkage: `auto` pulls gains that noise explains towards flat, `none` takes them as measured (the paper).
        temperature: τ of the kernel.
        profile: a saved profile to use instead of measuring.
    """

    def __init__(
        self,
        proposals: Proposals,
        num_prompts: int = 96,
        rollouts: int = 1,
        order: float = 2.0,
        posterior: Literal["sde2", "sde1", "ode"] = "sde2",
        batch_size: int = 48,
        shrinkage: Literal["auto", "none"] = "auto",
        temperature: float = 1.0,
        profile: str | None = None,
    ) -> None:
        if num_prompts < 2:
            raise ValueError(f"num_prompts must be at least 2, got {num_prompts}: one proposal has no error bar.")
        self.proposals, self.num_prompts, self.rollouts, self.order = proposals, num_prompts, rollouts, order
        self.posterior, self.batch_size = posterior, batch_size
        self.shrinkage, self.temperature, self.profile = shrinkage, temperature, profile

    def validate_config(self, model: RecastModule, data: PromptDataModule) -> None:
        """Check the sources without loading a model.

        Raises:
            ValueError: if proposals, prompts or the saved profile are missing.
        """
        measured = [stage for stage in model.stages if stage.credit != "static"]
        if self.profile is None:
            if measured:
                self.proposals.validate(data.prompts["train"][: self.num_prompts])
            return
        loaded = Profile.load(self.profile)
        if len(loaded.sigmas) != model.policy.num_steps + 1:
            raise ValueError(
                f"The profile {self.profile!r} has {len(loaded.sigmas) - 1} levels, but policy.num_steps is "
                f"{model.policy.num_steps}."
            )
        for stage in measured:
            loaded.rows(list(stage.budgets))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the W that a resumed run brings along."""
        assert isinstance(pl_module, RecastModule)
        folder = run_folder(trainer)
        if trainer.is_global_zero and pl_module.credit_stage == pl_module.stage_index:
            self._record(trainer, pl_module, folder, None, pl_module.current_credit())

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build W where the stage that begins here asks for one."""
        assert isinstance(pl_module, RecastModule)
        if pl_module.credit_stage == pl_module.stage_index:
            return
        profile, stage = None, pl_module.stage
        if stage.credit != "static":
            names = list(stage.budgets)
            profile = Profile.load(self.profile) if self.profile else self.measure(trainer, pl_module, names)
            credit = CreditMatrix.from_profile(
                profile, stage.budgets, stage.credit, shrinkage=self.shrinkage, temperature=self.temperature
            )
            pl_module.set_credit(credit)
        folder, credit = run_folder(trainer), pl_module.current_credit()
        if trainer.is_global_zero:
            self._record(trainer, pl_module, folder, profile, credit)

    def measure(self, trainer: L.Trainer, module: RecastModule, names: list[str]) -> Profile:
        """Profile the trained policy as it is now; all processes compute the same numbers."""
        prompts = module.data.prompts["train"][: self.num_prompts]
        policy, device = module.policy, module.device
        pictures = self.proposals.images(prompts, policy.height, policy.width)
        chunks = range(0, len(prompts), self.batch_size)
        latents = torch.cat([policy.encode(pictures[i : i + self.batch_size].to(device)) for i in chunks])
        conditions = policy.encode_prompts([p.text for p in prompts])

        def velocity(x: Tensor, sigma: Tensor, index: Tensor) -> Tensor:
            return policy(x, sigma, conditions[index])

        total = profile_cost(len(prompts), policy.num_steps, self.rollouts)
        with progress_of(trainer, f"profiling {', '.join(names)}", total) as advance, policy.adapter("default"):
            done = 0

            def progress(calls: int) -> None:
                nonlocal done
                advance(calls - done)
                done = calls

            with trainer.precision_plugin.forward_context(), _user_errors():
                return estimate_profile(
                    velocity,
                    latents,
                    _image_rewards(module, prompts, names),
                    policy.sigmas,
                    rollouts=self.rollouts,
                    order=self.order,
                    posterior=self.posterior,
                    generator=generator(module.seed, "profile", module.stage_index),
                    batch_size=self.batch_size,
                    progress=progress,
                    metadata={"policy": policy.path, "proposals": type(self.proposals).__name__},
                )

    def _record(
        self,
        trainer: L.Trainer,
        module: RecastModule,
        run: Path | None,
        profile: Profile | None,
        credit: CreditMatrix,
    ) -> None:
        """Write artefacts and pictures, and log them."""
        stage, step = module.stage.name, trainer.global_step
        for logger in trainer.loggers:
            for name, row in zip(credit.rewards, credit.level_weights.tolist(), strict=True):
                logger.log_metrics({f"credit/{stage}/{name}/level_{t}": w for t, w in enumerate(row, 1)}, step=step)
        if run is None:
            return
        folder = run / "stages" / f"{module.stage_index + 1}-{stage}"
        credit.save(folder / "credit")
        figures = {"weights": report.weight_heatmap(credit)}
        if profile is not None:
            profile.save(folder / "profile")
            figures |= {"gain_curves": report.gain_curves(profile), "normalized_gains": report.normalized_gains(credit)}
        for name, figure in figures.items():
            path = report.save_figure(figure, folder / f"{name}.png")
            for logger in trainer.loggers:
                if hasattr(logger, "log_image"):
                    logger.log_image(f"credit/{stage}/{name}", [str(path)], step=step)


@contextmanager
def _user_errors() -> Iterator[None]:
    """A reward that cannot be profiled is the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _image_rewards(
    module: RecastModule, prompts: list[Prompt], names: list[str]
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Rewards of latents; they are decoded once for all rewards."""
    last: dict[str, Any] = {"latents": None}

    def make(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def reward(x0: Tensor, index: Tensor) -> Tensor:
            if last["latents"] is not x0:
                last.update(latents=x0, images=module.policy.decode(x0))
            scores = module.score(last["images"], [prompts[i] for i in index.tolist()], [name])[:, 0]
            return module.reward_models[name].positive(scores)

        return reward

    return {name: make(name) for name in names}
