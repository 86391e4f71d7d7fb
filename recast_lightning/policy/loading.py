"""Loads parts of a diffusers pipeline, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recast_lightning.paths import reading


@dataclass(frozen=True)
class PipelineLoader:
    """Loads parts of one pipeline.

    Args:
        path: a folder or a hub id.
        class_name: of the pipeline, in diffusers.
        dtype: of the weights, but for the VAE.
        vae_dtype: of the VAE.
    """

    path: str
    class_name: str
    dtype: torch.dtype
    vae_dtype: torch.dtype = torch.float32

    @property
    def pipeline_class(self) -> Any:
        """The pipeline's class. Importing diffusers takes seconds."""
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # before diffusers is imported: it asks for processors we do not use
        transformers_logging.disable_progress_bar()
        import diffusers
        from diffusers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return getattr(diffusers, self.class_name)

    def load(self, what: str, without: Sequence[str]) -> Any:
        """The pipeline without some of its parts.

        Args:
            what: is wanted, for a sentence, e.g. `text encoders`.
            without: parts that are not loaded and None.

        Raises:
            UserError: if it is neither here nor on the hub.
        """
        # Under a default device, Lightning's while a module is configured, new weights would be made there.
        with reading(f"The policy found no {what}", self.path), torch.device("cpu"):
            return self.pipeline_class.from_pretrained(
                self.path,
                dtype={"default": self.dtype, "vae": self.vae_dtype},
                use_safetensors=True,
                **dict.fromkeys(without),
            )

    def folder(self, without: Sequence[str]) -> Path:
        """Where the pipeline's files are, fetched from the hub if need be.

        Raises:
            UserError: if they are neither here nor on the hub.
        """
        if Path(self.path).is_dir():
            return Path(self.path)
        with reading("The policy found no text encoders", self.path):
            return Path(self.pipeline_class.download(self.path, **dict.fromkeys(without)))
