"""From training states to checkpoint folders that diffusers and transformers load."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from safetensors.torch import save
from torch import Tensor, nn
from transformers import CLIPImageProcessorPil, CLIPModel

from recast_lightning.files import write_atomically
from recast_lightning.signboard import architecture
from recast_lightning.signboard.tokenizer import build_tokenizer
from recast_lightning.signboard.world import SIZE

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def normalise(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] to CLIP's input."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD))
    return (images - mean) / std


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file that is either whole or absent."""
    write_atomically(path, save({k: v.contiguous() for k, v in tensors.items()}))


def load_trained_clip(work: Path, name: str) -> CLIPModel:
    """The CLIP that a stage has trained."""
    clip = architecture.build_clip(build_tokenizer())
    nn.ModuleDict({"clip": clip}).load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["average"])
    return clip


def export_clip(work: Path, out: Path, name: str) -> None:
    """Write `out/name`: CLIPModel, tokenizer and image processor; the logit scale is the one its wrapper divides by."""
    folder, clip = out / name, load_trained_clip(work, name)
    clip.logit_scale.data.fill_(math.log(26 if name == "pickscore" else 100))
    clip.half().save_pretrained(folder)
    _load_as_float32(folder)
    build_tokenizer().save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(folder)


def export_pipeline(out: Path, modules: nn.ModuleDict, vae: AutoencoderKL, shift: float, scale: float) -> None:
    """Write `out/base`: a StableDiffusion3Pipeline without T5.

    Args:
        out: folder of the checkpoints.
        modules: `transformer`, `text_encoder` and `text_encoder_2`, trained.
        vae: trained.
        shift: of its latents.
        scale: of its latents.
    """
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    pipeline = StableDiffusion3Pipeline(
        vae=vae,
        scheduler=architecture.build_scheduler(),
        tokenizer=build_tokenizer(),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
        **dict(modules.items()),
    )
    pipeline.to(torch.float16).save_pretrained(out / "base")
    for part in ("text_encoder", "text_encoder_2"):
        _load_as_float32(out / "base" / part)


def _load_as_float32(folder: Path) -> None:
    """Have transformers load what is stored as float16 as float32, as diffusers does with its own models."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
