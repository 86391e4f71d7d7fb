"""Two run folders hold the same run, to the bit."""

import csv
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TIMED = ("rollout/images_per_second", "rollout/seconds")


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, counters, metrics, evaluations, pictures and W agree in every bit."""
    first, second = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (one, other))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "recast", "epoch", "global_step"):
        assert_equal(first[key], second[key], key)
    assert rows(one / "metrics.csv") == rows(other / "metrics.csv")
    for name in ("evaluation.jsonl", "rollouts.jsonl"):
        assert lines(one / name) == lines(other / name)
    files = {run: sorted(p.relative_to(run) for p in run.rglob("*.png")) for run in (one, other)}
    assert files[one] == files[other]
    for name in files[one]:
        if name.parts[0] == "images":
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    loras = [load_file(run / "lora/pytorch_lora_weights.safetensors") for run in (one, other)]
    assert_equal(*loras, "lora")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if v and k not in TIMED} for row in csv.DictReader(file)]


def lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["metrics"] = {k: v for k, v in record["metrics"].items() if k not in TIMED}
    return records


def assert_equal(one: Any, other: Any, where: str) -> None:
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), where
    else:
        assert one == other or one != one, f"{where}: {one} and {other}"
