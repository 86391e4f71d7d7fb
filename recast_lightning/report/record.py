"""What a run folder holds; whatever is missing or damaged is left out and named in ``absent``."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recast_lightning.credit import CreditMatrix, Profile

_T = TypeVar("_T")


@dataclass(frozen=True)
class StageRecord:
    """One stage: how its W came about.

    Attributes:
        number: Place in the run, from 1.
        name: As configured.
        profile: The measurement; a static stage has none.
        credit: W.
    """

    number: int
    name: str
    profile: Profile | None
    credit: CreditMatrix | None


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read.

    Attributes:
        name: Of the folder.
        evaluations: Lines of evaluation.jsonl by rollout, from the base policy on.
        rollouts: Lines of rollouts.jsonl by rollout, counted from 1.
        stages: In order of training, as far as the run came.
        prompts: Texts of the pictures.
        images: Rollouts done -> folder of pictures, ascending.
        config: Text of config.yaml, empty if there is none.
        absent: One sentence for each thing that is missing or damaged.
    """

    name: str
    evaluations: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    stages: list[StageRecord]
    prompts: list[str]
    images: dict[int, Path]
    config: str
    absent: list[str]

    @property
    def num_rollouts(self) -> int:
        """Rollouts done."""
        return max((line["rollout"] for line in self.rollouts + self.evaluations), default=0)

    @property
    def stage_starts(self) -> dict[str, int]:
        """Stage -> rollouts done before it; empty without rollouts.jsonl."""
        starts: dict[str, int] = {}
        for line in self.rollouts:
            starts.setdefault(line.get("stage", ""), line["rollout"] - 1)
        return starts

    @property
    def stage_names(self) -> list[str]:
        """Every stage of which there is a trace, in order."""
        traces = [line.get("stage", "") for line in self.rollouts + self.evaluations]
        traces += [stage.name for stage in self.stages]
        return [name for name in dict.fromkeys(traces) if name]

    @property
    def unmeasured(self) -> list[str]:
        """A sentence for each stage without a folder."""
        missing = [name for name in self.stage_names if name not in [stage.name for stage in self.stages]]
        return [f"Stage {name} left no measurement (a static stage needs none)." for name in missing]


def read_run(run: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"There is no run folder at {run}: give the folder that `recast fit` wrote.")
    absent: list[str] = []
    images = {_leading(path.name.removeprefix("rollout-")): path for path in (run / "images").glob("rollout-*")}
    return RunRecord(
        name=run.resolve().name,
        evaluations=_lines(run / "evaluation.jsonl", absent),
        rollouts=_lines(run / "rollouts.jsonl", absent),
        stages=_stages(run / "stages", absent),
        prompts=_tried(_prompts, run / "images" / "prompts.json", absent) or [],
        images=dict(sorted(images.items())),
        config=_tried(_text, run / "config.yaml", absent) or "",
        absent=absent,
    )


def _stages(folder: Path, absent: list[str]) -> list[StageRecord]:
    stages = []
    for path in sorted(folder.glob("*-*"), key=lambda path: _leading(path.name)):
        credit = _tried(CreditMatrix.load, path / "credit.safetensors", absent)
        measured = credit is None or credit.method != "static" or (path / "profile.safetensors").exists()
        profile = _tried(Profile.load, path / "profile.safetensors", absent) if measured else None
        stages.append(StageRecord(_leading(path.name), path.name.partition("-")[2], profile, credit))
    return stages


def _lines(path: Path, absent: list[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file by rollout; of a rollout that was done twice (a resumed run), the last."""
    found, damaged = {}, 0
    for line in (_tried(_text, path, absent) or "").splitlines():
        try:
            row = json.loads(line)
            found[row["rollout"]] = {"metrics": {}, **row}
        except (ValueError, TypeError, KeyError):  # cut off in the middle of a write
            damaged += 1
    if damaged:
        absent.append(f"{path.name} has {damaged} unreadable line(s), which are left out.")
    return [found[rollout] for rollout in sorted(found)]


def _tried(read: Callable[[Path], _T], path: Path, absent: list[str]) -> _T | None:
    """What ``read`` makes of a file, or None and a note."""
    where = f"{path.parent.name}/{path.name}"
    try:
        return read(path)
    except FileNotFoundError:
        absent.append(f"There is no {where}.")
    except (OSError, ValueError) as error:
        absent.append(f"{where} could not be read ({error}).")
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _prompts(path: Path) -> list[str]:
    return [str(prompt) for prompt in json.loads(_text(path))]


def _leading(name: str) -> int:
    """The number before the first dash, or -1."""
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1
