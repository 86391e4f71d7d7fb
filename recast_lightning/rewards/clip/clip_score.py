"""ClipScore: how well an image agrees with its prompt, by CLIP."""

from torch import Tensor

from recast_lightning.rewards.base import DType
from recast_lightning.rewards.clip.reward import ClipSimilarity


class ClipScore(ClipSimilarity):
    r"""CLIP similarity, :math:`\exp(s) \cos(e_\text{image}, e_\text{text}) / 100` with the model's logit scale s.

    The published models have exp(s) = 100, so the score is their cosine; typical values lie in 0.20...0.35.

    Args:
        model: ``signboard:clip``, a local folder with a transformers CLIPModel, or a hub id.
        processor: Where tokenizer and image statistics come from. None: the folder of the model.
        dtype: Precision of the model.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass to the images; scores are then not exactly the published ones.
    """

    name = "clip_score"
    version = "openai/clip-vit-large-patch14"
    licence = "not verified (code: MIT)"

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        *,
        processor: str | None = None,
        dtype: DType = "float32",
        batch_size: int = 64,
        differentiable: bool = False,
    ) -> None:
        super().__init__(model, processor, dtype, batch_size, differentiable)

    def from_cosine(self, cosine: Tensor, logit_scale: Tensor) -> Tensor:
        """Turn cosine similarities [B] into scores [B]."""
        return cosine * logit_scale / 100
