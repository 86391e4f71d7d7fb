"""Prompts that quote a text to be drawn."""

from itertools import product

from recast_lightning.prompts.ocr_words import KINDS, SETTINGS, STYLES
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.sets import Family


def ocr_families() -> list[Family]:
    """Sentences that quote one text each: texts and scenes of each kind, in all styles and settings."""

    def family(kind: str) -> Family:
        scenes, texts = KINDS[kind]
        frames = list(product(STYLES, scenes, SETTINGS))

        def make(number: int) -> Prompt:
            i, j = divmod(number, len(frames))
            style, scene, setting = frames[j]
            sentence = scene.format(f'"{texts[i]}"')
            return Prompt(f"{style} {sentence}, {setting}.")

        weight = 0.4 if kind == "word" else 1  # single words are rare in published sets
        return Family(kind, weight, len(texts) * len(frames), make)

    return [family(kind) for kind in KINDS]
