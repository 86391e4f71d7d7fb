"""What several tests of rewards with a network of their own check alike."""

import pytest
import torch
from torch.nn import functional as F


def check_gradients(reward, images, prompts):
    """Gradients reach the images, also after a load in inference mode and through scaling, and agree with differences."""
    with torch.inference_mode():  # loads
        reward(images, prompts)
    leaf = F.interpolate(images, 50).requires_grad_()  # goes through scaling
    reward.score(leaf, prompts).sum().backward()
    assert leaf.grad.flatten(1).abs().sum(1).min() > 0

    exact = images.clone().requires_grad_()
    reward.score(exact, prompts).sum().backward()
    direction, step = exact.grad / exact.grad.norm(), 0.05
    up, down = (reward.score(images + s * step * direction, prompts).sum() for s in (1, -1))
    assert exact.grad.norm().item() == pytest.approx(((up - down) / (2 * step)).item(), rel=0.05)


def check_weights_follow_the_device(reward, prompts, parameters):
    """Weights (`parameters()` lists them) move on use, leave inference mode behind, and stay out of the module tree."""
    reward.load()
    assert list(reward.state_dict()) == []
    reward.to("meta")
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError)):  # meta tensors have no values
        reward(torch.rand(1, 3, 32, 32), prompts[:1])
    assert {p.device.type for p in parameters()} == {"meta"}
    assert not any(p.is_inference() for p in parameters())
