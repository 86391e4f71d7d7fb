"""The very files of configs/sd35_medium on the CPU: only paths, sizes and devices differ; the weights are tiny and random."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import StableDiffusion3Pipeline
from helpers import tiny_sd3
from integration.tiny import ROOT, adapters, newest_run
from matplotlib.figure import Figure
from PIL import Image

from recast_lightning.cli import main
from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.seeds import noise

CONFIGS = ROOT / "configs/sd35_medium"
SIZES = {
    "model.policy.init_args.height": 32,
    "model.policy.init_args.width": 48,
    "model.policy.init_args.num_steps": 3,
    "model.policy.init_args.lora_rank": 4,
    "model.policy.init_args.lora_alpha": 8,
    "model.policy.init_args.max_sequence_length": 8,
    "model.stages.0.epochs": 1,
    "model.stages.1.epochs": 1,
    "model.rollout.batch_size": 4,
    "model.rollout.micro_batch_size": 4,
    "model.scoring.num_workers": 0,
    "model.optimizer.learning_rate": 0.05,  # so that two steps show
    "data.prompts_per_rollout": 2,
    "data.group_size": 4,
    "data.evaluation_batch_size": 2,
    "trainer.accelerator": "cpu",
    "trainer.check_val_every_n_epoch": 2,
    "trainer.callbacks.0.init_args.num_prompts": 3,
    "trainer.callbacks.0.init_args.levels": 2,
    "trainer.callbacks.0.init_args.steps": 2,
    "trainer.callbacks.0.init_args.batch_size": 4,
}


@dataclass(frozen=True)
class Place:
    """Everything that docs/sd35.md says to fetch or make, in a folder: weights, prompts, proposals."""

    folder: Path
    paths: dict[str, Any]

    def config(self, stage: str, *overlays: str, **sizes: Any) -> list[str]:
        """Arguments that name small copies of a stage's file and its overlays; keys of `sizes` have __ for the dots."""
        wanted = SIZES | self.paths | {key.replace("__", "."): value for key, value in sizes.items()}
        arguments: list[str] = []
        for name in (stage, *overlays):
            text = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
            text = small(text, wanted)
            file = self.folder / "configs" / f"{name.replace('/', '-')}.yaml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(yaml.safe_dump(text, sort_keys=False), encoding="utf-8")
            arguments += ["-c", str(file)]
        return arguments


def small(node: Any, wanted: dict[str, Any], where: str = "") -> Any:
    """A copy in which the wanted values replace those that are there."""
    if where in wanted:
        return wanted[where]
    if isinstance(node, list):
        return [small(item, wanted, f"{where}.{i}".lstrip(".")) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    return {key: small(value, wanted, f"{where}.{key}".lstrip(".")) for key, value in node.items()}


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    """`recast` in a process of its own."""
    paths = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "recast_lightning", *arguments]
    return subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def prepare(folder: Path, stage: str, *, with_t5: bool) -> Place:
    """Weights, prompts of the project's own maker, and pictures that pass for a strong generator's."""
    weights = tiny_sd3.save_rewards(folder)
    pipeline = tiny_sd3.save_pipeline(folder / "pipeline", with_t5=with_t5)
    suffix = "txt" if stage == "ocr" else "jsonl"
    made, sets = folder / f"all.{suffix}", (folder / f"train.{suffix}", folder / f"test.{suffix}")
    main(["prompts", stage, "-n", "7", "--output", str(made)])
    lines = made.read_text(encoding="utf-8").splitlines(keepends=True)
    sets[0].write_text("".join(lines[:4]), encoding="utf-8")
    sets[1].write_text("".join(lines[4:]), encoding="utf-8")
    proposals = folder / "proposals"
    proposals.mkdir()
    with (proposals / "metadata.jsonl").open("w", encoding="utf-8") as listing:
        for i, line in enumerate(lines[:3]):
            picture = np.random.default_rng(i).integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(picture).save(proposals / f"{i}.png")
            text = line.strip() if stage == "ocr" else json.loads(line)["prompt"]
            listing.write(json.dumps({"file_name": f"{i}.png", "prompt": text}) + "\n")
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    paths = {
        "model.policy.init_args.path": str(pipeline),
        "model.policy.init_args.embedding_folder": str(folder / "embeddings"),
        "model.rewards.clip.init_args": {"model": weights.clip},
        "model.rewards.hpsv2.init_args": {"model": weights.hpsv2, "processor": weights.processor},
        "model.rewards.pickscore.init_args": {"model": weights.pickscore, "processor": weights.processor},
        "model.rewards.geneval.init_args.detector.init_args": {
            "model": weights.mask2former, "clip": weights.clip, "short_side": 64, "long_side": 100,
        },
        "data.train": str(sets[0]),
        "data.validation": str(sets[1]),
        "trainer.logger": [logger],
        "trainer.callbacks.0.init_args.proposals.init_args.path": str(proposals),
    }  # fmt: skip
    return Place(folder, paths)


