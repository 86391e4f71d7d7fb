"""The loss of DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117).

Shape legend: B batch; ``...`` is any data shape.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recast_lightning.flow import velocity_to_x0
from recast_lightning.ranges import check_ranges


class NFTTerms(NamedTuple):
    """The loss and its parts, each [B]."""

    loss: Tensor
    """c (r l+ + (1 - r) l-) / beta + w_KL kl."""
    positive: Tensor
    """l+, the error of the implicit positive policy."""
    negative: Tensor
    """l-, the error of the implicit negative policy."""
    kl: Tensor
    """mean((v - v_ref)^2); 0 without a reference."""


@dataclass(eq=False)
class NFTLoss(nn.Module):
    """Forward-process policy loss (DiffusionNFT, Sec. 3), with a penalty on leaving the reference.

    v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v point to x0_hat+-, whose error is self-normalised,

        l+- = mean((x0_hat+- - x0)^2) / sg(max(mean|x0_hat+- - x0|, 1e-5)),
        loss = c (r l+ + (1 - r) l-) / beta + w_KL mean((v - v_ref)^2).

    Args:
        beta: β of DiffusionNFT, the strength of the guidance.
        kl_weight: weight of mean (v_θ − v_ref)²; 0 spares the reference's forward.
        advantage_clip: c of DiffusionNFT, the clip of the advantages that r is made from.
    """

    beta: float = 0.1
    kl_weight: float = 1e-4
    advantage_clip: float = 5.0

    def __post_init__(self) -> None:
        super().__init__()
        ranges = {"beta": "(0, inf)", "kl_weight": "[0, inf)", "advantage_clip": "(0, inf)"}
        check_ranges(vars(self), ranges, "objective")

    def forward(
        self,
        velocity: Tensor,
        velocity_old: Tensor,
        x_sigma: Tensor,
        x0: Tensor,
        sigma: Tensor,
        r: Tensor,
        velocity_reference: Tensor | None = None,
    ) -> NFTTerms:
        """Loss per sample and its parts.

        Args:
            velocity: v of the policy in training, [B, ...]; gradients flow through it only.
            velocity_old: v of the policy that drew the samples, [B, ...].
            x_sigma: Noised samples, [B, ...].
            x0: The samples, [B, ...].
            sigma: Level of each sample, [B].
            r: Optimality probability in [0, 1], [B].
            velocity_reference: v of the frozen reference, [B, ...].

        Returns:
            `NFTTerms`, computed in float32 or wider.
        """
        dtype = torch.promote_types(x0.dtype, torch.float32)
        v, v_old, x_sigma, x0, sigma, r = (
            y.to(dtype) for y in (velocity, velocity_old.detach(), x_sigma, x0, sigma, r)
        )

        def error(v_implicit: Tensor) -> Tensor:
            difference = (velocity_to_x0(x_sigma, v_implicit, sigma) - x0).flatten(1)
            scale = difference.detach().abs().mean(1).clamp(min=1e-5)
            return difference.square().mean(1) / scale

        positive = error((1 - self.beta) * v_old + self.beta * v)
        negative = error((1 + self.beta) * v_old - self.beta * v)
        loss = self.advantage_clip * (r * positive + (1 - r) * negative) / self.beta
        kl = torch.zeros_like(loss)
        if velocity_reference is not None:
            kl = (velocity - velocity_reference).square().flatten(1).mean(1)
        return NFTTerms(loss + self.kl_weight * kl, positive, negative, kl)


def nft_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    x_sigma: Tensor,
    x0: Tensor,
    sigma: Tensor,
    r: Tensor,
    *,
    beta: float,
    advantage_clip: float,
) -> Tensor:
    """Loss per sample, [B], without a reference: `NFTLoss` as a function, which documents the arguments."""
    loss = NFTLoss(beta, 0.0, advantage_clip)
    return loss(velocity, velocity_old, x_sigma, x0, sigma, r).loss
