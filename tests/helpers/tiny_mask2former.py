"""Tiny Mask2Formers of the true architecture, saved by transformers and in the layout of OpenMMLab's (mmdet 2.x) file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers import tiny_clip
from torch import Tensor
from torch.nn import functional as F
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector

DEPTHS, HEADS, WINDOW, WIDTH = (2, 1, 1, 1), (1, 2, 2, 4), 3, 8
ENCODER_LAYERS, DECODER_LAYERS = 2, 2
SMALL = {"short_side": 64, "long_side": 100}


def build(seed: int = 0, num_labels: int = 80) -> Mask2FormerForUniversalSegmentation:
    torch.manual_seed(seed)
    swin = SwinConfig(
        embed_dim=WIDTH,
        depths=list(DEPTHS),
        num_heads=list(HEADS),
        window_size=WINDOW,
        drop_path_rate=0.3,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=ENCODER_LAYERS,
        encoder_feedforward_dim=48,
        decoder_layers=DECODER_LAYERS + 1,
        dim_feedforward=40,
        num_attention_heads=4,
        num_queries=10,
        num_labels=num_labels,
    )
    model = Mask2FormerForUniversalSegmentation(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # away from 0 and 1, so that swapping two shows
            if name.startswith("model.pixel_level_module.encoder.swin.layernorm"):
                continue
            start = 0 if name.endswith("decoder.level_embed") else parameter  # left unset by transformers
            parameter.copy_(start + 0.1 * torch.randn(parameter.shape))
        model.class_predictor.weight *= 6  # some classes certain
    return model


def swap_rows_and_channels(width: int) -> Tensor:
    """For each of mmdet's 4 * width channels after unfolding 2 x 2 patches, its number in transformers' order.

    Found by merging a picture in which every value is its own number.
    """
    picture = torch.arange(width * 4.0).reshape(1, width, 2, 2)
    mmdet = F.unfold(picture, 2, stride=2)[0, :, 0]
    corners = [picture[0, :, row, column] for column in (0, 1) for row in (0, 1)]
    place = {int(value): i for i, value in enumerate(torch.cat(corners))}
    return torch.tensor([place[int(value)] for value in mmdet])


def relative_position_index() -> Tensor:
    """mmdet's table of differences between the places in a window: [WINDOW², WINDOW²]."""
    step = torch.arange(0, WINDOW * (2 * WINDOW - 1), 2 * WINDOW - 1)
    numbers = (step[:, None] + torch.arange(WINDOW)[None]).reshape(1, -1)
    return (numbers + numbers.T).flip(1).contiguous()


