"""LightningCLI with this project's model, data and callbacks, and errors of one sentence."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from recast_lightning import callbacks, proposals, rewards  # noqa: F401 (makes their short names known to the parser)
from recast_lightning.callbacks import ImageWriter, RenyiProfilerCallback, RunReport
from recast_lightning.checkpointing import records
from recast_lightning.checkpointing.compatibility import check_checkpoint
from recast_lightning.cli.exits import configuring, fail, running
from recast_lightning.cli.parser import SentenceParser
from recast_lightning.cli.sentences import explained, groups_of
from recast_lightning.cli.trainer import RecastTrainer, budgeted
from recast_lightning.cli.trainer_checks import check_run, check_trainer
from recast_lightning.errors import RunWarning
from recast_lightning.paths import expand_home
from recast_lightning.report import summary_table
from recast_lightning.report.record import read_run
from recast_lightning.training import PromptDataModule, RecastModule
from recast_lightning.training.strategies import check_strategy, check_strategy_name
from recast_lightning.training.trainer import run_folder

_C = TypeVar("_C")
SECTIONS: dict[str, Any] = {
    "model": RecastModule, "data": PromptDataModule, "trainer": L.Trainer, "ckpt_path": None, "seed_everything": None,
}  # fmt: skip
UNHELPFUL = (  # warnings of libraries about what is meant to be so
    "does not have many workers",
    "in eval mode at the start",
    "index_reduce",
    "all_gather is deprecated",
    "LeafSpec",
    "Already found a `peft_config`",
    "has `__len__` defined",
    "overridden `transfer_batch_to_device`",
    "The dirpath has changed",
    "infer the batch indices",
    "Previous log files in this directory",
)


def run(args: list[str] | None) -> None:
    """Parse and run a command that needs a Trainer; the last line of a fit is the path of its report."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    sort_warnings()
    with running():
        RecastCLI(
            RecastModule,
            PromptDataModule,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=False,
            trainer_class=RecastTrainer,
            trainer_defaults={"callbacks": [], "use_distributed_sampler": False, "enable_model_summary": False},
            auto_configure_optimizers=False,
            args=args,
        )


def sort_warnings() -> None:
    """Drop the warnings that help nobody, and let those of a run be warnings, whatever the filters before say."""
    for text in UNHELPFUL:
        warnings.filterwarnings("ignore", f".*{text}.*")
    warnings.filterwarnings("always", category=RunWarning)


class RecastParser(SentenceParser, LightningArgumentParser):
    """Lightning's parser with errors of one sentence."""

    sections = SECTIONS


