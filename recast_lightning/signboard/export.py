"""From training states to checkpoint folders that diffusers and transformers load."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPImageProcessorPil, CLIPModel

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
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial)
    partial.rename(path)


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
    build_tokenizer().save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(folder)


def export_pipeline(work: Path, out: Path) -> None:
    """Write `out/base`: a StableDiffusion3Pipeline without T5."""
    from recast_lightning.signboard.pretrain import build_policy_modules, latents, load_autoencoder

    modules = build_policy_modules()
    modules.load_state_dict(torch.load(work / "refinement.pt", weights_only=True)["average"])
    vae = load_autoencoder(work)
    _, shift, scale = latents(work, 0)
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
