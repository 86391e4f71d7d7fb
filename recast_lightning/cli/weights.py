"""`recast weights`: the credit matrix W of a saved profile for any budgets, and the agreement of two profiles.

No model is loaded. Shape legend: R rewards, T noise levels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from rich.table import Table

    from recast_lightning.credit import Agreement, CreditMatrix, Profile
    from recast_lightning.credit.matrix import Method, Shrinkage

_WIDTH = 100  # columns of a terminal
_WITH_ERRORS = 5  # rewards whose weights fit into it together with their errors


class Weights(NamedTuple):
    """What `weights` built.

    Attributes:
        matrix: W, [R, T].
        profile: What it was built from.
        folder: Where its files are.
    """

    matrix: CreditMatrix
    profile: Profile
    folder: Path


def weights(
    profile: str | Path,
    budgets: dict[str, float] | None = None,
    *,
    method: Method = "recast",
    temperature: float = 1.0,
    shrinkage: Shrinkage = "auto",
    output: str | Path | None = None,
    pictures: bool = True,
) -> Weights:
    """Builds W from a saved profile and writes it with its pictures.

    The folder gets credit.safetensors (exact), credit.json (to read), weights.png, normalized_gains.png and
    gain_curves.png; files of these names are replaced.

    Args:
        profile: File of `Profile.save`, with or without its suffix.
        budgets: Name of each reward to its budget; rewards of the profile that are not named are left out. Default 1 for
            every reward.
        method: ``recast``, ``static`` or ``unprojected``, see `CreditMatrix`.
        temperature: tau > 0; large is static.
        shrinkage: ``auto`` pulls noisy gains to flat, ``none`` takes them as measured.
        output: Folder to write to; default ``<profile>-weights`` beside the profile.
        pictures: Whether to draw them at once; `draw_pictures` does it later.

    Raises:
        FileNotFoundError: If there is no such profile.
        ValueError: If the file is damaged, something else or of another version, or an option is out of range.
        OSError: If the folder cannot be written.
    """
    from recast_lightning.credit import CreditMatrix, Profile

    measured = Profile.load(profile)
    budgets = dict.fromkeys(measured.rewards, 1.0) if budgets is None else budgets
    matrix = CreditMatrix.from_profile(measured, budgets, method, shrinkage=shrinkage, temperature=temperature)
    if output is None:
        stem = Path(profile).with_suffix("") if Path(profile).suffix in (".safetensors", ".json") else Path(profile)
        output = stem.with_name(f"{stem.name}-weights")
    matrix.save(Path(output) / "credit")
    built = Weights(matrix, measured, Path(output))
    if pictures:
        draw_pictures(built)
    return built


def draw_pictures(built: Weights) -> None:
    """Draw W, the gains and the curves they are from into the folder."""
    from recast_lightning.report import gain_curves, normalized_gains, save_figure, weight_heatmap

    matrix, profile, folder = built
    save_figure(weight_heatmap(matrix), folder / "weights.png")
    save_figure(normalized_gains(matrix), folder / "normalized_gains.png")
    save_figure(gain_curves(profile), folder / "gain_curves.png")


def compare(a: str | Path, b: str | Path, *, output: str | Path | None = None) -> dict[str, Agreement]:
    """Agreement of two saved profiles on each reward that both measured, see `compare_profiles`.

    Args:
        a: File of `Profile.save`, with or without its suffix.
        b: Another.
        output: Folder for compare.json, if wanted; a correlation that does not exist is null there.

    Raises:
        FileNotFoundError: If one is not there.
        ValueError: If one is damaged, something else or of another version, or the two share no reward or no levels.
        OSError: If the folder cannot be written.
    """
    from recast_lightning.credit import Profile, compare_profiles

    agreements = compare_profiles(Profile.load(a), Profile.load(b))
    if output is not None:
        rewards = {name: asdict(agreement) for name, agreement in agreements.items()}
        for row in rewards.values():
            row["correlation"] = row["correlation"] if math.isfinite(row["correlation"]) else None
        text = json.dumps({"a": str(a), "b": str(b), "rewards": rewards}, indent=1, allow_nan=False)
        Path(output).mkdir(parents=True, exist_ok=True)
        (Path(output) / "compare.json").write_text(text + "\n", encoding="utf-8")
    return agreements


def weights_table(matrix: CreditMatrix) -> Table:
    """T W as a table: levels down, rewards across, with their standard errors where known and room.

    The last column is the sum of a level, which is 1 but for ``unprojected``; the last row is the mean of a reward,
    which is its share of the budgets.

    Args:
        matrix: W, [R, T].
    """
    from rich.table import Table
    from rich.text import Text

    values, errors = matrix.level_weights, matrix.weights_stderr
    num_levels = values.shape[1]
    shown = None
    if errors is not None and errors.any() and len(values) <= _WITH_ERRORS:
        shown = (errors * num_levels).T.tolist()
    digits = 2 if shown else 3
    table = Table(show_footer=True)
    table.add_column("level", "share", justify="right")
    for name, share in zip(matrix.rewards, values.mean(1).tolist(), strict=True):
        table.add_column(Text(name), f"{share:.3f}", justify="right", overflow="fold")
    table.add_column("sum", "1", justify="right")
    for t, level in enumerate(values.T.tolist()):
        cells = [f"{weight:.{digits}f}" for weight in level]
        if shown:
            cells = [f"{cell} ± {error:.2f}" for cell, error in zip(cells, shown[t], strict=True)]
        table.add_row(str(t + 1), *cells, f"{sum(level):.{digits}f}")
    return table


def agreement_table(agreements: dict[str, Agreement]) -> Table:
    """One row a reward: correlation of the gains, D_0 - D_T of both, who is flat, and how much budget moves.

    Args:
        agreements: What `compare` returned.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in (
        "reward",
        "correlation\nof gains",
        "D_0 - D_T\nof A",
        "D_0 - D_T\nof B",
        "flat in",
        "budget\nmoved",
    ):
        left = heading in ("reward", "flat in")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for name, agreement in agreements.items():
        correlation = f"{agreement.correlation:.3f}" if math.isfinite(agreement.correlation) else "none"
        flat = {(True, True): "both", (True, False): "A", (False, True): "B"}.get(agreement.flat, "neither")
        totals = (f"{total:.3f}" for total in agreement.totals)
        table.add_row(Text(name), correlation, *totals, flat, f"{agreement.moved:.1%}")
    return table


