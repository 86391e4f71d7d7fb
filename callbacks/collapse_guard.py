"""Watches a run for the ways in which reinforcement learning ruins a policy."""

from __future__ import annotations

import math
from statistics import mean, variance
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from recast_lightning.errors import RunWarning, UserError
from recast_lightning.training import RecastModule


class CollapseGuard(L.Callback):
    """Warns once of each sign of collapse, or stops the run: rewards fall, images become alike, the policy runs away.

    It looks at each rollout before it is trained on.

    Args:
        action: `warn`, or `stop` the run at the first sign.
        window: rollouts that are averaged; the newest are compared with the first of the stage.
        errors: standard errors by which every reward with a budget must have fallen.
        min_image_std: smallest `rollout/image_std`, as a share of the first rollout's.
        max_deviation: largest `rollout/deviation`, the squared distance to the reference's velocity relative to its size.
    """

    def __init__(
        self,
        action: Literal["warn", "stop"] = "warn",
        window: int = 5,
        errors: float = 3.0,
        min_image_std: float = 0.3,
        max_deviation: float = 0.5,
    ) -> None:
        if action not in ("warn", "stop"):
            raise ValueError(f"action must be 'warn' or 'stop', got {action!r}.")
        if window < 2:
            raise ValueError(f"window must be at least 2 rollouts, got {window}: errors are estimated within it.")
        if not errors > 0:
            raise ValueError(f"errors must be above 0, got {errors}.")
        if not 0 <= min_image_std < 1:
            raise ValueError(f"min_image_std must be in [0, 1), got {min_image_std}.")
        if not max_deviation > 0:
            raise ValueError(f"max_deviation must be above 0, got {max_deviation}.")
        self.action, self.window, self.errors = action, window, errors
        self.min_image_std, self.max_deviation = min_image_std, max_deviation
        self.rollout = self.stage = -1.0
        self.first_image_std = math.nan
        self.means: dict[str, list[float]] = {}  # of this stage's rewards, one a rollout
        self.said: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on watching."""
        names = ("rollout", "stage", "first_image_std", "means", "said")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        vars(self).update(state)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at a new rollout; its numbers are the same on all processes, so all do the same."""
        assert isinstance(pl_module, RecastModule)
        metrics = pl_module.run_state.metrics
        if metrics["rollout"] <= self.rollout:
            return
        self.rollout = metrics["rollout"]
        if metrics["stage"] != self.stage:
            self.stage = metrics["stage"]
            self.means = {
                name: [] for name, budget in pl_module.credit.stages[int(self.stage)].budgets.items() if budget
            }
        for name, values in self.means.items():
            values.append(metrics[f"reward/{name}/mean"])
        if math.isnan(self.first_image_std):
            self.first_image_std = metrics["rollout/image_std"]
        self._judge(metrics)

    def _judge(self, metrics: dict[str, float]) -> None:
        if all(self._fell(values) for values in self.means.values()):
            falls = ", ".join(
                f"{name} {mean(values[: self.window]):.3g} → {mean(values[-self.window :]):.3g}"
                for name, values in self.means.items()
            )
            self._say(
                "rewards",
                f"all rewards of the stage have fallen by more than {self.errors:g} standard errors ({falls}, means of "
                f"{self.window} rollouts): a smaller learning_rate or a larger kl_weight",
            )
        spread = metrics["rollout/image_std"]
        if spread < self.min_image_std * self.first_image_std:
            self._say(
                "images",
                f"the images of a prompt have become alike (rollout/image_std {self.first_image_std:.3g} → {spread:.3g}, "
                f"below min_image_std {self.min_image_std:g} of the first): a larger kl_weight or fewer rollouts",
            )
        if metrics["rollout/deviation"] > self.max_deviation:
            self._say(
                "deviation",
                f"the policy has left its reference (rollout/deviation {metrics['rollout/deviation']:.3g}, above "
                f"max_deviation {self.max_deviation:g}): a larger kl_weight or a smaller learning_rate",
            )

    def _fell(self, values: list[float]) -> bool:
        """Whether the last window is below the first by more than chance; false as long as they overlap."""
        first, last = values[: self.window], values[-self.window :]
        if len(values) < 2 * self.window:
            return False
        error = math.sqrt((variance(first) + variance(last)) / self.window)
        return mean(first) - mean(last) > self.errors * error

    def _say(self, sign: str, what: str) -> None:
        sentence = f"Collapse in rollout {self.rollout:.0f}: {what} may help"
        if self.action == "stop":
            raise UserError(f"{sentence}; this rollout was not trained on.")
        if sign not in self.said:
            self.said.append(sign)
            rank_zero_warn(f"{sentence} (said once).", category=RunWarning)
