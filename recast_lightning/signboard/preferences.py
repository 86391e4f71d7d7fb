"""Synthetic tastes: two ways to spoil a sign, so that HPSv2 and PickScore of Signboard prefer different things.

`crispness`: sharp edges, clean flat background, saturated colour. `layout`: large, aligned, centred shapes and letters.
Each judge learns from pairs (drawing, the same drawing spoilt more), in its own taste only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def spoil_crispness(images: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    """Blur, grain and fading of images [B, 3, H, W] in [0, 1]; amount [B] in [0, 1]."""
    a = amount[:, None, None, None]
    blurred = F.avg_pool2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), 5, 1)
    images = torch.lerp(images, blurred, a)
    grey = images.mean(1, keepdim=True)
    images = torch.lerp(images, grey, 0.5 * a)
    grain = torch.randn(images.shape, generator=generator)
    return (images + 0.12 * a * grain).clamp(0, 1)


def spoil_layout(images: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, turn, shrink and shear images [B, 3, H, W] on their own background colour; amount [B] in [0, 1]."""
    batch = len(images)
    u = torch.rand(batch, 4, generator=generator) * 2 - 1
    strength = amount * (0.6 + 0.4 * torch.rand(batch, generator=generator))
    angle, scale = 0.5 * strength * u[:, 0].sign(), 1 + 0.5 * strength
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(batch, 2, 2)
    shear = torch.eye(2).repeat(batch, 1, 1)
    shear[:, 0, 1] = 0.5 * strength * u[:, 1]
    linear = scale[:, None, None] * rotation @ shear
    theta = torch.cat([linear, (0.5 * strength)[:, None, None] * u[:, 2:, None]], 2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    corner = images[:, :, :1, :1]
    inside = F.grid_sample(images - corner, grid, align_corners=False)
    return (inside + corner).clamp(0, 1)


TASTES = {"crispness": spoil_crispness, "layout": spoil_layout}