def to_openmmlab(model: Mask2FormerForUniversalSegmentation) -> dict[str, Tensor]:
    """The weights of a model by the names and in the order of mmdet 2.x."""
    own = model.state_dict()
    out: dict[str, Tensor] = {}

    def take(name: str, source: str, kinds: str = "weight bias") -> None:
        for kind in kinds.split():
            out[f"{name}.{kind}"] = own[f"{source}.{kind}"]

    def fuse(name: str, source: str, joint: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{name}{joint}{kind}"] = torch.cat([own[f"{source}.{part}_proj.{kind}"] for part in "qkv"])

    swin = "model.pixel_level_module.encoder.swin."
    take("backbone.patch_embed.projection", f"{swin}embeddings.patch_embeddings.projection")
    take("backbone.patch_embed.norm", f"{swin}embeddings.norm")
    for s, depth in enumerate(DEPTHS):
        for b in range(depth):
            block, source = f"backbone.stages.{s}.blocks.{b}.", f"{swin}encoder.layers.{s}.blocks.{b}."
            take(f"{block}norm1", f"{source}layernorm_before")
            table = "relative_position_bias_table"
            take(f"{block}attn.w_msa", f"{source}attention.relative_position_bias", table)
            out[f"{block}attn.w_msa.relative_position_index"] = relative_position_index()
            fuse(f"{block}attn.w_msa.qkv", f"{source}attention", ".")
            take(f"{block}attn.w_msa.proj", f"{source}attention.o_proj")
            take(f"{block}norm2", f"{source}layernorm_after")
            take(f"{block}ffn.layers.0.0", f"{source}mlp.fc1")
            take(f"{block}ffn.layers.1", f"{source}mlp.fc2")
        if s < 3:
            down, source = f"backbone.stages.{s}.downsample.", f"{swin}encoder.layers.{s}.downsample."
            order = swap_rows_and_channels(WIDTH * 2**s)
            out[f"{down}norm.weight"] = own[f"{source}norm.weight"][order]
            out[f"{down}norm.bias"] = own[f"{source}norm.bias"][order]
            out[f"{down}reduction.weight"] = own[f"{source}reduction.weight"][:, order]
    for s in range(4):
        take(f"backbone.norm{s}", f"model.pixel_level_module.encoder.hidden_states_norms.stage{s + 1}")

    head, pixel, source = "panoptic_head.", "panoptic_head.pixel_decoder.", "model.pixel_level_module.decoder."
    for i in range(3):
        take(f"{pixel}input_convs.{i}.conv", f"{source}input_projections.{i}.0")
        take(f"{pixel}input_convs.{i}.gn", f"{source}input_projections.{i}.1")
    for i in range(ENCODER_LAYERS):
        layer, inner = f"{pixel}encoder.layers.{i}.", f"{source}encoder.layers.{i}."
        for part in ("sampling_offsets", "attention_weights", "value_proj", "output_proj"):
            take(f"{layer}attentions.0.{part}", f"{inner}self_attn.{part}")
        take(f"{layer}ffns.0.layers.0.0", f"{inner}fc1")
        take(f"{layer}ffns.0.layers.1", f"{inner}fc2")
        take(f"{layer}norms.0", f"{inner}self_attn_layer_norm")
        take(f"{layer}norms.1", f"{inner}final_layer_norm")
    out[f"{pixel}level_encoding.weight"] = own[f"{source}level_embed"]
    take(f"{pixel}lateral_convs.0.conv", f"{source}adapter_1.0", "weight")
    take(f"{pixel}lateral_convs.0.gn", f"{source}adapter_1.1")
    take(f"{pixel}output_convs.0.conv", f"{source}layer_1.0", "weight")
    take(f"{pixel}output_convs.0.gn", f"{source}layer_1.1")
    take(f"{pixel}mask_feature", f"{source}mask_projection")

    source = "model.transformer_module."
    for i in range(DECODER_LAYERS):
        layer, inner = f"{head}transformer_decoder.layers.{i}.", f"{source}decoder.layers.{i}."
        take(f"{layer}attentions.0.attn", f"{inner}cross_attn", "in_proj_weight in_proj_bias")
        take(f"{layer}attentions.0.attn.out_proj", f"{inner}cross_attn.out_proj")
        fuse(f"{layer}attentions.1.attn", f"{inner}self_attn", ".in_proj_")
        take(f"{layer}attentions.1.attn.out_proj", f"{inner}self_attn.out_proj")
        take(f"{layer}ffns.0.layers.0.0", f"{inner}fc1")
        take(f"{layer}ffns.0.layers.1", f"{inner}fc2")
        for n, norm in enumerate(("cross_attn_layer_norm", "self_attn_layer_norm", "final_layer_norm")):
            take(f"{layer}norms.{n}", f"{inner}{norm}")
    take(f"{head}transformer_decoder.post_norm", f"{source}decoder.layernorm")
    take(f"{head}query_embed", f"{source}queries_embedder", "weight")
    take(f"{head}query_feat", f"{source}queries_features", "weight")
    take(f"{head}level_embed", f"{source}level_embed", "weight")
    take(f"{head}cls_embed", "class_predictor")
    for mmdet, number in ((0, 0), (2, 1), (4, 2)):
        take(f"{head}mask_embed.{mmdet}", f"{source}decoder.mask_predictor.mask_embedder.{number}.0")
    out[f"{head}loss_cls.class_weight"] = torch.ones(81)
    return {name: value.clone() for name, value in out.items()}


def save_openmmlab(path: Path, state: dict[str, Tensor]) -> None:
    """As mmcv 1.x saves it."""
    torch.save(
        {"meta": {"epoch": 50, "CLASSES": ("person", "bicycle"), "config": "model = dict()"}, "state_dict": state}, path
    )


@dataclass
class Files:
    """One model in both layouts (`transformers`, `openmmlab.pth`), its weights by mmdet's names, and a CLIP."""

    root: Path
    model: Mask2FormerForUniversalSegmentation
    state: dict[str, Tensor]
    clip: str

    def detector(self, name: str = "openmmlab.pth", **options: Any) -> Mask2FormerDetector:
        return Mask2FormerDetector(str(self.root / name), clip=self.clip, **(SMALL | options))


def save_all(root: Path) -> Files:
    model = build()
    model.save_pretrained(root / "transformers")
    state = to_openmmlab(model)
    save_openmmlab(root / "openmmlab.pth", state)
    tiny_clip.save_transformers(root / "clip", quick_gelu=True)
    return Files(root, model, state, str(root / "clip"))
