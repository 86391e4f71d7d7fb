import pytest
import torch

from recast_lightning.flow.noising import noise_to, velocity_to_x0


@pytest.mark.parametrize("sigma", [torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64), 0.7])
def test_noising_and_denoising_are_inverse(sigma):
    x0, noise = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    x_sigma = noise_to(x0, noise, sigma)
    torch.testing.assert_close(velocity_to_x0(x_sigma, noise - x0, sigma), x0)
    by_hand = torch.stack([(1 - s) * x0[i] + s * noise[i] for i, s in enumerate(torch.as_tensor(sigma).expand(3))])
    torch.testing.assert_close(x_sigma, by_hand)


def test_sigma_in_double_does_not_widen_the_data():
    x = torch.randn(2, 5)
    assert noise_to(x, x, torch.rand(2, dtype=torch.float64)).dtype == torch.float32
