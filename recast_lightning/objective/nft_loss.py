"""The loss of DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117), a pure function.

Shape legend: B batch; ``...`` is any data shape.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from recast_lightning.flow.noising import velocity_to_x0


class NFTTerms(NamedTuple):
    """The parts of the loss, each [B]."""

    positive: Tensor
    """l+, the error of the implicit positive policy."""
    negative: Tensor
    """l-, the error of the implicit negative policy."""
    loss: Tensor
    """c (r l+ + (1 - r) l-) / beta."""


def nft_terms(
    velocity: Tensor,
    velocity_old: Tensor,
    x_sigma: Tensor,
    x0: Tensor,
    sigma: Tensor,
    r: Tensor,
    *,
    beta: float,
    advantage_clip: float,
) -> NFTTerms:
    """Forward-process policy loss and its two halves (DiffusionNFT, Sec. 3).

    v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v point to x0_hat+-, whose error is self-normalised,

        l+- = mean((x0_hat+- - x0)^2) / sg(max(mean|x0_hat+- - x0|, 1e-5)),      loss = c (r l+ + (1 - r) l-) / beta.

    Args:
        velocity: v of the policy in training, [B, ...]; gradients flow through it only.
        velocity_old: v of the policy that drew the samples, [B, ...].
        x_sigma: Noised samples, [B, ...].
        x0: The samples, [B, ...].
        sigma: Level of each sample, [B].
        r: Optimality probability in [0, 1], [B].
        beta: Strength of the guidance, > 0.
        advantage_clip: c, the clip of the advantages that r was made from.

    Returns:
        `NFTTerms`, computed in float32 or wider.
    """
    dtype = torch.promote_types(x0.dtype, torch.float32)
    v, v_old, x_sigma, x0, sigma, r = (y.to(dtype) for y in (velocity, velocity_old.detach(), x_sigma, x0, sigma, r))

    def error(v_implicit: Tensor) -> Tensor:
        difference = (velocity_to_x0(x_sigma, v_implicit, sigma) - x0).flatten(1)
        scale = difference.detach().abs().mean(1).clamp(min=1e-5)
        return difference.square().mean(1) / scale

    positive = error((1 - beta) * v_old + beta * v)
    negative = error((1 + beta) * v_old - beta * v)
    return NFTTerms(positive, negative, advantage_clip * (r * positive + (1 - r) * negative) / beta)


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
    """Loss per sample, [B]: the ``loss`` of `nft_terms`, which documents the arguments."""
    return nft_terms(velocity, velocity_old, x_sigma, x0, sigma, r, beta=beta, advantage_clip=advantage_clip).loss
