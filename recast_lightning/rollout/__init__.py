"""Rollouts: which samples a process draws, how they are scored, checked and served to training."""

from recast_lightning.rollout.collector import RolloutCollector
from recast_lightning.rollout.context import RunContext
from recast_lightning.rollout.finite import FiniteCheck, OnNonfinite, total_norm
from recast_lightning.rollout.items import TrainItems
from recast_lightning.rollout.metrics import check_failures
from recast_lightning.rollout.options import RolloutOptions, ScoringOptions
from recast_lightning.rollout.samples import RolloutBuffer, SampleId, TrainItem, check_sizes, plan_samples
from recast_lightning.rollout.sampling import encode_ahead, sample_latents
from recast_lightning.rollout.scoring import ScoringPool
from recast_lightning.rollout.step_means import StepMeans
from recast_lightning.rollout.stream import RolloutStream

__all__ = [
    "FiniteCheck",
    "OnNonfinite",
    "RolloutBuffer",
    "RolloutCollector",
    "RolloutOptions",
    "RolloutStream",
    "RunContext",
    "SampleId",
    "ScoringOptions",
    "ScoringPool",
    "StepMeans",
    "TrainItem",
    "TrainItems",
    "check_failures",
    "check_sizes",
    "encode_ahead",
    "plan_samples",
    "sample_latents",
    "total_norm",
]
