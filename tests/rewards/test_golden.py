"""Scores of the original packages on small random checkpoints, as `benchmarks/parity.py --golden` printed them.

transformers 4.27.4, hpsv2 1.2.0, clip-anytorch 2.6.0 (OpenAI's CLIP) and image-reward 1.5, on the CPU.
"""

import pytest
import torch
from helpers import parity

from recast_lightning.prompts.prompt import Prompt

GOLDEN = {
    "clip_score": [0.0118576, -0.0185892, 0.0262058, 0.0301399],
    "pickscore": [0.2674298, -0.0065141, -0.1291522, 0.1445259],
    "hpsv2": [0.2349218, 0.075338, -0.253529, -0.0953625],
    "aesthetic": [0.2889706, 1.0573311, 0.6843098, 0.1999887],
    "image_reward": [-0.4671602, -2.8355577, -3.5926991, -4.3418331],
}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    parity.save(folder)
    return parity.rewards(folder)


@pytest.mark.parametrize("name", GOLDEN)
def test_scores_are_those_of_the_original_package(rewards, name):
    cases = zip(parity.PICTURES, parity.PROMPTS, strict=True)
    scores = [rewards[name]([parity.picture(*size, i)], [Prompt(text)]) for i, (size, text) in enumerate(cases)]
    torch.testing.assert_close(torch.cat(scores), torch.tensor(GOLDEN[name]), atol=2e-6, rtol=0)
