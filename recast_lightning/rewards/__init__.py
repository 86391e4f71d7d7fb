"""Reward models: one contract (:class:`RewardModel`), one file a reward; importing them is cheap."""

from recast_lightning.rewards.base import RewardModel
from recast_lightning.rewards.blip.image_reward import ImageReward
from recast_lightning.rewards.clip.aesthetic import Aesthetic
from recast_lightning.rewards.clip.clip_score import ClipScore
from recast_lightning.rewards.clip.hpsv2 import HPSv2
from recast_lightning.rewards.clip.pickscore import PickScore
from recast_lightning.rewards.geneval.detection import Detection, Detector, Failure, Hint
from recast_lightning.rewards.geneval.geneval import GenEval
from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector
from recast_lightning.rewards.geneval.signboard_detector import SignboardDetector
from recast_lightning.rewards.hpsv3.hpsv3 import HPSv3
from recast_lightning.rewards.ocr.ocr import OCR
from recast_lightning.rewards.remote.http_reward import HTTPReward
from recast_lightning.rewards.remote.unified_reward import UnifiedReward

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
