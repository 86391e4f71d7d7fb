"""Static against ReCAST on Signboard at matched seeds; prints the paired table of docs/results.md.

    python benchmarks/seeds.py --seeds 0 1 2 --runs runs/seeds [--jobs 2]

A run that has its report is not run again.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
OVERLAYS = {"static": ["configs/signboard/static.yaml"], "recast": []}


def run(method: str, seed: int, runs: Path) -> Path:
    """One `recast fit`; its folder."""
    name = f"{method}-{seed}"
    finished = sorted((runs / name).glob("version_*/report.html"))
    if finished:
        return finished[-1].parent
    configs = [argument for file in ["configs/signboard/full.yaml", *OVERLAYS[method]] for argument in ("-c", file)]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(runs), "name": name}}
    command = [sys.executable, "-m", "recast_lightning", "fit", *configs, "--model.seed", str(seed)]
    command += ["--trainer.logger", json.dumps([logger])]
    with (runs / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    return sorted((runs / name).glob("version_*/report.html"))[-1].parent


def evaluations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/seeds")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    runs = options.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    todo = [(method, seed) for seed in options.seeds for method in OVERLAYS]
    with ThreadPoolExecutor(options.jobs) as pool:
        folders = dict(zip(todo, pool.map(lambda job: run(*job, runs), todo), strict=True))

    first = evaluations(folders[todo[0]])[0]["metrics"]
    columns = ["aggregate", *first]
    print("| | seed | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))

    def row(label: str, seed: object, values: dict[str, float], sign: str = "") -> None:
        cells = [values.get("aggregate", sum(values.values())), *(values[name] for name in first)]
        print(f"| {label} | {seed} | " + " | ".join(f"{cell:{sign}.3f}" for cell in cells) + " |")

    row("base", "", first)
    differences = []
    for seed in options.seeds:
        final = {method: evaluations(folders[method, seed])[-1]["metrics"] for method in OVERLAYS}
        for method, values in final.items():
            row(method, seed, values)
        differences.append({name: final["recast"][name] - final["static"][name] for name in first})
        row("recast − static", seed, differences[-1], "+")
    for difference in differences:
        difference["aggregate"] = sum(difference.values())
    mean = {name: statistics.mean(d[name] for d in differences) for name in differences[0]}
    row("**mean difference**", "", mean, "+")
    if len(differences) > 1:
        errors = {name: statistics.stdev(d[name] for d in differences) / math.sqrt(len(differences)) for name in mean}
        row("its standard error over seeds", "", errors)


if __name__ == "__main__":
    main()
