"""Sets of training prompts, made to order.

A set is put together from families of prompts. A family numbers all its prompts, so drawing numbers without replacement
gives no prompt twice, and the size of the largest set is known.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recast_lightning.prompts.prompt import Prompt


@dataclass(frozen=True)
class Family:
    """Prompts of one kind, numbered.

    Attributes:
        name: What the summary calls it.
        weight: Its share of a set, relative to the others', as far as `size` goes.
        size: How many different prompts there are.
        make: The prompt of a number below `size`.
    """

    name: str
    weight: float
    size: int
    make: Callable[[int], Prompt]


def compose(families: Sequence[Family], count: int, rng: random.Random) -> list[Prompt]:
    """Draw `count` different prompts in random order.

    Raises:
        ValueError: If there are not so many.
    """
    shares = _shares(families, count)
    pairs = zip(families, shares, strict=True)
    prompts = [family.make(number) for family, share in pairs for number in rng.sample(range(family.size), share)]
    rng.shuffle(prompts)
    return prompts


def _shares(families: Sequence[Family], count: int) -> list[int]:
    """Split `count` by weight; what a family is too small for goes to the others. Largest remainders round up."""
    check_count(count, sum(family.size for family in families))
    shares = [family.size for family in families]
    rest, free = count, set(range(len(families)))
    while free:
        total = sum(families[i].weight for i in free)
        quotas = {i: rest * families[i].weight / total for i in free}
        full = {i for i in free if families[i].size <= quotas[i]}
        if not full:
            shares = [math.floor(quotas.get(i, share)) for i, share in enumerate(shares)]
            by_remainder = sorted(free, key=lambda i: (shares[i] - quotas[i], i))
            for i in by_remainder[: count - sum(shares)]:
                shares[i] += 1
            break
        free -= full
        rest -= sum(families[i].size for i in full)
    return shares


def check_count(count: int, most: int) -> None:
    """Raise ValueError unless `count` is 1 to `most`, the number of different prompts there are."""
    if not 1 <= count <= most:
        raise ValueError(f"-n is {count}: expected 1 to {most}, for there are {most} different prompts of this kind.")
