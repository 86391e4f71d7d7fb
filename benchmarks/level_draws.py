"""What drawing levels for each image is worth: the error of a micro-batch's gradient at a share of the levels.

    python benchmarks/level_draws.py

Gradients of every image at every level are taken once, on Signboard, with random r (images pull in different directions)
and with r = 1 (all pull alike). Then micro-batches are put together from them, with the levels drawn for the whole
micro-batch or for each image, and compared with the gradient over all levels.
"""

import torch

from recast_lightning.objective import NFTLoss
from recast_lightning.policy import Policy
from recast_lightning.rollout import RolloutBuffer, RolloutOptions, SampleId, TrainItem, TrainItems
from recast_lightning.seeds import noise
from recast_lightning.training.data import load_prompts
from recast_lightning.training.item_loss import item_loss

IMAGES, SHARES, DRAWS = 24, (0.2, 0.4, 0.8), 400


def gradients(policy: Policy, r: torch.Tensor) -> torch.Tensor:
    """Of each image at each level, [B, T, weights]."""
    texts = [prompt.text for prompt in load_prompts(f"signboard:train:{IMAGES}", ocr=False)]
    with torch.no_grad():
        start = noise(policy.latent_shape, [("level draws", i) for i in range(IMAGES)])
        latents = policy.sample(start, policy.encode_prompts(texts), "old")
    weights = policy.adapter_parameters("default")
    found = torch.zeros(IMAGES, policy.num_steps, sum(w.numel() for w in weights))
    for image in range(IMAGES):
        for level in range(policy.num_steps):
            one = slice(image, image + 1)
            drawn = noise(policy.latent_shape, [("noise", image, level)])
            item = TrainItem(latents[one], drawn, torch.tensor([level + 1]), texts[one], r[one])
            grads = torch.autograd.grad(item_loss(policy, NFTLoss(kl_weight=0.0), item).loss, weights)
            found[image, level] = torch.cat([g.flatten() for g in grads])
    return found


def errors(found: torch.Tensor, share: float) -> tuple[float, float]:
    """Mean squared error over the squared norm: levels of the micro-batch, and levels of each image."""
    num_levels, whole = found.shape[1], found.mean((0, 1))
    items = TrainItems(RolloutOptions(micro_batch_size=IMAGES, timestep_fraction=share), num_levels, seed=0)
    samples, zeros = [SampleId(i, i, 0) for i in range(IMAGES)], torch.zeros(IMAGES, num_levels)
    buffer = RolloutBuffer(samples, zeros, [""] * IMAGES, zeros)
    shared, own = 0.0, 0.0
    for draw in range(DRAWS):
        count = items.levels_per_image
        levels = torch.stack([items.item(buffer, draw, turn).levels for turn in range(count)], 1) - 1
        picked = found[torch.arange(IMAGES)[:, None], levels].mean((0, 1))
        together = found[:, torch.randperm(num_levels)[:count]].mean((0, 1))
        own += float((picked - whole).square().sum() / whole.square().sum()) / DRAWS
        shared += float((together - whole).square().sum() / whole.square().sum()) / DRAWS
    return shared, own


if __name__ == "__main__":
    torch.manual_seed(0)
    policy = Policy(lora_rank=16, lora_alpha=32)
    policy.load()
    print("r       share of levels   shared   of each image   ratio")
    for name, r in {"random": torch.rand(IMAGES), "one": torch.ones(IMAGES)}.items():
        every = gradients(policy, r)
        for share in SHARES:
            shared, own = errors(every, share)
            print(f"{name:6} {share:16.1f} {shared:8.4f} {own:15.4f} {own / shared:7.2f}", flush=True)
