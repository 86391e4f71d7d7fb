"""Numbers that must come out exactly, and numbers that are none."""

import pytest
import torch

from recast_lightning.objective import group_advantages, level_advantages, optimality_probability

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONSTANTS = (0.1, 1 / 3, 1e8, -1e8 / 3, 1e-30, -0.7, 1e-40, 5e-324, 0.0, -0.0)


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
@pytest.mark.parametrize("std", ["level", "group"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rewards_have_exactly_no_advantage_whatever_the_numbers(aggregation, std, dtype):
    """Beside a group that differs, with and without failed scores, for any number of rewards and levels."""
    for constant in CONSTANTS:
        for size in (*range(2, 18), 31, 48, 64):
            rewards, levels = 1 + size % 5, 1 + size % 26
            weights = torch.rand(rewards, levels, dtype=torch.float64)
            weights /= weights.sum(0)
            scores = torch.rand(size + 3, rewards).to(dtype)
            scores[:size] = (torch.tensor([constant], dtype=torch.float64) * torch.arange(1, rewards + 1)).to(dtype)
            order = torch.randperm(size + 3)
            groups = torch.tensor([7] * size + [-1] * 3)[order]
            for failed in (False, True):
                if failed:
                    scores[0, 0], scores[size, -1] = torch.nan, torch.inf
                finite = scores.isfinite().all(1)[order]
                alike = (groups == 7) & finite
                advantages = level_advantages(scores[order], weights, groups, aggregation=aggregation, std=std)
                assert (advantages[alike] == 0).all(), (constant, size, failed)
                assert (optimality_probability(advantages[alike], 5.0) == 0.5).all()
                assert (advantages[(groups == -1) & finite] != 0).any()
                assert (group_advantages(scores[order], groups, std=std)[alike] == 0).all()
