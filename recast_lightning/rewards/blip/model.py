"""The encoder of ImageReward: a BLIP text model that looks at an image, and a head that scores what it read."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from recast_lightning.rewards.checkpoints import load_strictly, read_tensors
from recast_lightning.rewards.score_head import ScoreHead

_UNUSED = re.compile(r"blip\.(vision_proj\.|text_proj\.|text_encoder\.embeddings\.position_ids$)")
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
}


class BlipScorer(nn.Module):
    """BLIP's text encoder with cross-attention to the image, and a score from its first token.

    Args:
        vision: Settings of transformers' BlipVisionModel.
        text: Settings of transformers' BlipTextModel.
    """

    def __init__(self, vision: dict[str, int], text: dict[str, int]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.image_size, self.vocabulary = vision["image_size"], text["vocab_size"]
        self.vision: Any = BlipVisionModel(BlipVisionConfig(**vision, layer_norm_eps=1e-6))
        # is_decoder builds the cross-attention; the forward pass below stays bidirectional.
        self.text: Any = BlipTextModel(
            BlipTextConfig(**text, encoder_hidden_size=vision["hidden_size"], layer_norm_eps=1e-12, is_decoder=True),
            add_pooling_layer=False,
        )
        self.mlp = ScoreHead(text["hidden_size"])

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Score normalised images against texts.

        Args:
            pixels: [B, 3, image_size, image_size].
            tokens: [B, L], beginning with the token that is read.
            mask: [B, L], 1 for text and 0 for padding.

        Returns:
            Scores [B], float32, not yet standardised.
        """
        seen = self.vision(pixel_values=pixels.to(self.vision.dtype)).last_hidden_state
        read = self.text(
            input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen, is_decoder=False
        ).last_hidden_state
        scores: Tensor = self.mlp(read[:, 0].float())
        return scores


def load_blip_scorer(path: str, dtype: torch.dtype) -> BlipScorer:
    """Read a file in the layout of ImageReward.pt, strictly, into a frozen model; the head stays in float32.

    Sizes are read off the tensors. Head counts are not in them: heads are 64 wide in both towers.

    Raises:
        ValueError: If the tensors are not those of such a model.
    """
    from accelerate import init_empty_weights

    source = read_tensors(path)
    try:
        with init_empty_weights(include_buffers=False):
            model = BlipScorer(*_sizes(source))
    except KeyError as error:
        raise ValueError(f"{path} is no ImageReward checkpoint: it has no tensor {error}.") from error
    except IndexError as error:
        raise ValueError(f"{path} is no ImageReward checkpoint: a tensor has too few dimensions.") from error
    load_strictly(model, from_published(source), path, "an ImageReward model of its own sizes")
    model.vision.to(dtype)
    model.text.to(dtype)
    model.mlp.float()
    return model.eval().requires_grad_(False)


def _sizes(source: dict[str, Tensor]) -> tuple[dict[str, int], dict[str, int]]:
    """Settings of the vision and the text model."""

    def shape(key: str) -> torch.Size:
        return source[f"blip.{key}"].shape

    def layers(pattern: str) -> int:
        return 1 + max((int(match.group(1)) for key in source if (match := re.match(pattern, key))), default=-1)

    width, text_width = shape("visual_encoder.pos_embed")[2], shape("text_encoder.embeddings.word_embeddings.weight")[1]
    patch = shape("visual_encoder.patch_embed.proj.weight")[3]
    vision = {
        "hidden_size": width,
        "intermediate_size": shape("visual_encoder.blocks.0.mlp.fc1.weight")[0],
        "num_hidden_layers": layers(r"blip\.visual_encoder\.blocks\.(\d+)\."),
        "num_attention_heads": max(1, width // 64),
        "patch_size": patch,
        "image_size": patch * round((shape("visual_encoder.pos_embed")[1] - 1) ** 0.5),
    }
    text = {
        "hidden_size": text_width,
        "intermediate_size": shape("text_encoder.encoder.layer.0.intermediate.dense.weight")[0],
        "num_hidden_layers": layers(r"blip\.text_encoder\.encoder\.layer\.(\d+)\."),
        "num_attention_heads": max(1, text_width // 64),
        "max_position_embeddings": shape("text_encoder.embeddings.position_embeddings.weight")[0],
        "vocab_size": shape("text_encoder.embeddings.word_embeddings.weight")[0],
    }
    return vision, text


def from_published(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of ImageReward.pt to those of :class:`BlipScorer`; unknown names stay, to be reported.

    The projections of BLIP's contrastive loss are in the file and take no part in the score.
    """
    target = {}
    for key, value in source.items():
        if _UNUSED.match(key):
            continue
        if key.startswith("blip.visual_encoder."):
            name = key.removeprefix("blip.visual_encoder.")
            if block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name):
                number, module, kind = block.groups()
                name = f"encoder.layers.{number}.{_BLOCK.get(module, module)}.{kind}"
            target[f"vision.{_VISION.get(name, name)}"] = value
        else:
            target[re.sub(r"^blip\.text_encoder\.", "text.", key)] = value
    return target
