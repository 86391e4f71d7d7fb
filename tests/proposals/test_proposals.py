import json

import pytest
import torch
from PIL import Image

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.folder import FolderProposals
from recast_lightning.proposals.renderer import RendererProposals
from recast_lightning.signboard.world import make_prompts


def test_the_renderer_draws_signboard_prompts_and_refuses_others():
    prompts = make_prompts(3, 0, "train")
    source = RendererProposals()
    source.validate(prompts)
    images = source.images(prompts, 64, 64)
    assert images.shape == (3, 3, 64, 64)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    with pytest.raises(ValueError, match="not a Signboard prompt"):
        source.validate([Prompt("a dog")])


def test_a_folder_is_looked_up_by_prompt_and_scaled_to_cover(tmp_path):
    Image.new("RGB", (128, 64), (255, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "prompt": "a red field"}) + "\n")
    source = FolderProposals(str(tmp_path))
    images = source.images([Prompt("a red field")], 32, 32)
    torch.testing.assert_close(images, torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1).expand(1, 3, 32, 32))
    with pytest.raises(ValueError, match="no picture for 1 of 2 prompts, first 'a dog'"):
        source.validate([Prompt("a red field"), Prompt("a dog")])


def test_a_folder_without_its_list_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no metadata\.jsonl"):
        FolderProposals(str(tmp_path)).validate([])
