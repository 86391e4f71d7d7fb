"""HPSv2: a CLIP fine-tuned on human preferences (Wu et al. 2023), in open_clip's or transformers' layout."""

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recast_lightning.paths import resolve
from recast_lightning.rewards.base import DType
from recast_lightning.rewards.checkpoints import SUFFIXES, fetch, load_strictly, read_tensors
from recast_lightning.rewards.clip.backbone import read_clip
from recast_lightning.rewards.clip.reward import ClipSimilarity
from recast_lightning.rewards.preprocessing import longest_side_pad

if TYPE_CHECKING:
    from transformers import CLIPModel


class HPSv2(ClipSimilarity):
    r"""Human preference, :math:`\cos(e_\text{image}, e_\text{text})`; version 2.1 lies in 0.15...0.35.

    Images keep their proportions: the longer side is scaled to the model's size and the rest is black.

    Args:
        model: ``signboard:hpsv2``, a local open_clip file (.pt, .bin or .safetensors), a local folder with `filename`
            or with a transformers CLIPModel, or a hub id.
        filename: The open_clip file to take from a folder or hub repository. None: it is in transformers' layout.
        processor: Where tokenizer and image statistics come from. None: the folder of the model if it has a tokenizer,
            else ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K``, the architecture that HPSv2 starts from.
        dtype: Precision of the model.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass to the images; scores are then not exactly the published ones.
    """

    name = "hpsv2"
    version = "HPS_v2.1"
    licence = "not verified (code: Apache-2.0)"
    fallback_processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    _fit = staticmethod(longest_side_pad)

    def __init__(
        self,
        model: str = "xswu/HPSv2",
        *,
        filename: str | None = "HPS_v2.1_compressed.pt",
        processor: str | None = None,
        dtype: DType = "float32",
        batch_size: int = 64,
        differentiable: bool = False,
    ) -> None:
        super().__init__(model, processor, dtype, batch_size, differentiable)
        self.filename = filename

    def from_cosine(self, cosine: Tensor, logit_scale: Tensor) -> Tensor:
        """Turn cosine similarities [B] into scores [B]."""
        return cosine

    def clean(self, text: str) -> str:
        """Mend encodings and quotation marks and resolve HTML, as open_clip's tokenizer does and transformers' does not."""
        import ftfy

        return html.unescape(html.unescape(ftfy.fix_text(text))).strip().lower()

    def resolve_model(self) -> str:
        """The local folder, local file, or hub id of the model."""
        path = Path(resolve(self.model, f"{self.name} model"))
        if path.is_dir() and self.filename is not None and (path / self.filename).is_file():
            return str(path / self.filename)
        return str(path) if path.suffix in SUFFIXES and path.is_file() else super().resolve_model()

    def _locate(self) -> str:
        path = self.resolve_model()
        return path if Path(path).exists() or self.filename is None else fetch(path, self.filename, self.name)

    @staticmethod
    def _read(path: str, dtype: torch.dtype, user: str) -> "CLIPModel":
        return load_open_clip(path).to(dtype) if Path(path).is_file() else read_clip(path, dtype, user)


def load_open_clip(path: str) -> "CLIPModel":
    """Read a ViT CLIP that open_clip saved (plain GELU, as ViT-H-14) into a transformers CLIPModel, strictly.

    Sizes are read off the tensors. Head counts are not in them: heads are 64 wide, or 80 in the 1280-wide vision tower
    of ViT-H-14.

    Args:
        path: A .pt file (a state dict, or a dict that holds one as ``state_dict``) or a .safetensors file.

    Raises:
        ValueError: If the tensors are not those of such a model.
    """
    from accelerate import init_empty_weights
    from transformers import CLIPConfig, CLIPModel

    source = read_tensors(path)
    try:
        width, vision_width = source["ln_final.weight"].shape[0], source["visual.ln_post.weight"].shape[0]
        patch, patches = source["visual.conv1.weight"].shape[-1], source["visual.positional_embedding"].shape[0] - 1
        embed = source["text_projection"].shape[1]
        common = {"hidden_act": "gelu", "projection_dim": embed}
        text = {
            "hidden_size": width,
            "intermediate_size": source["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_attention_heads": _heads(width),
            "num_hidden_layers": _count_layers(source, r"transformer\.resblocks\.(\d+)\."),
            "vocab_size": source["token_embedding.weight"].shape[0],
            "max_position_embeddings": source["positional_embedding"].shape[0],
            "bos_token_id": source["token_embedding.weight"].shape[0] - 2,
            "eos_token_id": source["token_embedding.weight"].shape[0] - 1,  # open_clip pools at the largest id
            "pad_token_id": source["token_embedding.weight"].shape[0] - 1,
        }
        vision = {
            "hidden_size": vision_width,
            "intermediate_size": source["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_attention_heads": _heads(vision_width),
            "num_hidden_layers": _count_layers(source, r"visual\.transformer\.resblocks\.(\d+)\."),
            "patch_size": patch,
            "image_size": patch * round(patches**0.5),
        }
    except KeyError as error:
        raise ValueError(f"{path} is no open_clip ViT checkpoint: it has no tensor {error}.") from error
    except IndexError as error:
        raise ValueError(f"{path} is no open_clip ViT checkpoint: a tensor has too few dimensions.") from error
    if (embed, vision_width) in _OPENAI_SIZES or "input_resolution" in source:
        raise ValueError(
            f"{path} has the sizes or names of OpenAI's CLIP, which computes with quick GELU: "
            "HPSv2 is a ViT-H-14, with plain GELU."
        )

    config = CLIPConfig(text_config={**text, **common}, vision_config={**vision, **common}, projection_dim=embed)
    with init_empty_weights(include_buffers=False):
        model = CLIPModel(config)
    load_strictly(model, from_open_clip(source), path, "a CLIP model of its own sizes")
    return model


_OPENAI_SIZES = {(512, 768), (768, 1024)}  # widths of embedding and vision tower: ViT-B/32 and B/16, ViT-L/14


def _heads(width: int) -> int:
    return width // 80 if width == 1280 else max(1, width // 64)


def _count_layers(source: dict[str, Tensor], pattern: str) -> int:
    return 1 + max((int(match.group(1)) for key in source if (match := re.match(pattern, key))), default=-1)


_TOP = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # transformers' spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def from_open_clip(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename an open_clip state dict to transformers' names; unknown names stay, for strict loading to report."""
    target: dict[str, Tensor] = {}
    for key, value in source.items():
        block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)", key)
        if block is None:
            target[_TOP.get(key, key)] = value.T.contiguous() if key in ("text_projection", "visual.proj") else value
            continue
        prefix = f"{'vision_model' if block.group(1) else 'text_model'}.encoder.layers.{block.group(2)}."
        name = block.group(3)
        if name.startswith("attn.in_proj_") and value.ndim and value.shape[0] % 3 == 0:
            kind = name.removeprefix("attn.in_proj_")
            for projection, part in zip("qkv", value.chunk(3), strict=True):
                target[f"{prefix}self_attn.{projection}_proj.{kind}"] = part
        else:
            module, _, kind = name.rpartition(".")
            target[f"{prefix}{_BLOCK.get(module, module)}.{kind}"] = value
    return target