def parse_budgets(arguments: Sequence[str]) -> dict[str, float]:
    """``["ocr=2", "clip=1"]`` as ``{"ocr": 2.0, "clip": 1.0}``.

    Raises:
        ValueError: If one is not NAME=NUMBER, or a name comes twice.
    """
    budgets: dict[str, float] = {}
    for argument in arguments:
        name, _, number = argument.rpartition("=")
        if not name:
            raise ValueError(f"A budget is written NAME=NUMBER, as in ocr=2, got {argument!r}.")
        if name in budgets:
            raise ValueError(f"The reward {name!r} has two budgets: give it one.")
        try:
            budgets[name] = float(number)
        except ValueError:
            raise ValueError(f"The budget of {name!r} must be a number, got {number!r}.") from None
    return budgets


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "recast weights PROFILE [options]\n       recast weights --compare A B [--output FOLDER]"
    parser.description = "Build the credit matrix W of a saved profile for any budgets; no model is loaded."
    parser.epilog = "Example: recast weights runs/demo/stages/1-all/profile --budgets ocr=2 clip=1"
    # fmt: off
    parser.add_argument("profile", metavar="PROFILE", nargs="?", help="saved profile, with or without its suffix")
    parser.add_argument("--budgets", nargs="+", metavar="NAME=NUMBER",
                        help="rewards that count, and how much; the others are left out (default: all, 1 each)")
    parser.add_argument("--method", choices=("recast", "static", "unprojected"),
                        help="recast: W keeps budgets and levels (default); static: the same at all levels; "
                        "unprojected: W keeps budgets only")
    parser.add_argument("--temperature", type=float, help="large is static, small is sharp (default: 1)")
    parser.add_argument("--shrinkage", choices=("auto", "none"),
                        help="auto: noisy gains are pulled to flat (default); none: they count as measured")
    parser.add_argument("--output", metavar="FOLDER", help="for the files (default: PROFILE-weights, beside the profile)")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"),
                        help="show whether two profiles say the same; with --output, write compare.json, too")
    # fmt: on


def run(options: Namespace) -> None:
    """Build and print W, or a comparison.

    Raises:
        ValueError: If options do not go together.
    """
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if value is not None}
    if "budgets" in given:
        given["budgets"] = parse_budgets(given["budgets"])
    if ("profile" in given) == ("compare" in given):
        raise ValueError("Give either a PROFILE or --compare with two of them (see recast weights --help).")
    if "compare" in given:
        unfit = [name for name in given if name not in ("compare", "output")]
        if unfit:
            raise ValueError(f"--{unfit[0]} does not go with --compare, which takes equal budgets and the defaults.")
        _print_comparison(given["compare"], given.get("output"))
        return
    built = weights(**given, pictures=False)
    _print_weights(built)  # the pictures take longer than W
    draw_pictures(built)
    print(built.folder)


def _print_weights(built: Weights) -> None:
    matrix, profile = built.matrix, built.profile
    print(f"T W, the weight of each reward at each noise level ({matrix.method}, temperature {matrix.temperature:g})")
    flat = profile.flat
    flat = [name for name in matrix.rewards if name in flat]
    verdict = f"Cannot be told from flat: {', '.join(flat)}." if flat else "Every reward can be told from flat."
    if len(profile.replicates) < 2:
        verdict = "The profile is of one prompt, so its errors are unknown: no reward can be told from flat."
    rows, columns = matrix.residuals
    columns *= matrix.weights.shape[1]
    margins = f"Largest error of a share {rows:.0e}, of the sum of a level {columns:.0e}."
    _print(weights_table(matrix), verdict, margins)


def _print_comparison(profiles: list[str], output: str | None) -> None:
    a, b = profiles
    _print(agreement_table(compare(a, b, output=output)), f"A: {a}", f"B: {b}")
    if output is not None:
        print(Path(output) / "compare.json")


def _print(table: Table, *lines: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
