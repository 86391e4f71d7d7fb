"""Aesthetic: how people would rate a picture, whatever its prompt (LAION's improved aesthetic predictor)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recast_lightning.paths import resolve
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import DType, PositiveMap
from recast_lightning.rewards.checkpoints import check_file, fetch, load_strictly, read_tensors
from recast_lightning.rewards.clip.backbone import ClipBackbone
from recast_lightning.rewards.clip.reward import ClipReward
from recast_lightning.rewards.preprocessing import shortest_side_crop_to_even
from recast_lightning.rewards.score_head import ScoreHead


class Aesthetic(ClipReward):
    """LAION's improved aesthetic predictor on CLIP's unit-length image embedding; the prompt is ignored.

    Scores follow people's ratings from 1 to 10 and mostly lie in 4...7; nothing clips them. A model trained on them
    alone soon draws over-saturated pictures without texture.

    Args:
        clip: A local folder with a transformers CLIPModel, or a hub id. The published head fits the default only.
        head: The published head: a local file (.pth or .safetensors), a folder that holds `filename`, or a hub id. The
            default is a copy of LAION's ``sac+logos+ava1-l14-linearMSE.pth`` on the hub.
        filename: The file to take from a folder or hub repository.
        processor: Where tokenizer and image statistics come from. None: the folder of the CLIP model.
        dtype: Precision of the CLIP model; the head computes in float32.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass to the images; scores are then not exactly the published ones.
        positive_map: See :meth:`RewardModel.positive`; scores below 0 are possible but not usual.
    """

    name = "aesthetic"
    version = "sac+logos+ava1-l14-linearMSE"
    licence = "Apache-2.0 (CLIP below it: not verified)"
    score_range = (-math.inf, math.inf)
    _fit = staticmethod(shortest_side_crop_to_even)

    def __init__(
        self,
        clip: str = "openai/clip-vit-large-patch14",
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        *,
        filename: str = "aesthetic-model.pth",
        processor: str | None = None,
        dtype: DType = "float32",
        batch_size: int = 64,
        differentiable: bool = False,
        positive_map: PositiveMap | None = "floor",
    ) -> None:
        super().__init__(clip, processor, dtype, batch_size, differentiable, positive_map)
        self.head = head
        self.filename = filename

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]); returns [B]."""
        clip, head = self.load()
        with torch.inference_mode(False):  # weights moved in inference mode could never pass gradients on
            head.to(self._device)
        scores: Tensor = head(clip.to(self._device).embed_images(images))
        return scores

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """
        super().validate()
        check_file(self.head, self.filename, f"{self.name} head")

    def _load(self) -> tuple[ClipBackbone, ScoreHead]:
        path = fetch(resolve(self.head, f"{self.name} head"), self.filename, self.name)
        tensors = read_tensors(path)
        first = tensors.get("layers.0.weight", torch.empty(0, 0))
        if first.ndim != 2:
            raise ValueError(f"{path} does not fit the aesthetic head: layers.0.weight has {first.ndim} dimensions.")
        head = ScoreHead(first.shape[1]).eval().requires_grad_(False)
        load_strictly(head, tensors, path, "the aesthetic head")
        head.float()
        clip = self._load_clip()
        width = clip.model.config.projection_dim
        if first.shape[1] != width:
            raise ValueError(
                f"{path} reads embeddings of {first.shape[1]} numbers, and {self.model} gives {width}: "
                "name the CLIP model that the head was trained on."
            )
        return clip, head
