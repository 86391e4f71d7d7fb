"""Measures, before each stage, when in denoising every reward tells good from bad, and builds W from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from recast_lightning import report
from recast_lightning.checkpointing.settings import describe
from recast_lightning.credit import CreditMatrix, Profile, Stage
from recast_lightning.credit.plan import check_order, make_plan
from recast_lightning.errors import UserError
from recast_lightning.profiling import ProfileOptions, Profiler
from recast_lightning.proposals import Proposals
from recast_lightning.ranges import check_ranges
from recast_lightning.training import PromptDataModule, RecastModule
from recast_lightning.training.trainer import run_folder


class RenyiProfilerCallback(L.Callback):
    """Builds profile and W from the policy that enters a stage, once per stage; static stages need none.

    Writes `stages/<n>-<name>/` in the run folder: profile and W (safetensors and JSON) and their pictures; a profile of the
    policy that leaves the stage (`after`); and what was measured anew within the stage (`rollout-<k>/`).

    Args:
        proposals: a strong generator's images of the first `num_prompts` training prompts; what is measured needs them.
        num_prompts: prompts in a profile.
        completions: completions of each noised proposal, at all levels or at each measured one.
        order: Rényi order α.
        posterior: sampler of the completions; `sde2` draws from the posterior, the others are biased.
        steps: network calls of a completion from pure noise (fewer from below), placed for the posterior; `auto`: as many
            as cost no more than the sampler's own grid, and `grid`: that grid (the paper).
        levels: measured levels (how many, or which); monotone interpolation fills the others. Default all.
        batch_size: completions in one network call.
        shrinkage: `auto` pulls gains that noise explains towards flat, `none` takes them as measured (the paper).
        temperature: τ of the kernel.
        profile: a saved profile to use instead of measuring.
        refresh: measure anew within a stage after so many epochs; default once per stage (the paper).
        drift: measure anew when a check before each rollout says that ΣD has moved by more than this share.
        drift_prompts: prompts of the check, which completes proposals from the noisiest level only.
        measure_after: measure the policy that leaves a stage, too, to report what is left of its D.
    """

    def __init__(
        self,
        proposals: Proposals | None = None,
        num_prompts: int = 96,
        completions: int | list[int] = 1,
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
            raise ValueError(f"refresh must be at least 1 epoch, got {refresh}.")
        if drift is not None and not drift > 0:
            raise ValueError(f"drift must be a positive share, got {drift}.")
        if profile is not None and (refresh or drift):
            raise ValueError(f"refresh and drift measure anew, but the profile {profile!r} is given: leave one out.")
        self.proposals, self.num_prompts = proposals, num_prompts
        self.options = ProfileOptions(completions, order, posterior, steps, levels, batch_size)
        self.shrinkage, self.temperature, self.profile = shrinkage, temperature, profile
        self.refresh, self.drift, self.drift_prompts = refresh, drift, drift_prompts
        self.measure_after = measure_after
        check_ranges(
            {"temperature": temperature, "batch_size": batch_size},
            {"temperature": "(0, inf)", "batch_size": "[1, inf)"},
        )
        self.measured_at = -1  # the rollout before which W was last built
        self.drift_total: float | None = None  # ΣD of the check at that time

    def settings(self) -> dict[str, Any]:
        """What shapes W, for a resume to compare."""
        return {"profiler": describe(self) | describe(self.options)}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know: when W was built, and from which ΣD drift counts."""
        return {"measured_at": self.measured_at, "drift_total": self.drift_total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.measured_at, self.drift_total = state["measured_at"], state["drift_total"]

    def validate_config(self, model: RecastModule, data: PromptDataModule) -> None:
        """Check the sources of the stages that are measured, if there are any, without loading a model.

        Raises:
            ValueError: if a setting is out of range, or proposals, prompts or the saved profile are missing.
        """
        measured = [stage for stage in model.credit.stages if stage.credit != "static"]
        if self.profile is None:
            self.validate_measurement(model, data, dict.fromkeys(name for stage in measured for name in stage.budgets))
            return
        if not measured:
            return
        loaded = Profile.load(self.profile)
        if len(loaded.sigmas) != model.policy.num_steps + 1:
            raise ValueError(
                f"The profile {self.profile!r} has {len(loaded.sigmas) - 1} levels, but policy.num_steps is "
                f"{model.policy.num_steps}."
            )
        for stage in measured:
            loaded.rows(list(stage.budgets))

    def validate_measurement(self, model: RecastModule, data: PromptDataModule, names: Collection[str]) -> None:
        """Check what a profile of some rewards needs; of none, nothing.

        Raises:
            ValueError: as `validate_config`.
        """
        if not names:
            return
        levels, how = torch.linspace(0, 1, model.policy.num_steps + 1), self.options  # only their number matters here
        plan = make_plan(levels, rollouts=how.completions, steps=how.steps, levels=how.levels)
        check_order(how.order, plan.completions)
        if self.num_prompts > len(data.prompts["train"]):
            raise ValueError(
                f"num_prompts is {self.num_prompts}, but there are only {len(data.prompts['train'])} training prompts."
            )
        if self.proposals is None:
            raise ValueError(
                "RenyiProfilerCallback has neither proposals to measure a profile with nor a saved profile."
            )
        self.proposals.validate(data.prompts["train"][: self.num_prompts])
        for name in names:
            if name not in model.rewards:
                raise ValueError(f"There is no reward {name!r} to profile; configured are {', '.join(model.rewards)}.")
            model.rewards[name].check_positive()

    # Hooks ---------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build W where a stage begins, and where it is time to measure anew."""
        assert isinstance(pl_module, RecastModule)
        module, schedule, rollout = pl_module, pl_module.credit, trainer.current_epoch
        index, stage = schedule.stage_index(rollout), schedule.stage(rollout)
        begins = schedule.credit_stage != index
        if not begins and not (stage.credit != "static" and self._is_due(trainer, module)):
            return
        run = run_folder(trainer)
        folder = None if run is None else _folder(run, index, stage)
        if folder is not None and not begins:
            folder = folder / f"rollout-{rollout}"
        profile = None
        if stage.credit != "static":
            names = list(stage.budgets)
            profile = Profile.load(self.profile) if self.profile else self.measure(trainer, module, names)
            if self.profile:
                profile.check(names, module.policy.sigmas)
            if folder is not None and trainer.is_global_zero:
                profile.save(folder / "profile")  # it is dear, so it is kept whatever becomes of W
            credit = self._weigh(stage, profile, folder)
            self.drift_total = self._total_divergence(trainer, module) if self.drift else None
        if begins:
            self._record_after(trainer, module, index - 1, profile)
        if profile is not None:
            schedule.set(credit, rollout, module.policy.num_steps)
        self.measured_at = rollout
        if trainer.is_global_zero:
            self._record(trainer, stage, folder, profile, schedule.current(rollout, module.policy.sigmas))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what the last stage left."""
        assert isinstance(pl_module, RecastModule)
        stages = pl_module.credit.stages
        if trainer.current_epoch == sum(stage.epochs for stage in stages):
            self._record_after(trainer, pl_module, len(stages) - 1, None)

    # What they do --------------------------------------------------------------------------------------------------

    def measure(self, trainer: L.Trainer, module: RecastModule, names: list[str]) -> Profile:
        """Profile the trained policy as it is now; all processes share the work and get the same numbers."""
        run = run_folder(trainer)
        unfinished = run and run.parent / "unfinished"
        return self._measure(trainer, module, names, self.num_prompts, self.options, unfinished)

    def _measure(
        self,
        trainer: L.Trainer,
        module: RecastModule,
        names: list[str],
        num_prompts: int,
        options: ProfileOptions,
        unfinished: Path | None = None,
    ) -> Profile:
        assert self.proposals is not None  # as `validate_measurement` has seen
        profiler = Profiler(module.policy, module.scoring, self.proposals, module.seed)
        prompts, rollout = module.data.prompts["train"][:num_prompts], trainer.current_epoch
        return profiler.measure(names, prompts, options, module.context, rollout=rollout, unfinished=unfinished)

    def _weigh(self, stage: Stage, profile: Profile, folder: Path | None) -> CreditMatrix:
        """W of a stage.

        Raises:
            UserError: if there is none, saying where the profile lies.
        """
        options: Any = {"shrinkage": self.shrinkage, "temperature": self.temperature}
        try:
            return CreditMatrix.from_profile(profile, stage.budgets, stage.credit, **options)
        except ValueError as error:
            kept = "" if folder is None else f" The profile is kept: give {str(folder / 'profile')!r} as profile."
            raise UserError(f"Stage {stage.name!r} has no W: {error}{kept}") from error

    def _is_due(self, trainer: L.Trainer, module: RecastModule) -> bool:
        """Whether W must be built anew within a stage."""
        since = trainer.current_epoch - self.measured_at
        if since < 1:
            return False
        if self.refresh is not None and since >= self.refresh:
            return True
        return self.drift is not None and has_drifted(
            self.drift_total, self._total_divergence(trainer, module), self.drift
        )

    def _total_divergence(self, trainer: L.Trainer, module: RecastModule) -> float:
        """ΣD of the stage's rewards from a few prompts, completed from the noisiest level only."""
        budgets = module.credit.stage(trainer.current_epoch).budgets
        names = [name for name, budget in budgets.items() if budget > 0]
        completions = self.options.completions
        most = completions if isinstance(completions, int) else max(completions)
        options = replace(self.options, completions=most, levels=[module.policy.num_steps])
        check = self._measure(trainer, module, names, self.drift_prompts, options)
        return float(check.totals[0].sum())

    def _record_after(self, trainer: L.Trainer, module: RecastModule, index: int, profile: Profile | None) -> None:
        """Record the D of the policy that leaves stage `index`, from the next stage's profile if that has all its rewards."""
        stage = module.credit.stages[index] if index >= 0 else None
        if not self.measure_after or self.profile or stage is None or stage.credit == "static":
            return
        names = list(stage.budgets)
        after = profile if profile and set(names) <= set(profile.rewards) else self.measure(trainer, module, names)
        run = run_folder(trainer)
        if run is not None and trainer.is_global_zero:
            after.save(_folder(run, index, stage) / "after")

    def _record(
        self, trainer: L.Trainer, stage: Stage, folder: Path | None, profile: Profile | None, credit: CreditMatrix
    ) -> None:
        """Write artefacts and pictures, and log them."""
        step = trainer.global_step
        for logger in trainer.loggers:
            for name, row in zip(credit.rewards, credit.level_weights.tolist(), strict=True):
                levels = {f"credit/{stage.name}/{name}/level_{t}": w for t, w in enumerate(row, 1)}
                logger.log_metrics(levels, step=step)
        if folder is None:
            return
        credit.save(folder / "credit")
        figures = {"weights": report.weight_heatmap(credit)}
        if profile is not None:
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
                    logger.log_image(f"credit/{stage.name}/{name}", [str(path)], step=step)


def has_drifted(before: float | None, now: float, share: float) -> bool:
    """Whether ΣD (nats) has moved by more than a share of what it was; always, where it was never measured."""
    return before is None or abs(now - before) > share * abs(before)


def _folder(run: Path, index: int, stage: Stage) -> Path:
    return run / "stages" / f"{index + 1}-{stage.name}"