class SaveRunConfig(SaveConfigCallback):
    """Keeps config.yaml in the run folder, and nowhere where there is none."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write it, if there is a logger whose folder it belongs to, and which W&B run belongs to it."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)
            folder = run_folder(trainer)  # asked for by every process
            for logger in trainer.loggers:
                if folder and trainer.is_global_zero and isinstance(logger, WandbLogger) and logger.version:
                    records.note_wandb_run(folder, logger.version)


class RecastCLI(LightningCLI):
    """`recast fit | validate | test | predict | profile | doctor`."""

    model: RecastModule
    datamodule: PromptDataModule
    resumed_run: Path | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, `profile` and `doctor`."""
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in ("profile", "doctor")}}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Use `RecastParser`."""
        kwargs.setdefault("dump_header", None)
        parser = RecastParser(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="Path of a YAML file with any of the options.")
        return parser

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Give `fit` an option of its own."""
        parser: LightningArgumentParser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument(
                "--accept-changes",
                action="store_true",
                help="Resume with other rewards, prompts or evaluation settings; the record of evaluations starts anew.",
            )
        return parser

    def before_instantiate_classes(self) -> None:
        """`max_epochs` follows from the stages unless it is given; `--ckpt_path last` from the runs that are there."""
        config = expand_home(self.config[self.subcommand] if self.subcommand else self.config)
        if config.get("ckpt_path") == "last":
            self._find_last(config)
        for name, value in vars(config.model).items():
            if name in groups_of(RecastModule) and not isinstance(value, Namespace):
                fail(f"model.{name}: expected a mapping of options, got {value!r}.")
        strategy = config.trainer.strategy
        with configuring():
            check_strategy_name(strategy if isinstance(strategy, str) else strategy.class_path)
            check_trainer(config.trainer)
        total = sum(stage["epochs"] for stage in config.model.stages)
        if config.trainer.max_epochs is None:
            config.trainer.max_epochs = total
        elif config.trainer.max_epochs > total:
            fail(
                f"trainer.max_epochs is {config.trainer.max_epochs}, but the stages have only {total} rollouts together."
            )
        elif config.trainer.max_epochs < 1:
            fail(
                f"trainer.max_epochs must be 1 to {total}, the rollouts of the stages, got {config.trainer.max_epochs}."
            )

    def _find_last(self, config: Any) -> None:
        """Take the newest `last.ckpt` of this configuration's runs, and let `fit` go on in its folder; else start afresh."""
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        first = loggers[0].get("init_args") if hasattr(loggers[0], "get") else None
        if first is None or "save_dir" not in first:
            fail("ckpt_path is 'last', but there is no logger whose folder holds runs: give the path of a checkpoint.")
        folder = Path(first.save_dir) / (first.get("name") or "lightning_logs")
        config.ckpt_path = None
        if (found := records.newest_checkpoint(folder)) is None:
            if self.subcommand != "fit":
                fail(f"ckpt_path is 'last', but no run in {str(folder)!r} has a checkpoint yet.")
            rank_zero_only(print)(f"No run in {folder} has a checkpoint yet: starting afresh.")
            return
        config.ckpt_path = str(found)
        if self.subcommand == "fit":
            run = found.parents[1]
            first.version = int(run.name.removeprefix("version_"))
            for logger in loggers[1:]:
                if "id" in logger.init_args:  # W&B's
                    logger.init_args.id = logger.init_args.id or records.wandb_run(run)
            self.resumed_run = run

    def instantiate_classes(self) -> None:
        """Build everything (nothing is loaded yet), then check it."""
        try:
            super().instantiate_classes()
        except (ValueError, FileNotFoundError, MisconfigurationException, ModuleNotFoundError) as error:
            fail(explained(str(error), SECTIONS))

        with configuring():
            self._check()
        if self.resumed_run is not None:
            rank_zero_only(records.set_metrics_aside)(self.resumed_run)

    def _check(self) -> None:
        """Check what was built, all parts together; `doctor` finds all faults, not the first."""
        config: Any = self.config[self.subcommand] if self.subcommand else {}
        checkpoint = config.get("ckpt_path")
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise ValueError(f"ckpt_path {checkpoint!r} does not exist: give a run's checkpoints/last.ckpt.")
        if checkpoint is not None:
            check_checkpoint(checkpoint, self.model.policy, training=self.subcommand == "fit")
        if self.subcommand == "doctor":
            return
        self.model.accept_changes = bool(config.get("accept_changes"))
        check_strategy(self.trainer, self.model.policy)
        self.model.validate_config(self.datamodule, self.trainer.world_size)
        items = self.model.items_per_rollout(self.datamodule, self.trainer.world_size)
        check_run(self.trainer, items if self.subcommand == "fit" else 0)
        profilers = self._callbacks(RenyiProfilerCallback)
        if self.subcommand == "profile" and profilers:
            named = config.rewards or budgeted(self.model)
            profilers[0].validate_measurement(self.model, self.datamodule, named)
        for profiler in profilers if self.subcommand == "fit" else ():
            profiler.validate_config(self.model, self.datamodule)
        waiting = [stage.name for stage in self.model.credit.stages if stage.credit != "static"]
        if self.subcommand == "fit" and waiting and not profilers:
            raise ValueError(f"Stage {waiting[0]!r} needs a profile: add RenyiProfilerCallback to trainer.callbacks.")

    def _callbacks(self, kind: type[_C]) -> list[_C]:
        """The Trainer's callbacks of one kind."""
        return [c for c in self.trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user gave it: a checkpoint does not override it."""

    def after_fit(self) -> None:
        """Close W&B quietly, show what changed, and name the report."""
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()
        reports = [c.report for c in self._callbacks(RunReport) if c.report]
        if self.trainer.is_global_zero and reports:
            Console().print(summary_table(read_run(reports[0].parent).evaluations))
            print(f"Report: {reports[0]}")

    def after_predict(self) -> None:
        """Say where the pictures are."""
        folders = [c.folder for c in self._callbacks(ImageWriter)]
        if self.trainer.is_global_zero and folders:
            print(f"Pictures: {folders[0]}")
