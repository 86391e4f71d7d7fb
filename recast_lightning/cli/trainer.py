"""`recast profile` and `recast doctor`: measure or check a configuration without training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, IterableDataset

from recast_lightning import report
from recast_lightning.callbacks.renyi_profiler import RenyiProfilerCallback
from recast_lightning.cli.doctor import check_configuration, findings_table
from recast_lightning.credit import Profile
from recast_lightning.errors import UserError
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.module import RecastModule
from recast_lightning.training.trainer import ShowsTasks, run_folder


class RecastTrainer(L.Trainer):
    """A Trainer that can also profile, and check what it would run."""

    def profile(
        self,
        model: RecastModule,
        datamodule: PromptDataModule,
        ckpt_path: str | None = None,
        rewards: list[str] | None = None,
        output: str | None = None,
    ) -> None:
        """Measure a profile of the policy with the RenyiProfilerCallback of the configuration, and do nothing else.

        Args:
            model: policy and rewards.
            datamodule: prompts.
            ckpt_path: checkpoint of the policy; default the base.
            rewards: what to measure; default every reward with a budget in some stage.
            output: folder for profile.safetensors, profile.json and the pictures; default `profile` in the run folder.
        """
        measuring = MeasureOnce(self.profiler_callback(), rewards or budgeted(model), output)
        self.callbacks: list[L.Callback] = [measuring, *(c for c in self.callbacks if isinstance(c, ShowsTasks))]
        datamodule.predict_dataloader = lambda: DataLoader(_Nothing())  # type: ignore[method-assign]
        self.predict(model, datamodule=datamodule, ckpt_path=ckpt_path, return_predictions=False)

    def doctor(self, model: RecastModule, datamodule: PromptDataModule, load: bool = True) -> None:
        """Check every configured part (devices, policy, prompts, rewards, proposals, loggers) and leave with 1 if one fails.

        Args:
            model: policy and rewards.
            datamodule: prompts.
            load: also load policy and rewards, and score a bundled picture with each.
        """

        def proposals() -> str:
            profiler = self.profiler_callback()
            profiler.validate_config(model, datamodule)
            return f"{type(profiler.proposals).__name__} for {profiler.num_prompts} prompts"

        measured = any(stage.credit != "static" for stage in model.credit.stages)
        findings = check_configuration(
            self, model, datamodule, load=load, checks={"proposals": proposals} if measured else {}
        )
        Console(highlight=False, width=100).print(findings_table(findings))
        if any(finding.verdict == "FAILED" for finding in findings):
            raise SystemExit(1)

    def profiler_callback(self) -> RenyiProfilerCallback:
        """The configured profiler.

        Raises:
            UserError: if there is none.
        """
        for callback in self.callbacks:
            if isinstance(callback, RenyiProfilerCallback):
                return callback
        raise UserError("There is nothing to profile with: add RenyiProfilerCallback to trainer.callbacks.")


class MeasureOnce(L.Callback):
    """Measures when the policy is in its place, prints the result and writes it down."""

    def __init__(self, profiler: RenyiProfilerCallback, rewards: list[str], output: str | None) -> None:
        self.profiler, self.rewards, self.output = profiler, rewards, output

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See the class."""
        assert isinstance(pl_module, RecastModule)
        profile = self.profiler.measure(trainer, pl_module, self.rewards)
        run = run_folder(trainer)
        folder = Path(self.output) if self.output else (run or Path(".")) / "profile"
        if trainer.is_global_zero:
            path = write_profile(profile, folder)
            Console(highlight=False).print(profile_table(profile))
            print(f"Profile: {path}")


def budgeted(model: RecastModule) -> list[str]:
    """Rewards with a budget in some stage, in the order of the configuration."""
    return [name for name in model.rewards if any(stage.budgets.get(name, 0) > 0 for stage in model.credit.stages)]


def write_profile(profile: Profile, folder: Path) -> Path:
    """Saves a profile and its pictures in a folder; returns the path of the profile."""
    report.save_figure(report.gain_curves(profile), folder / "gain_curves.png")
    report.save_figure(report.demand(profile), folder / "demand.png")
    return profile.save(folder / "profile")


def profile_table(profile: Profile) -> Table:
    """What was measured of each reward."""
    table = Table(title=f"{profile.num_prompts} prompts, {profile.network_calls:,} network calls")
    for title in ("reward", "D_0 − D_T (nats)", "peak level", "curve", "proposals", "policy", "failed"):
        table.add_column(title, justify="left" if title == "reward" else "right")
    totals, errors = profile.totals
    flat, quality = profile.flat, profile.proposal_quality
    for i, name in enumerate(profile.rewards):
        good, own = quality[name]
        peak = int(profile.monotone_gains[i].argmax()) + 1
        table.add_row(
            name, f"{totals[i]:.3f} ± {errors[i]:.3f}", "–" if name in flat else str(peak),
            "flat" if name in flat else "shaped", f"{good:.3f}", f"{own:.3f}", str(profile.failed[name]),
        )  # fmt: skip
    return table


class _Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())
