import pytest
import torch
from helpers.pictures import noise

from recast_lightning.rewards.preprocessing import longest_side_pad, shortest_side_crop, shortest_side_crop_to_even


@pytest.mark.parametrize("side", [90, 93, 121])
def test_preprocessing_is_that_of_transformers(side):
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_mean=[0, 0, 0], image_std=[1, 1, 1]
    )
    wide = noise(1, 90, side)
    for picture in (wide, wide.mT):
        theirs = processor(images=(picture[0] * 255).round().byte().numpy(), return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(shortest_side_crop(picture, 32), theirs, atol=1e-6, rtol=0)
        assert (shortest_side_crop(picture, 32, exact=False) - theirs).abs().max() < 0.02


def test_longest_side_pad():
    wide = torch.full((1, 3, 20, 41), 0.8)  # 204 / 255
    padded = longest_side_pad(wide, 32)
    assert padded.shape == (1, 3, 32, 32)
    filled = (padded[0, 0] > 0).all(1)
    assert filled.tolist() == [False] * 8 + [True] * 16 + [False] * 8  # 20 * 32 / 41 = 15.6
    torch.testing.assert_close(padded[0, :, 8:24], torch.full((3, 16, 32), 0.8))
    assert (padded[0, :, :8] == 0).all()
    torch.testing.assert_close(longest_side_pad(wide.mT, 32), padded.mT)


def test_only_hpsv2_lets_bicubic_scaling_leave_the_range():
    checker = (torch.arange(64)[:, None] // 8 + torch.arange(64) // 8).remainder(2).float().expand(1, 3, 64, 64)
    for exact in (True, False):
        assert shortest_side_crop(checker, 96, exact=exact).aminmax() == (0, 1)
        assert longest_side_pad(checker, 96, exact=exact).max() > 1.01
        for fit in (shortest_side_crop, shortest_side_crop_to_even, longest_side_pad):
            assert torch.equal(fit(checker, 64, exact=exact), checker)