@pytest.fixture(scope="module", autouse=True)
def _blank_figures():
    """Drawing figures, which test_run.py looks at, would take a third of the time."""

    def blank(figure: Figure, file: Any, **_: Any) -> None:
        Image.new("L", (1, 1)).save(file, "PNG")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", blank)
        yield


@pytest.fixture(scope="module")
def ocr(tmp_path_factory):
    """Stage-OCR with T5, in two runs: the warm-up, then from its checkpoint with OCR's budget doubled."""
    place = prepare(tmp_path_factory.mktemp("ocr"), "ocr", with_t5=True)
    main(["fit", *place.config("ocr", trainer__accumulate_grad_batches=4), "--trainer.max_epochs", "1"])
    warm = newest_run(place.folder)
    arguments = place.config("ocr", "budgets/ocr_double_ocr", trainer__accumulate_grad_batches=4)
    main(["fit", *arguments, "--ckpt_path", str(warm / "checkpoints/last.ckpt")])
    return place, warm, newest_run(place.folder)


def test_every_size_and_path_is_a_key_of_the_files(ocr):
    """Otherwise a misspelt override, or a renamed key, would leave the file's value in force unnoticed."""

    def lookup(node: Any, parts: list[str]) -> Any:
        return lookup(node[int(parts[0]) if isinstance(node, list) else parts[0]], parts[1:]) if parts else node

    files = [yaml.safe_load((CONFIGS / f"{stage}.yaml").read_text(encoding="utf-8")) for stage in ("ocr", "geneval")]
    for where in SIZES | ocr[0].paths:
        file = files[where.startswith("model.rewards.geneval")]
        assert lookup(file, where.split(".")) is not None


def test_stage_ocr_encodes_draws_scores_profiles_trains_evaluates_saves_and_resumes(ocr):
    _, warm, run = ocr
    assert Profile.load(warm / "stages/1-warmup/profile").rewards == ["clip", "hpsv2", "pickscore"]
    profile, credit = Profile.load(run / "stages/2-ocr/profile"), CreditMatrix.load(run / "stages/2-ocr/credit")
    assert profile.rewards == credit.rewards == ["clip", "hpsv2", "pickscore", "ocr"]
    assert list(credit.budgets.values()) == [1, 1, 1, 2]
    first, second = (adapters(r / "checkpoints/last.ckpt") for r in (warm, run))
    assert first.keys() == second.keys()
    assert len(first) == 3 * 2 * 15  # adapters, A and B, projections of two blocks of which the last drops its text
    assert all(v.dtype == torch.float32 and v.isfinite().all() for v in second.values())
    assert all((first[k] != second[k]).any() for k in first if "lora_B.default" in k and ".1.attn.add_q" not in k)
    evaluations = [json.loads((r / "evaluation.jsonl").read_text().splitlines()[i]) for r, i in ((warm, 0), (run, -1))]
    assert [e["rollout"] for e in evaluations] == [0, 2]
    assert all(e["count"] == 3 and set(e["metrics"]) == {"clip", "hpsv2", "pickscore", "ocr"} for e in evaluations)
    assert evaluations[0]["metrics"] != evaluations[-1]["metrics"]
    assert (run / "report.html").is_file()


