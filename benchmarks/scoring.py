"""What scoring in the background buys: wall time of a rollout with and without it, and OCR's images/s in a pool.

python benchmarks/scoring.py [--workers 1] [--batches 6] [--detect]

On a machine with no spare core, workers only take turns with sampling: expect ratios near or above 1.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch

from recast_lightning.policy import Policy
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import OCR, ClipScore
from recast_lightning.rollout.scoring import ScoringPool
from recast_lightning.seeds import noise
from recast_lightning.signboard.world import make_prompts

BATCH = 24


class SpawnedOCR(OCR):
    workers = "processes"


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rollout(policy: Policy, pool: ScoringPool, prompts: list[Prompt], names: list[str]) -> torch.Tensor:
    """Sample and score as `RecastModule.collect` does."""
    waiting = []
    for start in range(0, len(prompts), BATCH):
        chunk = prompts[start : start + BATCH]
        x = noise(policy.latent_shape, [("benchmark", start + i) for i in range(len(chunk))])
        images = policy.decode(policy.sample(x, policy.encode_prompts([p.text for p in chunk]), "old"))
        waiting.append(pool.submit(images, chunk, names))
    return torch.cat([batch.result() for batch in waiting])


def one_by_one(model: OCR, images: torch.Tensor, prompts: list[Prompt]) -> torch.Tensor:
    return torch.cat([model(images[i : i + 1], prompts[i : i + 1]) for i in range(len(images))])


def in_pool(pool: ScoringPool, images: torch.Tensor, prompts: list[Prompt]) -> torch.Tensor:
    size = max(1, len(images) // (4 * pool.num_workers))
    parts = zip(images.split(size), [prompts[i : i + size] for i in range(0, len(prompts), size)], strict=True)
    return torch.cat([batch.result() for batch in [pool.submit(x, p, ["ocr"]) for x, p in parts]])[:, 0]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--detect", action="store_true", help="OCR finds the text first: slow, as on photographs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy()
    policy.load()
    prompts = make_prompts(BATCH * options.batches, 0, "test")
    models = {"ocr": SpawnedOCR(detect=options.detect), "clip": ClipScore("signboard:clip")}
    inline, pool = ScoringPool(models), ScoringPool(models, options.workers)
    names = list(models)
    for each in (inline, pool):
        rollout(policy, each, prompts[:BATCH], names)  # loads weights, starts workers

    scores = {}
    apart = seconds(lambda: scores.update(apart=rollout(policy, inline, prompts, names)))
    overlapped = seconds(lambda: scores.update(overlapped=rollout(policy, pool, prompts, names)))
    assert torch.equal(scores["apart"], scores["overlapped"])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.workers} workers, detect {options.detect}")
    print(f"rollout of {len(prompts)} images: inline {apart:.1f} s, overlapped {overlapped:.1f} s,", end=" ")
    print(f"ratio {overlapped / apart:.2f}")

    images = torch.rand(len(prompts), 3, policy.height, policy.width)
    single = len(images) / seconds(lambda: one_by_one(models["ocr"], images, prompts))
    pooled = len(images) / seconds(lambda: in_pool(pool, images, prompts))
    print(f"OCR images/s: inline one by one {single:.1f}, pool {pooled:.1f}, ratio {pooled / single:.2f}")
    pool.close()


if __name__ == "__main__":
    main()
