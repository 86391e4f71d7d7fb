"""Evaluation prompts, dealt out to processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class ShardedBatches(torch.utils.data.IterableDataset[list[tuple[int, bool]]]):
    """Batches of (index, real) for one process: all processes get as many, filled up with repeats that are not real."""

    def __init__(self, count: int, batch_size: int, rank: int, world_size: int) -> None:
        per_rank = -(-count // world_size)
        places = range(rank, per_rank * world_size, world_size)
        self.items = [(place % count, place < count) for place in places]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, bool]]]:
        for start in range(0, len(self.items), self.batch_size):
            yield self.items[start : start + self.batch_size]
