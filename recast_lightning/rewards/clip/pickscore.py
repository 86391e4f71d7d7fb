"""PickScore: a CLIP fine-tuned on people's choices between images (Kirstain et al. 2023)."""

from torch import Tensor

from recast_lightning.rewards.base import DType
from recast_lightning.rewards.clip.reward import ClipSimilarity


class PickScore(ClipSimilarity):
    r"""Human preference, :math:`\exp(s) \cos(e_\text{image}, e_\text{text}) / 26` with the model's logit scale s.

    The division, after Flow-GRPO and DiffusionNFT, brings the usual 18...24 to 0.70...0.92; nothing clips it at 1.

    Args:
        model: ``signboard:pickscore``, a local folder with a transformers CLIPModel, or a hub id.
        processor: Where tokenizer and image statistics come from. None: the folder of the model if it has a tokenizer,
            else ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K``, which PickScore_v1 was trained with.
        dtype: Precision of the model.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass to the images; scores are then not exactly the published ones.
    """

    name = "pickscore"
    version = "PickScore_v1"
    licence = "not verified (code: MIT)"
    score_range = (-100 / 26, 100 / 26)
    fallback_processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        *,
        processor: str | None = None,
        dtype: DType = "float32",
        batch_size: int = 64,
        differentiable: bool = False,
    ) -> None:
        super().__init__(model, processor, dtype, batch_size, differentiable)

    def from_cosine(self, cosine: Tensor, logit_scale: Tensor) -> Tensor:
        """Turn cosine similarities [B] into scores [B]."""
        return cosine * logit_scale / 26
