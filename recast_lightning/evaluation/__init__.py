"""Evaluation of the averaged policy on fixed prompts and noise."""

from recast_lightning.evaluation.batches import EvaluationBatch, EvaluationBatches
from recast_lightning.evaluation.evaluator import Evaluation, Evaluator
from recast_lightning.evaluation.metrics import EvaluationMetrics

__all__ = ["Evaluation", "EvaluationBatch", "EvaluationBatches", "EvaluationMetrics", "Evaluator"]
