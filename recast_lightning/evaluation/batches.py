"""Evaluation prompts, dealt out to processes in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from recast_lightning.prompts import Prompt


@dataclass
class EvaluationBatch:
    """Prompts that one process evaluates at once.

    Attributes:
        prompts: [B].
        index: their places in the source, [B].
        occurrence: how often the same text came before, [B]: it keys the noise.
        real: False for the repeats that fill up the last process's share, [B]; they count for nothing.
    """

    prompts: list[Prompt]
    index: list[int]
    occurrence: list[int]
    real: list[bool]


class EvaluationBatches(torch.utils.data.IterableDataset[EvaluationBatch]):
    """The batches of one process; all processes get as many.

    Args:
        prompts: all of them.
        batch_size: prompts evaluated at once.
        rank: number of the process.
        world_size: number of processes.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, rank: int, world_size: int) -> None:
        self.prompts, self.batch_size = prompts, batch_size
        seen: Counter[str] = Counter()
        self.occurrence = []
        for prompt in prompts:
            self.occurrence.append(seen[prompt.text])
            seen[prompt.text] += 1
        places = range(rank, -(-len(prompts) // world_size) * world_size, world_size)
        self.items = [(place % len(prompts), place < len(prompts)) for place in places]

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for start in range(0, len(self.items), self.batch_size):
            index, real = map(list, zip(*self.items[start : start + self.batch_size], strict=True))
            prompts, occurrence = [self.prompts[i] for i in index], [self.occurrence[i] for i in index]
            yield EvaluationBatch(prompts, index, occurrence, real)
