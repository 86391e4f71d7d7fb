"""What training SD3.5-Medium takes: memory of a GPU and compute of a run, from shapes. No weights, no GPU.

    python benchmarks/memory.py [--markdown] [--json FILE]

Weights are counted on the meta device. The peaks are those of the project's own training step, of a sampling step, of
decoding and of scoring on 512 x 512 pictures (`shapes.py`), as an allocator without any loss would see them. The tables are
those of docs/scale.md; they take three minutes of a core.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import shapes
import torch
from rich.console import Console
from rich.table import Table
from shapes import BF16, ENCODERS, FAKE, FP32, LATER, LEVELS, REWARDS, SIZE, Weights, fake, on_meta, peak, tflop

from recast_lightning.credit.plan import make_plan

PROMPTS, GROUP = 48, 24
TRAINED = int(0.99 * LEVELS)  # levels that each image trains at
MICRO_BATCH, ROLLOUT_BATCH = 8, 16  # of the totals
MICRO_BATCHES = (1, 2, 4, 8, 12, 16, 24)
PRECISIONS = ("bf16-mixed", "bf16-true")
PROFILED = 512  # prompts
PROFILES = {"levels: 8, steps: 8": {"levels": 8, "steps": 8}, "steps: grid": {"steps": "grid"}}
GATHERED = 3  # blocks under FSDP2: one computes, one arrives, and the buffer that it arrives in
GIB = 2**30


# Figures -----------------------------------------------------------------------------------------------------------


def weights() -> dict[str, Weights]:
    """What each frozen part weighs."""
    parts = {"transformer": (shapes.transformer, BF16), "VAE": (shapes.vae, FP32)}
    parts |= {name: (build, BF16) for name, build in ENCODERS.items()} | REWARDS | LATER
    return {name: Weights.of(on_meta(*part)) for name, part in parts.items()}


def line(measure: Callable[[int], int]) -> list[int]:
    """Bytes for no image and for each, from runs with one and two: everything here is linear in the batch."""
    one, two = measure(1), measure(2)
    return [2 * one - two, two - one]


def of_policy() -> dict:
    """Bytes of the adapters and of what FSDP2 shards; peaks and TFLOP of sampling and training."""
    policy, adapters = shapes.with_adapters()
    model, trained = policy.transformer, adapters.parameters("default")
    blocks = [shapes.size(list(block.parameters())) for block in policy.family.blocks(model)]
    everything = shapes.size(list(model.parameters()))
    held = {
        "modules": len(adapters.layers),
        "lora": vars(Weights(sum(p.numel() for p in trained), shapes.size(trained), 0, "float32")),
        "sharding": {"all": everything, "block": max(blocks), "root": everything - sum(blocks)},
    }
    fake(model)
    with FAKE:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    peaks = {"sample": line(lambda n: peak(policy, lambda: shapes.sample_step(policy, n), autocast=True))}
    cost = {"sample": tflop(lambda: shapes.sample_step(policy, 1))}
    for name in ("train", "train, checkpointing"):
        if "checkpointing" in name:
            model.enable_gradient_checkpointing()
            model.train()
        cost[name] = tflop(lambda: shapes.train_step(policy, 1))
        for precision in PRECISIONS:
            mixed = precision == "bf16-mixed"
            peaks[f"{name}, {precision}"] = line(
                lambda n, m=mixed: peak(policy, lambda: shapes.train_step(policy, n), m)
            )
    return held | {"peaks": peaks, "tflop": cost}


def of_helpers() -> dict:
    """Peaks and TFLOP of the frozen models, an image."""
    pixels, latents = (3, SIZE, SIZE), (16, SIZE // 8, SIZE // 8)
    runs = {
        "decode": (shapes.vae, FP32, latents, lambda m, x: m.decode(x)),
        "encode": (shapes.vae, FP32, pixels, lambda m, x: m.encode(x)),
        "CLIP-L": (shapes.clip_l, FP32, (3, 224, 224), lambda m, x: m.get_image_features(x)),
        "CLIP-H": (shapes.clip_h, FP32, (3, 224, 224), lambda m, x: m.get_image_features(x)),
        "Mask2Former": (shapes.mask2former, FP32, (3, 800, 800), lambda m, x: m(x)),
    }
    peaks, cost = {}, {}
    for name, (build, dtype, shape, call) in runs.items():
        module = fake(on_meta(build, dtype))

        @torch.no_grad()
        def run(module=module, shape=shape, dtype=dtype, call=call) -> object:
            return call(module, torch.empty(1, *shape, dtype=dtype))

        peaks[name], cost[name] = [0, peak(module, run)], tflop(run)
    return {"peaks": peaks, "tflop": cost}


def figures() -> dict:
    """All that the tables are made of."""
    policy, helpers = of_policy(), of_helpers()
    return policy | {
        "weights": {name: vars(part) for name, part in weights().items()} | {"LoRA, each of 3": policy.pop("lora")},
        **{kind: policy[kind] | helpers[kind] for kind in ("peaks", "tflop")},
    }


def at(figure: list[int], batch: int) -> float:
    """GiB of a batch."""
    return (figure[0] + batch * figure[1]) / GIB


def total(f: dict, gpus: int, *, sharded: bool, encoders: float, rewards: bool) -> float:
    """GiB on each GPU at the worst moment of a rollout, checkpointing on, bf16-mixed; `encoders` are resident GiB."""
    part, peaks, sharding = f["weights"], f["peaks"], f["sharding"]
    lora = part["LoRA, each of 3"]["total_bytes"]
    held = part["transformer"]["buffer_bytes"] + part["VAE"]["total_bytes"]
    if sharded:
        held += sharding["all"] / gpus + sharding["root"] + GATHERED * sharding["block"] + lora + 2 * lora / gpus
    else:
        held += sharding["all"] + (3 if gpus == 1 else 4) * lora  # DDP's buckets are one more copy of the gradients
    moments = [
        at(peaks["train, checkpointing, bf16-mixed"], MICRO_BATCH),
        at(peaks["sample"], ROLLOUT_BATCH),
        at(peaks["decode"], ROLLOUT_BATCH),
    ]
    if rewards:
        held += sum(part[name]["total_bytes"] for name in REWARDS)
        moments += [at(peaks["CLIP-H"], ROLLOUT_BATCH), at(peaks["Mask2Former"], 4)]
    return held / GIB + encoders + max(moments)


def rollout_pflop(f: dict, *, checkpointing: bool) -> tuple[float, float]:
    """PFLOP of a rollout's sampling and scoring, and of its training."""
    t, images = f["tflop"], PROMPTS * GROUP
    scoring = 2 * t["CLIP-H"] + t["CLIP-L"] + t["Mask2Former"]
    item = t["train, checkpointing" if checkpointing else "train"]
    return images * (LEVELS * t["sample"] + t["decode"] + scoring) / 1000, images * TRAINED * item / 1000


