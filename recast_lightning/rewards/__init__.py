"""Reward models: one contract (:class:`RewardModel`), one file a reward; importing them is cheap."""

from recast_lightning.rewards.aesthetic import Aesthetic
from recast_lightning.rewards.base import RewardModel
from recast_lightning.rewards.clip_score import ClipScore
from recast_lightning.rewards.detectors import Detection, Detector, Failure, Hint, SignboardDetector
from recast_lightning.rewards.geneval import GenEval
from recast_lightning.rewards.hpsv2 import HPSv2
from recast_lightning.rewards.hpsv3 import HPSv3
from recast_lightning.rewards.http_reward import HTTPReward
from recast_lightning.rewards.image_reward import ImageReward
from recast_lightning.rewards.mask2former import Mask2FormerDetector
from recast_lightning.rewards.ocr import OCR
from recast_lightning.rewards.pickscore import PickScore
from recast_lightning.rewards.unified_reward import UnifiedReward

__all__ = [
    "OCR",
    "Aesthetic",
    "ClipScore",
    "Detection",
    "Detector",
    "Failure",
    "GenEval",
    "HPSv2",
    "HPSv3",
    "HTTPReward",
    "Hint",
    "ImageReward",
    "Mask2FormerDetector",
    "PickScore",
    "RewardModel",
    "SignboardDetector",
    "UnifiedReward",
]
