"""The LightningModule and the LightningDataModule, and what they need of Lightning."""

from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.module import RecastModule

__all__ = ["PromptDataModule", "RecastModule"]
