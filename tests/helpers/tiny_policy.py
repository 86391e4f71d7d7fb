"""Loads a policy from a tiny pipeline, and makes a batch for it."""

from pathlib import Path

import torch

from recast_lightning.policy import Policy
from recast_lightning.seeds import noise

TEXTS = ["a red sign", "two blue stars above a cross"]
SIZE = {"height": 32, "width": 48}


def loaded(folder: Path, **options) -> Policy:
    policy = Policy(str(folder), **({"num_steps": 3, "lora_rank": 2, **SIZE} | options))
    policy.validate()
    policy.load()
    return policy


def batch(policy: Policy, size: int = 2):
    x = noise(policy.latent_shape, [("test", i) for i in range(size)])
    return x, torch.tensor([0.4, 0.9][:size]), policy.encode_prompts(TEXTS[:size])
