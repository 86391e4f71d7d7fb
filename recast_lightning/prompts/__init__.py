"""Prompts and their metadata, the files that they are read from, and sets of them made to order."""

from recast_lightning.prompts.prompt import Prompt, find_ocr_target
from recast_lightning.prompts.readers import read_prompts

__all__ = ["Prompt", "find_ocr_target", "read_prompts"]