def profile_pflop(f: dict, prompts: int, **options: int | str) -> tuple[int, float]:
    """Network calls a prompt, and PFLOP of a profile; an answer is decoded for each level and for the proposal."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(LEVELS)
    plan = make_plan(scheduler.sigmas.flip(0), **options)
    t = f["tflop"]
    scoring = t["decode"] + 2 * t["CLIP-H"] + t["CLIP-L"] + t["Mask2Former"]
    return plan.cost, prompts * (plan.cost * t["sample"] + (len(plan.levels) + 1) * scoring + t["encode"]) / 1000


# Tables ------------------------------------------------------------------------------------------------------------

Rows = list[list[str]]


def weights_table(f: dict) -> Rows:
    rows = [["part", "parameters", "type", "GiB"]]
    for name, w in f["weights"].items():
        rows.append([name, f"{w['parameters'] / 1e6:,.1f} M", w["dtype"], f"{w['total_bytes'] / GIB:.2f}"])
    return rows


def peaks_table(f: dict) -> Rows:
    kinds = [f"{name}, {precision}" for name in ("train", "train, checkpointing") for precision in PRECISIONS]
    rows = [["images at once", *kinds, "sampling", "decoding"]]
    for n in MICRO_BATCHES:
        rows.append([str(n), *(f"{at(f['peaks'][kind], n):.1f}" for kind in (*kinds, "sample", "decode"))])
    return rows


def totals_table(f: dict) -> Rows:
    gib = {name: f["weights"][name]["total_bytes"] / GIB for name in ENCODERS}
    clips = sum(gib.values()) - gib["T5-XXL"]
    places = {
        "all encoders and rewards": (sum(gib.values()), True), "all but T5": (clips, True),
        "rewards only": (0.0, True), "neither": (0.0, False),
    }  # fmt: skip
    rows = [["on each GPU beside the policy", *places]]
    for name, gpus, sharded in (
        ("one GPU", 1, False), ("DDP, 2 or more", 2, False),
        ("FSDP2, 2", 2, True), ("FSDP2, 4", 4, True), ("FSDP2, 8", 8, True),
    ):  # fmt: skip
        cells = [total(f, gpus, sharded=sharded, encoders=e, rewards=r) for e, r in places.values()]
        rows.append([name, *(f"{cell:.1f}" for cell in cells)])
    return rows


def costs_table(f: dict) -> Rows:
    names = {
        "sample": "sampling step, an image", "decode": "decoding, an image", "train": "training item, an image at one level",
        "train, checkpointing": "the same with gradient checkpointing", "CLIP-L": "ClipScore, an image",
        "CLIP-H": "HPSv2 or PickScore, an image", "Mask2Former": "GenEval's detector, an image",
    }  # fmt: skip
    rows = [["what", "TFLOP"], *([text, f"{f['tflop'][name]:.2f}"] for name, text in names.items())]
    sampling, training = rollout_pflop(f, checkpointing=True)
    costs = {
        f"a rollout of {PROMPTS} × {GROUP} images, T = {LEVELS}: drawing and scoring": sampling,
        f"training on it at {TRAINED} of {LEVELS} levels, with gradient checkpointing": training,
        "the same without": rollout_pflop(f, checkpointing=False)[1],
    }
    for text, options in PROFILES.items():
        calls, cost = profile_pflop(f, PROFILED, **options)
        costs[f"a profile of {PROFILED} prompts, `{text}`: {calls} calls each"] = cost
    return rows + [[text, f"{1000 * cost:,.0f}"] for text, cost in costs.items()]


def tables(f: dict) -> dict[str, Rows]:
    """Title -> rows, the first of them the head."""
    return {
        "Weights": weights_table(f),
        "Beyond the weights at the peak, GiB": peaks_table(f),
        f"All together, GiB: micro-batch {MICRO_BATCH} with checkpointing, rollout batch {ROLLOUT_BATCH}": totals_table(
            f
        ),
        "Compute": costs_table(f),
    }


def markdown(rows: Rows) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/scale.md")
    parser.add_argument("--json", type=Path, help="also write the figures (bytes, TFLOP) to this file")
    given = parser.parse_args()
    found = figures()
    if given.json:
        given.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    for title, rows in tables(found).items():
        if given.markdown:
            print(f"{markdown(rows)}\n")
            continue
        table = Table(title=title)
        for i, head in enumerate(rows[0]):
            table.add_column(head, justify="right" if i else "left")
        for row in rows[1:]:
            table.add_row(*row)
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