def test_the_saved_lora_draws_the_same_picture_in_diffusers(ocr):
    """By Euler and in float32, which diffusers' pipeline has, too."""
    place, _, run = ocr
    arguments = [*place.config("ocr"), "--ckpt_path", str(run / "checkpoints/last.ckpt")]
    options = ["--model.policy.init_args.solver", "euler", "--model.policy.init_args.dtype", "float32"]
    options += ["--model.policy.init_args.embedding_folder", str(place.folder / "float32")]
    main(["predict", *arguments, *options, "--trainer.precision", "32-true"])
    folder = newest_run(place.folder) / "predictions"
    row = json.loads((folder / "metadata.jsonl").read_text().splitlines()[0])
    ours = torch.from_numpy(np.array(Image.open(folder / row["file_name"]))).permute(2, 0, 1) / 255

    pipeline = StableDiffusion3Pipeline.from_pretrained(place.folder / "pipeline", dtype=torch.float32)

    def draw() -> torch.Tensor:
        picture: torch.Tensor = pipeline(
            row["prompt"], num_inference_steps=3, guidance_scale=1.0, height=32, width=48, max_sequence_length=8,
            latents=noise((16, 4, 6), [("evaluation", row["prompt"], 0)]), output_type="pt",
        ).images[0]  # fmt: skip
        return picture

    base = draw()
    pipeline.load_lora_weights(run / "lora")
    assert (base - ours).abs().max() > 0.05
    torch.testing.assert_close(draw(), ours, atol=1.1 / 255, rtol=0)


@pytest.mark.slow
def test_validate_and_doctor_take_the_files_as_they_are(ocr, capsys):
    place, _, run = ocr
    main(["validate", *place.config("ocr"), "--ckpt_path", str(run / "checkpoints/last.ckpt")])
    assert "val/ocr" in capsys.readouterr().out
    main(["doctor", *place.config("ocr")])
    table = capsys.readouterr().out
    assert "FAILED" not in table
    assert "latents [16, 4, 6]" in table


@pytest.fixture(scope="module")
def geneval(tmp_path_factory):
    """Stage-GenEval on a pipeline without T5, in one run."""
    place = prepare(tmp_path_factory.mktemp("geneval"), "geneval", with_t5=False)
    main(["fit", *place.config("geneval", "hardware/one_gpu_small", trainer__accumulate_grad_batches=4)])
    return place, newest_run(place.folder)


def test_stage_geneval_runs_without_t5_and_finds_objects_by_mask2former(geneval):
    run = geneval[1]
    credit = CreditMatrix.load(run / "stages/2-geneval/credit")
    assert credit.rewards == ["clip", "hpsv2", "pickscore", "geneval"]
    assert max(credit.residuals) < 1e-6
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [e["rollout"] for e in evaluations] == [0, 2]
    assert all(e["failed"]["geneval"] == 0 for e in evaluations)
    assert (run / "lora/pytorch_lora_weights.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_share_a_run_as_the_ddp_file_says(tmp_path):
    """Workers that read text, too, and T5 left out of a pipeline that has it."""
    place = prepare(tmp_path, "ocr", with_t5=True)
    sizes = {"trainer__devices": 2, "trainer__accumulate_grad_batches": 2, "model__scoring__num_workers": 1}
    arguments = place.config("ocr", "hardware/ddp_8", "old_policy/slow", **sizes)
    run = start(["fit", *arguments, "--model.policy.init_args.use_t5", "false"])
    printed, _ = run.communicate(timeout=400)
    assert run.returncode == 0, printed[-3000:]
    check_shared_run(newest_run(tmp_path))


@pytest.mark.slow
def test_two_nodes_share_a_run_as_the_multi_node_file_says(tmp_path):
    place = prepare(tmp_path, "geneval", with_t5=True)
    sizes = {"trainer__devices": 1, "trainer__accumulate_grad_batches": 2}
    arguments = place.config("geneval", "hardware/ddp_2x8", **sizes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    nodes = [start(["fit", *arguments], NODE_RANK=str(rank), **address) for rank in (0, 1)]
    for node in nodes:
        printed, _ = node.communicate(timeout=400)
        assert node.returncode == 0, printed[-3000:]
    check_shared_run(newest_run(tmp_path))


def check_shared_run(run: Path) -> None:
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [(e["rollout"], e["count"]) for e in evaluations] == [(0, 3), (2, 3)]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2  # one a rollout
    assert (run / "lora/pytorch_lora_weights.safetensors").is_file()
