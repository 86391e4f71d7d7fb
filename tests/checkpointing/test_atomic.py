"""A checkpoint that could not be read again is not written."""

import numpy as np
import pytest
import torch

from recast_lightning.checkpointing.atomic import AtomicCheckpointIO
from recast_lightning.errors import UserError


def test_what_cannot_be_read_again_is_named_and_the_checkpoint_before_it_stays(tmp_path):
    path, good = tmp_path / "last.ckpt", {"state_dict": {"w": torch.ones(2)}, "callbacks": {"Mine": {"seen": [1]}}}
    AtomicCheckpointIO().save_checkpoint(good, path)
    bad = {**good, "callbacks": {"Fine": {}, "Mine": {"seen": [1, np.float64(2)]}}}
    with pytest.raises(UserError) as refused:
        AtomicCheckpointIO().save_checkpoint(bad, path)
    said = f"The checkpoint {str(path)!r} was not written, since it['callbacks']['Mine']['seen'][1] is a numpy.float64"
    assert str(refused.value).startswith(said)
    assert torch.load(path, weights_only=True)["callbacks"] == good["callbacks"]
