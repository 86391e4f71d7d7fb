"""Prompts of Signboard: the first ones of its training split, and all scenes there are."""

from collections.abc import Iterator
from itertools import islice, product

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.sets import check_count
from recast_lightning.signboard import world


def first_prompts(count: int, seed: int) -> list[Prompt]:
    """The first prompts of Signboard's training split."""
    fit = (scene for scene in _all_scenes() if world.split_of(scene.text) == "train")
    check_count(count, sum(1 for _ in islice(fit, count if count > 0 else None)))
    return world.make_prompts(count, seed, "train")


def _all_scenes() -> Iterator[world.Scene]:
    """Every scene that `world.random_scene` can draw."""
    kinds = [world.Group(shape, color, 1) for shape, color in product(world.SHAPES, world.COLORS)]
    relations: list[tuple[str, tuple[world.Group, ...]]] = [
        ("and", (world.Group(g.shape, g.color, n),)) for g in kinds for n in (1, 2, 3)
    ]
    for a, b in product(kinds, kinds):
        if a.shape != b.shape and a.color != b.color:
            for m, n in ((1, 1), (1, 2), (2, 1)):
                pair = (world.Group(a.shape, a.color, m), world.Group(b.shape, b.color, n))
                relations += [(relation, pair) for relation in world.RELATIONS]
    for (relation, group), above, word in product(relations, (True, False), world.WORDS):
        yield world.Scene(group, relation, above, word)
