"""Reward models: one contract (:class:`RewardModel`), one file a reward; importing them is cheap."""

from recast_lightning.rewards.base import RewardModel
from recast_lightning.rewards.clip_score import ClipScore
from recast_lightning.rewards.detectors import Detection, Detector, SignboardDetector
from recast_lightning.rewards.geneval import GenEval
from recast_lightning.rewards.hpsv2 import HPSv2
from recast_lightning.rewards.ocr import OCR
from recast_lightning.rewards.pickscore import PickScore

__all__ = [
    "OCR",
    "ClipScore",
    "Detection",
    "Detector",
    "GenEval",
    "HPSv2",
    "PickScore",
    "RewardModel",
    "SignboardDetector",
]
