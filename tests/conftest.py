import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_random_state():
    """No test depends on what another drew."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def policy():
    """The embedded base, loaded once; tests must leave its adapters as they found them."""
    from recast_lightning.policy import Policy

    policy = Policy(num_steps=3, lora_rank=2)
    policy.load()
    return policy
