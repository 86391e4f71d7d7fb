"""Reads a run folder; whatever is missing or damaged is left out and named in `RunRecord.absent`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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
        after: Profile of the policy that left the stage, if it was taken.
        refreshes: Rollouts done -> profile and W of a refresh made before the next one, ascending.
    """

    number: int
    name: str
    profile: Profile | None
    credit: CreditMatrix | None
    after: Profile | None = None
    refreshes: dict[int, tuple[Profile | None, CreditMatrix | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read.

    Attributes:
        name: Name of the folder.
        evaluations: Lines of evaluation.jsonl in the order of rollouts, from the base policy on.
        rollouts: Lines of rollouts.jsonl in order, counted from 1.
        stages: In order of training, as far as the run came.
        prompts: Text of each picture in a folder of ``images``.
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
    reader = _Reader(run)
    images = {_leading_number(path.name.removeprefix("rollout-")): path for path in (run / "images").glob("rollout-*")}
    return RunRecord(
        name=run.resolve().name,
        evaluations=_jsonl(reader, run / "evaluation.jsonl"),
        rollouts=_jsonl(reader, run / "rollouts.jsonl"),
        stages=[_stage(reader, path) for path in _numbered_folders(run / "stages", "*-*")],
        prompts=reader.read(_read_prompts, run / "images" / "prompts.json") or [],
        images=dict(sorted(images.items())),
        config=reader.read(_read_text, run / "config.yaml") or "",
        absent=reader.absent,
    )


@dataclass
class _Reader:
    """Reads files of a run and notes what it cannot read."""

    run: Path
    absent: list[str] = field(default_factory=list)

    def read(self, read: Callable[[Path], _T], path: Path, *, optional: bool = False) -> _T | None:
        """What ``read`` makes of a file, or None and a note; an optional file may be missing without one."""
        where = path.relative_to(self.run).as_posix()
        try:
            return read(path)
        except FileNotFoundError:
            if not optional:
                self.absent.append(f"There is no {where}.")
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.absent.append(f"{where} could not be read ({error}).")
        return None


def _stage(reader: _Reader, folder: Path) -> StageRecord:
    """Reads a folder ``stages/<n>-<name>`` with the profiles and weights of its refreshes."""
    credit = reader.read(CreditMatrix.load, folder / "credit.safetensors")
    unmeasured = credit is not None and credit.method == "static"
    refreshes = {}
    for path in _numbered_folders(folder, "rollout-*"):
        again = reader.read(Profile.load, path / "profile.safetensors", optional=True)
        anew = reader.read(CreditMatrix.load, path / "credit.safetensors", optional=True)
        if again is not None or anew is not None:
            refreshes[_leading_number(path.name.removeprefix("rollout-"))] = (again, anew)
    return StageRecord(
        number=_leading_number(folder.name),
        name=folder.name.partition("-")[2],
        profile=reader.read(Profile.load, folder / "profile.safetensors", optional=unmeasured),
        credit=credit,
        after=reader.read(Profile.load, folder / "after.safetensors", optional=True),
        refreshes=refreshes,
    )


def _numbered_folders(folder: Path, pattern: str) -> list[Path]:
    """Folders ``<n>-...`` or ``rollout-<n>`` in the order of n; a folder without a number is none of the run's."""
    found = {
        path: _leading_number(path.name.removeprefix("rollout-")) for path in folder.glob(pattern) if path.is_dir()
    }
    return sorted((path for path, number in found.items() if number >= 0), key=lambda path: (found[path], path.name))


def _jsonl(reader: _Reader, path: Path) -> list[dict[str, Any]]:
    """Lines of a .jsonl file in the order of rollouts; of a rollout done twice (a resumed run), the last."""
    found, damaged = {}, 0
    for line in (reader.read(_read_text, path) or "").splitlines():
        try:
            row = json.loads(line)
            found[row["rollout"]] = {"metrics": {}, **row}
        except (ValueError, TypeError, KeyError):  # cut off in the middle of a write
            damaged += 1
    if damaged:
        reader.absent.append(f"{path.name} has {damaged} unreadable line(s), which are left out.")
    return [found[rollout] for rollout in sorted(found)]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_prompts(path: Path) -> list[str]:
    return [str(prompt) for prompt in json.loads(_read_text(path))]


def _leading_number(name: str) -> int:
    """The number before the first dash, or -1."""
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1
