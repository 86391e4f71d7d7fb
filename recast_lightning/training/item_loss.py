"""The loss of one item: three passes of the policy, then the objective.

Shape legend: B micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recast_lightning.flow import noise_to
from recast_lightning.objective import NFTLoss
from recast_lightning.policy import Policy
from recast_lightning.rollout import TrainItem


class ItemLoss(NamedTuple):
    """Losses of an item.

    Attributes:
        loss: what is trained on, a scalar; samples without a score count nothing.
        logged: name → scalar.
        checked: what must be finite: name → [B, ...].
    """

    loss: Tensor
    logged: dict[str, Tensor]
    checked: dict[str, Tensor]


def item_loss(policy: Policy, objective: NFTLoss, item: TrainItem) -> ItemLoss:
    """The objective of one micro-batch, each image at its level; gradients flow to the `default` adapter."""
    x0, r = item.latents, item.optimality_probability
    sigma = policy.sigmas[item.levels].to(x0)
    x_sigma, condition = noise_to(x0, item.noise, sigma), policy.encode_prompts(item.texts)
    with policy.adapter("old"):
        velocity_old = policy(x_sigma, sigma, condition)
    velocity_reference = None
    if objective.kl_weight:
        with policy.adapter(None):
            velocity_reference = policy(x_sigma, sigma, condition)
    velocity = policy(x_sigma, sigma, condition)
    terms = objective(velocity, velocity_old, x_sigma, x0, sigma, r.nan_to_num(0.5), velocity_reference)
    share = r.isfinite().float() / len(x0)
    losses = terms.loss * share
    logged = {
        "loss": losses.sum(),
        "positive": (terms.positive * share).sum(),
        "negative": (terms.negative * share).sum(),
        "kl": terms.kl.mean(),
        "old_deviation": (velocity - velocity_old).square().mean(),
        "x0_norm": x0.square().mean().sqrt(),
    }
    velocities = {"old policy's velocity": velocity_old, "trained policy's velocity": velocity}
    return ItemLoss(logged["loss"], logged, {"latents": x0, **velocities, "loss": losses})
