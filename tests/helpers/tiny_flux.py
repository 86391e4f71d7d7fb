"""A random FluxPipeline with FLUX.1-dev's architecture cut to two narrow blocks of each kind."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from helpers import tiny_sd3
from helpers.tiny_sd3 import CLIP_L, HEAD, HEADS, T5
from transformers import CLIPTextModel


def save_pipeline(folder: Path, *, guidance_embeds: bool = True, dynamic: bool = True, seed: int = 0) -> Path:
    """Write the pipeline with the files that the hub has; FLUX.1-schnell has neither embedded guidance nor dynamic shift."""
    torch.manual_seed(seed)
    shift = {"shift": 3.0, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=T5,
        pooled_projection_dim=CLIP_L,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    pipeline = FluxPipeline(
        transformer=tiny_sd3.shaken(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=dynamic, **shift),
        vae=tiny_sd3.vae(0.3611, 0.1159),
        text_encoder=CLIPTextModel(tiny_sd3.clip_config(CLIP_L, "quick_gelu")),
        tokenizer=tiny_sd3.clip_tokenizer(),
        text_encoder_2=tiny_sd3.t5(),
        tokenizer_2=tiny_sd3.t5_tokenizer(),
    )
    pipeline.save_pretrained(folder)
    tiny_sd3.name_as_published(folder, "tokenizer")
    return folder
