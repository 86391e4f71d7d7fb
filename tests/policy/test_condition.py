"""Rows of named tensors, of any number of tokens."""

import torch

from recast_lightning.policy import Condition


def row(tokens: int, value: float) -> Condition:
    tensors = {
        "embeddings": torch.full((1, tokens, 2), value),
        "mask": torch.ones(1, tokens, dtype=torch.bool),
        "pooled": torch.full((1, 3), value),
    }
    return Condition(tensors)


def test_rows_of_different_length_are_padded_behind_and_masked():
    stacked = Condition.stack([row(2, 1.0), row(4, 2.0)])
    assert stacked.tensors["embeddings"][:, :, 0].tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]
    assert stacked.tensors["mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert stacked.tensors["pooled"].tolist() == [[1] * 3, [2] * 3]


def test_rows_are_taken_from_all_tensors():
    taken = Condition.stack([row(2, 1.0), row(2, 2.0), row(2, 3.0)])[torch.tensor([2, 0, 2])]
    assert taken.tensors["pooled"][:, 0].tolist() == taken.tensors["embeddings"][:, 0, 0].tolist() == [3, 1, 3]
    assert len(taken.to(torch.device("meta")).tensors["mask"]) == 3
