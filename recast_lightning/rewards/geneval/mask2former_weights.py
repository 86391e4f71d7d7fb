"""Mask2Former from a transformers folder, a hub id, or a checkpoint of OpenMMLab (mmdet 2.x); strict in both directions.

Sources: Cheng et al. 2022 (arXiv 2112.01527); the names are those of OpenMMLab's published file and of transformers 5.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recast_lightning.paths import reading
from recast_lightning.rewards.checkpoints import check_fit, check_model_type, read_tensors, whole

if TYPE_CHECKING:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

_SWIN = "model.pixel_level_module.encoder.swin."
_PIXEL = "model.pixel_level_module.decoder."
_DECODER = "model.transformer_module.decoder."
_LEVELS, _POINTS = 3, 4  # of the deformable attention; fixed in transformers

# Of the model, not in the checkpoint: what Mask2Former does not use, and what only its loss does.
_NOT_STORED = {f"{_SWIN}layernorm.weight", f"{_SWIN}layernorm.bias", "criterion.empty_weight"}
# Of the checkpoint, not in the model: only the loss uses them.
_NOT_USED = re.compile(r"panoptic_head\.loss_(cls|mask|dice)\..+")
_INDEX = "relative_position_index"

# Modules of the checkpoint -> modules of the model. The last part of a name (weight, bias) stays.
_MODULES = {
    r"backbone\.patch_embed\.projection": _SWIN + "embeddings.patch_embeddings.projection",
    r"backbone\.patch_embed\.norm": _SWIN + "embeddings.norm",
    r"backbone\.norm0": "model.pixel_level_module.encoder.hidden_states_norms.stage1",
    r"backbone\.norm1": "model.pixel_level_module.encoder.hidden_states_norms.stage2",
    r"backbone\.norm2": "model.pixel_level_module.encoder.hidden_states_norms.stage3",
    r"backbone\.norm3": "model.pixel_level_module.encoder.hidden_states_norms.stage4",
    r"backbone\.stages\.(\d+)\.downsample\.(norm|reduction)": _SWIN + r"encoder.layers.\1.downsample.\2",
    r"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.conv": _PIXEL + r"input_projections.\1.0",
    r"panoptic_head\.pixel_decoder\.input_convs\.(\d+)\.gn": _PIXEL + r"input_projections.\1.1",
    r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.conv": _PIXEL + "adapter_1.0",
    r"panoptic_head\.pixel_decoder\.lateral_convs\.0\.gn": _PIXEL + "adapter_1.1",
    r"panoptic_head\.pixel_decoder\.output_convs\.0\.conv": _PIXEL + "layer_1.0",
    r"panoptic_head\.pixel_decoder\.output_convs\.0\.gn": _PIXEL + "layer_1.1",
    r"panoptic_head\.pixel_decoder\.mask_feature": _PIXEL + "mask_projection",
    r"panoptic_head\.query_embed": "model.transformer_module.queries_embedder",
    r"panoptic_head\.query_feat": "model.transformer_module.queries_features",
    r"panoptic_head\.level_embed": "model.transformer_module.level_embed",
    r"panoptic_head\.transformer_decoder\.post_norm": _DECODER + "layernorm",
    r"panoptic_head\.mask_embed\.0": _DECODER + "mask_predictor.mask_embedder.0.0",
    r"panoptic_head\.mask_embed\.2": _DECODER + "mask_predictor.mask_embedder.1.0",
    r"panoptic_head\.mask_embed\.4": _DECODER + "mask_predictor.mask_embedder.2.0",
    r"panoptic_head\.cls_embed": "class_predictor",
}
# The same inside the three kinds of layers that repeat.
_LAYERS = {
    r"backbone\.stages\.(\d+)\.blocks\.(\d+)\.": (
        _SWIN + r"encoder.layers.\1.blocks.\2.",
        {
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
            "attn.w_msa.proj": "attention.o_proj",
            "attn.w_msa": "attention.relative_position_bias",
            "ffn.layers.0.0": "mlp.fc1",
            "ffn.layers.1": "mlp.fc2",
        },
    ),
    r"panoptic_head\.pixel_decoder\.encoder\.layers\.(\d+)\.": (
        _PIXEL + r"encoder.layers.\1.",
        {
            "attentions.0.sampling_offsets": "self_attn.sampling_offsets",
            "attentions.0.attention_weights": "self_attn.attention_weights",
            "attentions.0.value_proj": "self_attn.value_proj",
            "attentions.0.output_proj": "self_attn.output_proj",
            "norms.0": "self_attn_layer_norm",
            "norms.1": "final_layer_norm",
            "ffns.0.layers.0.0": "fc1",
            "ffns.0.layers.1": "fc2",
        },
    ),
    r"panoptic_head\.transformer_decoder\.layers\.(\d+)\.": (
        _DECODER + r"layers.\1.",
        {
            "attentions.0.attn": "cross_attn",
            "attentions.0.attn.out_proj": "cross_attn.out_proj",
            "attentions.1.attn.out_proj": "self_attn.out_proj",
            "norms.0": "cross_attn_layer_norm",
            "norms.1": "self_attn_layer_norm",
            "norms.2": "final_layer_norm",
            "ffns.0.layers.0.0": "fc1",
            "ffns.0.layers.1": "fc2",
        },
    ),
}


def load_mask2former(path: str, num_labels: int) -> "Mask2FormerForUniversalSegmentation":
    """Read Mask2Former from a local folder, a hub id, or an OpenMMLab file (.pth).

    Raises:
        ValueError: If it is not there, not whole, or not made for `num_labels` classes.
    """
    model = load_openmmlab(path) if Path(path).is_file() else _load_transformers(path)
    if model.config.num_labels != num_labels:
        raise ValueError(f"{path} tells {model.config.num_labels} classes: expected the {num_labels} things of COCO.")
    return model


def _load_transformers(path: str) -> "Mask2FormerForUniversalSegmentation":
    from transformers import Mask2FormerForUniversalSegmentation

    check_model_type(path, "mask2former", "Mask2FormerDetector")
    with whole(path), reading("There is no Mask2Former", path):
        model, info = Mask2FormerForUniversalSegmentation.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, weights_only=True
        )
    check_fit(
        path,
        "the Mask2Former that its config.json describes",
        missing=set(info["missing_keys"]) - _NOT_STORED,
        surplus=info["unexpected_keys"],
        misshapen=(key for key, *_ in info["mismatched_keys"]),
    )
    return model


def load_openmmlab(path: str) -> "Mask2FormerForUniversalSegmentation":
    """Read a Mask2Former with a Swin backbone that mmdet 2.x saved; all sizes are read off the tensors.

    The number of heads of the transformer decoder is not in them; it is that of the pixel decoder, as published.

    Raises:
        ValueError: If the tensors are not exactly those of such a model.
    """
    from transformers import Mask2FormerForUniversalSegmentation

    source = read_tensors(path)
    try:
        config = _read_config(source)
    except KeyError as error:
        raise ValueError(f"{path} is no Mask2Former of OpenMMLab: it has no tensor {error}.") from error
    model = Mask2FormerForUniversalSegmentation(config)
    target = from_openmmlab({key: value for key, value in source.items() if not _NOT_USED.fullmatch(key)})
    _check_positions(path, model, target)
    own = model.state_dict()
    check_fit(
        path,
        "a Mask2Former of its own sizes",
        missing=own.keys() - target.keys() - _NOT_STORED,
        surplus=target.keys() - own.keys(),
        misshapen=(key for key in own.keys() & target.keys() if own[key].shape != target[key].shape),
    )
    model.load_state_dict(target, strict=False)
    return model


def _check_positions(path: str, model: "Mask2FormerForUniversalSegmentation", target: dict[str, Tensor]) -> None:
    """Take the indices of relative positions out of `target`, checking that they are what the model computes itself."""
    own = dict(model.named_buffers())
    for key in [key for key in target if key.endswith(_INDEX)]:
        index = target.pop(key)
        if key not in own or not torch.equal(own[key].flatten(), index.flatten()):
            raise ValueError(f"{path} numbers the relative positions of {key} otherwise than Swin.")


def _read_config(source: dict[str, Tensor]) -> "Mask2FormerConfig":
    """Read the sizes off the tensors; raises KeyError if one that tells a size is missing."""
    from transformers import Mask2FormerConfig, SwinConfig

    depths, heads = [], []
    for stage in range(_count(source, "backbone.stages.")):
        depths.append(_count(source, f"backbone.stages.{stage}.blocks."))
        heads.append(source[f"backbone.stages.{stage}.blocks.0.attn.w_msa.relative_position_bias_table"].shape[1])
    block, head = "backbone.stages.0.blocks.0.", "panoptic_head."
    patch = source["backbone.patch_embed.projection.weight"]
    positions = source[f"{block}attn.w_msa.relative_position_bias_table"].shape[0]
    swin = SwinConfig(
        embed_dim=patch.shape[0],
        patch_size=patch.shape[-1],
        depths=depths,
        num_heads=heads,
        window_size=(round(positions**0.5) + 1) // 2,
        mlp_ratio=source[f"{block}ffn.layers.0.0.weight"].shape[0] / patch.shape[0],
        out_features=[f"stage{i + 1}" for i in range(len(depths))],
    )
    offsets = source[f"{head}pixel_decoder.encoder.layers.0.attentions.0.sampling_offsets.weight"]
    return Mask2FormerConfig(
        backbone_config=swin,
        feature_size=source[f"{head}pixel_decoder.level_encoding.weight"].shape[1],
        mask_feature_size=source[f"{head}pixel_decoder.mask_feature.weight"].shape[0],
        hidden_dim=source[f"{head}query_feat.weight"].shape[1],
        encoder_layers=_count(source, f"{head}pixel_decoder.encoder.layers."),
        encoder_feedforward_dim=source[f"{head}pixel_decoder.encoder.layers.0.ffns.0.layers.0.0.weight"].shape[0],
        decoder_layers=_count(source, f"{head}transformer_decoder.layers.") + 1,
        dim_feedforward=source[f"{head}transformer_decoder.layers.0.ffns.0.layers.0.0.weight"].shape[0],
        num_attention_heads=offsets.shape[0] // (_LEVELS * _POINTS * 2),
        num_queries=source[f"{head}query_feat.weight"].shape[0],
        num_labels=source[f"{head}cls_embed.weight"].shape[0] - 1,
    )


def _count(source: dict[str, Tensor], prefix: str) -> int:
    parts = {key[len(prefix) :].split(".")[0] for key in source if key.startswith(prefix)}
    numbers = [int(part) for part in parts if part.isdigit()]
    if not numbers:
        raise KeyError(f"{prefix}0")
    return 1 + max(numbers)


def from_openmmlab(source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename an mmdet 2.x state dict to transformers' names; unknown names stay, for strict loading to report."""
    target: dict[str, Tensor] = {}
    for key, value in source.items():
        module, _, kind = key.rpartition(".")
        if key == "panoptic_head.pixel_decoder.level_encoding.weight":
            target[f"{_PIXEL}level_embed"] = value
        elif split := re.fullmatch(r"(backbone\.stages\.\d+\.blocks\.\d+\.)attn\.w_msa\.qkv\.(weight|bias)", key):
            _split(target, _layer(split.group(1)) + "attention", split.group(2), value)
        elif split := re.fullmatch(r"(.+layers\.\d+\.)attentions\.1\.attn\.in_proj_(weight|bias)", key):
            _split(target, _layer(split.group(1)) + "self_attn", split.group(2), value)
        else:
            if ".downsample." in key:
                value = _reorder(value)
            target[f"{_rename(module)}.{kind}"] = value
    return target


def _split(target: dict[str, Tensor], module: str, kind: str, value: Tensor) -> None:
    for projection, part in zip("qkv", value.chunk(3), strict=True):
        target[f"{module}.{projection}_proj.{kind}"] = part.clone()


def _reorder(value: Tensor) -> Tensor:
    """Last axis of a patch merging: mmdet's unfold counts (channel, row, column), transformers (column, row, channel)."""
    merged = value.unflatten(-1, (-1, 2, 2))
    return merged.movedim((-1, -2, -3), (-3, -2, -1)).flatten(-3)


def _layer(prefix: str) -> str:
    for pattern, (target, _) in _LAYERS.items():
        if match := re.fullmatch(pattern, prefix):
            return match.expand(target)
    return prefix


def _rename(module: str) -> str:
    for pattern, target in _MODULES.items():
        if match := re.fullmatch(pattern, module):
            return match.expand(target)
    for pattern, (target, inner) in _LAYERS.items():
        match = re.match(pattern, module)
        if match and module[match.end() :] in inner:
            return match.expand(target) + inner[module[match.end() :]]
    return module
