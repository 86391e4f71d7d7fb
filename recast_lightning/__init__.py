"""recast_lightning: multi-reward fine-tuning of text-to-image diffusion models with measured credit in time."""

__version__ = "0.1.0"
