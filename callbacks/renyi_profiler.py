"""Measures, before each stage, when in denoising every reward tells good from bad, and builds W from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from recast_lightning import report
from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.credit.plan import check_order, make_plan
from recast_lightning.credit.stages import Stage
from recast_lightning.profiling.measure import measure_profile
from recast_lightning.proposals.base import Proposals
from recast_lightning.ranges import check_ranges
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.module import RecastModule
from recast_lightning.training.trainer import run_folder


class RenyiProfilerCallback(L.Callback):
    """Builds profile and W from the policy that enters a stage, once per stage; static stages need none.

    Writes `stages/<n>-<name>/` in the run folder: profile and W (safetensors and JSON) and their pictures; a profile of the
    policy that leaves the stage (`after`); and what was measured anew within the stage (`rollout-<k>/`).

    Args:
        proposals: a strong generator's images of the first `num_prompts` training prompts.
        num_prompts: prompts in a profile.
        rollouts: conditional rollouts from each proposal, for all levels or for each measured one.
        order: Rényi order α.
        posterior: sampler of the conditional rollouts; `sde2` draws from the posterior, the others are biased.
        steps: network calls of a rollout from pure noise (fewer from below), placed for the posterior; `auto`: as many as
            cost no more than the sampler's own grid, and `grid`: that grid (the paper).
        levels: measured levels (how many, or which); monotone interpolation fills the others. Default all.
        batch_size: rollouts in one network call.
        shrinkage: `auto` pulls gains that noise explains towards flat, `none` takes them as measured (the paper).
        temperature: τ of the kernel.
        profile: a saved profile to use instead of measuring.
        refresh: measure anew within a stage after so many rollouts; default once per stage (the paper).
        drift: measure anew when a check before each rollout says that ΣD has moved by more than this share.
        drift_prompts: prompts of the check, which rolls out from the noisiest level only.
        measure_after: measure the policy that leaves a stage, too, to report what is left of its D.
    """

    def __init__(
        self,
        proposals: Proposals,
        num_prompts: int = 96,
        rollouts: int | list[int] = 1,
        order: float = 2.0,
        posterior: Literal["sde2", "sde1", "ode"] = "sde2",
        steps: int | Literal["auto", "grid"] = "auto",
        levels: int | list[int] | None = None,
        batch_size: int = 48,
        shrinkage: Literal["auto", "none"] = "auto",
        temperature: float = 1.0,
        profile: str | None = None,
        refresh: int | None = None,
        drift: float | None = None,
        drift_prompts: int = 24,
        measure_after: bool = True,
    ) -> None:
        if min(num_prompts, drift_prompts) < 2:
            raise ValueError(
                f"num_prompts and drift_prompts must be at least 2, got {num_prompts} and {drift_prompts}: one prompt has no "
                "error bar."
            )
        if refresh is not None and refresh < 1:
            raise ValueError(f"refresh must be at least 1 rollout, got {refresh}.")
        if drift is not None and not drift > 0:
            raise ValueError(f"drift must be a positive share, got {drift}.")
        if profile is not None and (refresh or drift):
            raise ValueError(f"refresh and drift measure anew, but the profile {profile!r} is given: leave one out.")
        self.proposals, self.num_prompts, self.rollouts, self.order = proposals, num_prompts, rollouts, order
        self.posterior, self.steps, self.levels, self.batch_size = posterior, steps, levels, batch_size
        self.shrinkage, self.temperature, self.profile = shrinkage, temperature, profile
        self.refresh, self.drift, self.drift_prompts = refresh, drift, drift_prompts
        self.measure_after = measure_after
        check_ranges(vars(self), {"temperature": "(0, inf)", "batch_size": "[1, inf)"})
        self.measured_at = -1  # the rollout before which W was last built
        self.drift_total: float | None = None  # ΣD of the check at that time

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know: when W was built, and from which ΣD drift counts."""
        return {"measured_at": self.measured_at, "drift_total": self.drift_total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.measured_at, self.drift_total = state["measured_at"], state["drift_total"]

    def validate_config(self, model: RecastModule, data: PromptDataModule) -> None:
        """Check the sources without loading a model.

        Raises:
            ValueError: if a setting is out of range, or proposals, prompts or the saved profile are missing.
        """
        measured = [stage for stage in model.stages if stage.credit != "static"]
        if self.profile is None:
            levels = torch.linspace(0, 1, model.policy.num_steps + 1)  # only their number matters here
            check_order(
                self.order, make_plan(levels, rollouts=self.rollouts, steps=self.steps, levels=self.levels).rollouts
            )
            if self.num_prompts > len(data.prompts["train"]):
                raise ValueError(
                    f"num_prompts is {self.num_prompts}, but there are only {len(data.prompts['train'])} training prompts."
                )
            if measured:
                self.proposals.validate(data.prompts["train"][: self.num_prompts])
            for name in dict.fromkeys(name for stage in measured for name in stage.budgets):
                model.reward_models[name].check_positive()
            return
        loaded = Profile.load(self.profile)
        if len(loaded.sigmas) != model.policy.num_steps + 1:
            raise ValueError(
                f"The profile {self.profile!r} has {len(loaded.sigmas) - 1} levels, but policy.num_steps is "
                f"{model.policy.num_steps}."
            )
        for stage in measured:
            loaded.rows(list(stage.budgets))

    # Hooks ---------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build W where a stage begins, and where it is time to measure anew."""
        assert isinstance(pl_module, RecastModule)
        module, begins = pl_module, pl_module.credit_stage != pl_module.stage_index
        if not begins and not (module.stage.credit != "static" and self._is_due(trainer, module)):
            return
        profile = None
        if module.stage.credit != "static":
            names = list(module.stage.budgets)
            profile = Profile.load(self.profile) if self.profile else self.measure(trainer, module, names)
            if self.profile:
                profile.check(names, module.policy.sigmas)
            credit = CreditMatrix.from_profile(
                profile,
                module.stage.budgets,
                module.stage.credit,
                shrinkage=self.shrinkage,
                temperature=self.temperature,
            )
            self.drift_total = self._drift_check(trainer, module) if self.drift else None
        if begins:
            self._left(trainer, module, module.stage_index - 1, profile)
        if profile is not None:
            module.set_credit(credit)
        self.measured_at = trainer.current_epoch
        folder = _stage_folder(run_folder(trainer), module)
        if folder is not None and not begins:
            folder = folder / f"rollout-{trainer.current_epoch}"
        if trainer.is_global_zero:
            self._record(trainer, module, folder, profile, module.current_credit())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what the last stage left."""
        assert isinstance(pl_module, RecastModule)
        if trainer.current_epoch == sum(stage.rollouts for stage in pl_module.stages):
            self._left(trainer, pl_module, len(pl_module.stages) - 1, None)

    # What they do --------------------------------------------------------------------------------------------------

    def measure(self, trainer: L.Trainer, module: RecastModule, names: list[str]) -> Profile:
        """Profile the trained policy as it is now; all processes share the work and get the same numbers."""
        run = run_folder(trainer)
        unfinished = run and run.parent / "unfinished"
        return self._measure(trainer, module, names, self.num_prompts, self.rollouts, self.levels, unfinished)

    def _measure(
        self,
        trainer: L.Trainer,
        module: RecastModule,
        names: list[str],
        num_prompts: int,
        rollouts: int | list[int],
        levels: int | list[int] | None,
        unfinished: Path | None = None,
    ) -> Profile:
        return measure_profile(
            trainer,
            module,
            names,
            self.proposals,
            num_prompts,
            rollouts=rollouts,
            order=self.order,
            posterior=self.posterior,
            steps=self.steps,
            levels=levels,
            batch_size=self.batch_size,
            unfinished=unfinished,
        )

    def _is_due(self, trainer: L.Trainer, module: RecastModule) -> bool:
        """Whether W must be built anew within a stage."""
        since = trainer.current_epoch - self.measured_at
        if since < 1:
            return False
        if self.refresh is not None and since >= self.refresh:
            return True
        return self.drift is not None and has_drifted(self.drift_total, self._drift_check(trainer, module), self.drift)

    def _drift_check(self, trainer: L.Trainer, module: RecastModule) -> float:
        """ΣD of the stage's rewards from a few prompts, rolled out from the noisiest level only."""
        names = [name for name, budget in module.stage.budgets.items() if budget > 0]
        rollouts = self.rollouts if isinstance(self.rollouts, int) else max(self.rollouts)
        check = self._measure(trainer, module, names, self.drift_prompts, rollouts, [module.policy.num_steps])
        return float(check.totals[0].sum())

    def _left(self, trainer: L.Trainer, module: RecastModule, index: int, profile: Profile | None) -> None:
        """Record the D of the policy that leaves stage `index`, from the next stage's profile if that has all its rewards."""
        stage = module.stages[index] if index >= 0 else None
        if not self.measure_after or self.profile or stage is None or stage.credit == "static":
            return
        names = list(stage.budgets)
        after = profile if profile and set(names) <= set(profile.rewards) else self.measure(trainer, module, names)
        run = run_folder(trainer)
        if run is not None and trainer.is_global_zero:
            after.save(_folder(run, index, stage) / "after")

    def _record(
        self,
        trainer: L.Trainer,
        module: RecastModule,
        folder: Path | None,
        profile: Profile | None,
        credit: CreditMatrix,
    ) -> None:
        """Write artefacts and pictures, and log them."""
        stage, step = module.stage.name, trainer.global_step
        for logger in trainer.loggers:
            for name, row in zip(credit.rewards, credit.level_weights.tolist(), strict=True):
                logger.log_metrics({f"credit/{stage}/{name}/level_{t}": w for t, w in enumerate(row, 1)}, step=step)
        if folder is None:
            return
        credit.save(folder / "credit")
        figures = {"weights": report.weight_heatmap(credit)}
        if profile is not None:
            profile.save(folder / "profile")
            totals = dict(zip(profile.rewards, profile.totals[0].tolist(), strict=True))
            for logger in trainer.loggers:
                logger.log_metrics({f"divergence/{name}": total for name, total in totals.items()}, step=step)
            figures |= {
                "gain_curves": report.gain_curves(profile),
                "normalized_gains": report.normalized_gains(credit),
                "demand": report.demand(profile),
            }
        for name, figure in figures.items():
            path = report.save_figure(figure, folder / f"{name}.png")
            for logger in trainer.loggers:
                if hasattr(logger, "log_image"):
                    logger.log_image(f"credit/{stage}/{name}", [str(path)], step=step)


def has_drifted(before: float | None, now: float, share: float) -> bool:
    """Whether ΣD (nats) has moved by more than a share of what it was; always, where it was never measured."""
    return before is None or abs(now - before) > share * abs(before)


def _stage_folder(run: Path | None, module: RecastModule) -> Path | None:
    return None if run is None else _folder(run, module.stage_index, module.stage)


def _folder(run: Path, index: int, stage: Stage) -> Path:
    return run / "stages" / f"{index + 1}-{stage.name}"
