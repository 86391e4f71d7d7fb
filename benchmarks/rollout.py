"""Where the time of a rollout goes: each part's images/s, and its cost relative to one sampled image.

python benchmarks/rollout.py
"""

import time

import torch

from recast_lightning.policy import Policy
from recast_lightning.rewards import OCR, ClipScore, GenEval, RewardModel, SignboardDetector
from recast_lightning.seeds import noise
from recast_lightning.signboard.world import make_prompts

BATCH = 48


def seconds(action, repeats: int = 3) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    policy = Policy()
    policy.load()
    prompts = make_prompts(BATCH, 0, "test")
    condition = policy.encode_prompts([p.text for p in prompts])
    start = noise(policy.latent_shape, [("benchmark", i) for i in range(BATCH)])
    images = policy.decode(policy.sample(start, condition, "old"))
    sigma = torch.full((BATCH,), 0.5)
    rewards: dict[str, RewardModel] = {
        "clip": ClipScore("signboard:clip"),
        "ocr": OCR(detect=False),
        "geneval": GenEval(SignboardDetector()),
    }

    def train() -> None:
        policy(start, sigma, condition).square().mean().backward()

    parts = {
        "sample (10 steps)": lambda: policy.sample(start, condition, "old"),
        "decode": lambda: policy.decode(start),
        "train one level": train,
        **{f"score {name}": lambda model=model: model(images, prompts) for name, model in rewards.items()},
    }
    measured = {name: seconds(action) for name, action in parts.items()}
    unit = measured["sample (10 steps)"]
    print(f"{'part':20} {'images/s':>9} {'÷ sampling':>11}")
    for name, value in measured.items():
        print(f"{name:20} {BATCH / value:9.0f} {value / unit:11.2f}")


if __name__ == "__main__":
    main()
