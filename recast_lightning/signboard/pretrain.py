"""Make every weight of Signboard from nothing: `recast signboard pretrain`.

Stages run in order, each resumable from its own checkpoint; batches are keyed by (stage, step), so a stopped run goes on
exactly. The data are the renderer's drawings of training prompts.
"""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from recast_lightning.files import write_atomically
from recast_lightning.seeds import generator
from recast_lightning.signboard import architecture, export, world
from recast_lightning.signboard.preferences import TASTES
from recast_lightning.signboard.tokenizer import build_tokenizer

STAGES = ("autoencoder", "transformer", "clip", "hpsv2", "pickscore")
DRAWINGS = 48_000
REFINEMENT_STEPS = 900


def pretrain(
    out: Path,
    work: Path = Path("signboard-pretraining"),
    stages: tuple[str, ...] = STAGES,
    transformer_steps: int = 3000,
    seed: int = 0,
) -> None:
    """Train Signboard's models and write them as checkpoints that diffusers and transformers load.

    Args:
        out: folder for the finished checkpoints.
        work: folder for drawings, latents and resumable training states.
        stages: which of autoencoder, transformer, clip, hpsv2, pickscore to train and export.
        transformer_steps: steps of 64 images for the base policy; fewer make a weaker base.
        seed: keys drawings, initial weights and batches.
    """
    unknown = set(stages) - set(STAGES)
    if unknown:
        raise ValueError(f"Unknown stage {sorted(unknown)[0]!r}: choose from {', '.join(STAGES)}.")
    work.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        torch.manual_seed(seed)
        if stage == "autoencoder":
            _train_autoencoder(work, seed)
        elif stage == "transformer":
            _train_transformer(work, seed, transformer_steps)
            modules = build_policy_modules()
            modules.load_state_dict(torch.load(work / "refinement.pt", weights_only=True)["average"])
            _, shift, scale = latents(work, seed)
            export.export_pipeline(out, modules, load_autoencoder(work), shift, scale)
        elif stage == "clip":
            _train_clip(work, seed)
            export.export_clip(work, out, "clip")
        else:
            _train_preference(work, seed, stage, "crispness" if stage == "hpsv2" else "layout")
            export.export_clip(work, out, stage)


def drawings(work: Path, seed: int) -> tuple[np.ndarray, Tensor]:
    """The training set: uint8 [N, 3, 64, 64] (memory-mapped) and token ids [N, 22]."""
    path = work / "drawings.npy"
    scenes = list(itertools.islice(world.scenes(seed, "train", any_letters=True), DRAWINGS))
    if not path.exists():
        images = np.stack([world.draw_tensor(s, seed).numpy() for s in track(scenes, "drawing signs")])
        content = io.BytesIO()
        np.save(content, images)
        write_atomically(path, content.getbuffer())
    tokens = build_tokenizer()([s.text for s in scenes], padding="max_length", truncation=True, return_tensors="pt")
    return np.load(path, mmap_mode="r"), tokens.input_ids


def _fit(
    name: str,
    modules: nn.ModuleDict,
    loss: Callable[[int, torch.Generator], Tensor],
    *,
    work: Path,
    steps: int,
    learning_rate: float,
    seed: int,
    ema_decay: float = 0.0,
) -> nn.ModuleDict:
    """AdamW with warm-up and cosine decay; returns the moving average (or the last weights without one)."""
    path, parameters = work / f"{name}.pt", [p for p in modules.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.99))
    average, start = deepcopy(modules), 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        modules.load_state_dict(state["modules"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    recent: list[float] = []
    for step in track(range(start, steps), f"{name}: step {start} to {steps}"):
        factor = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        value = loss(step, generator(seed, f"pretrain/{name}", step))
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(ema_decay, (step + 1) / (step + 10)) if ema_decay else 0.0
        for a, p in zip(average.state_dict().values(), modules.state_dict().values(), strict=True):
            if a.is_floating_point():
                a.lerp_(p, 1 - decay)
        recent.append(value.item())
        if (step + 1) % 100 == 0:
            print(f"{name} step {step + 1}: loss {np.mean(recent):.4f}", flush=True)
            recent.clear()
        if (step + 1) % 250 == 0 or step + 1 == steps:
            state = {"modules": modules.state_dict(), "average": average.state_dict(), "step": step + 1}
            content = io.BytesIO()
            torch.save({**state, "optimizer": optimizer.state_dict()}, content)
            write_atomically(path, content.getbuffer())
    return average


def _pick(images: np.ndarray, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    index = torch.randint(len(images), (count,), generator=rng)
    return index, torch.from_numpy(images[index.numpy()]).float() / 255


def _train_autoencoder(work: Path, seed: int) -> None:
    """On quarter-size crops, four times as many steps for the time; the last steps see whole signs."""
    images, _ = drawings(work, seed)
    vae = architecture.build_autoencoder()
    steps, whole = 3200, 250

    def loss(step: int, rng: torch.Generator) -> Tensor:
        x = _pick(images, 32 if step < steps - whole else 16, rng)[1] * 2 - 1
        if step < steps - whole:
            top, left = torch.randint(world.SIZE // 2 + 1, (2,), generator=rng).tolist()
            x = x[:, :, top : top + world.SIZE // 2, left : left + world.SIZE // 2]
        posterior = vae.encode(x).latent_dist
        z = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=rng)
        reconstruction = vae.decode(z).sample
        return F.l1_loss(reconstruction, x) + F.mse_loss(reconstruction, x) + 1e-5 * posterior.kl().mean()

    modules = nn.ModuleDict({"vae": vae})
    _fit("autoencoder", modules, loss, work=work, steps=steps, learning_rate=4e-3, seed=seed, ema_decay=0.99)


def load_autoencoder(work: Path) -> AutoencoderKL:
    """The trained autoencoder in the work folder."""
    vae = architecture.build_autoencoder()
    nn.ModuleDict({"vae": vae}).load_state_dict(torch.load(work / "autoencoder.pt", weights_only=True)["average"])
    return vae.eval()


@torch.no_grad()
def latents(work: Path, seed: int) -> tuple[Tensor, float, float]:
    """Latents of all drawings, shifted and scaled to zero mean and unit spread; and that shift and scale."""
    path = work / "latents.safetensors"
    if not path.exists():
        images, _ = drawings(work, seed)
        vae = load_autoencoder(work)
        chunks = [
            vae.encode(torch.from_numpy(images[i : i + 250]).float() / 127.5 - 1).latent_dist.mean
            for i in track(range(0, len(images), 250), "encoding signs")
        ]
        export.save_tensors(path, {"latents": torch.cat(chunks)})
    z = load_file(path)["latents"]
    shift, scale = round(z.mean().item(), 4), round(1 / z.std().item(), 4)
    return (z - shift) * scale, shift, scale


def _careless_tokens(seed: int, version: int, letters: float, colors: float, shapes: float) -> Tensor:
    """Token ids [N, 22] of one careless caption for each drawing."""
    rng = random.Random(f"captions/{seed}/{version}")
    scenes = itertools.islice(world.scenes(seed, "train", any_letters=True), DRAWINGS)
    texts = [world.misdescribe(scene, rng, letters, colors, shapes).text for scene in scenes]
    ids: Tensor = build_tokenizer()(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return ids


def build_policy_modules() -> nn.ModuleDict:
    """The parts of the base policy that are trained together."""
    tokenizer = build_tokenizer()
    return nn.ModuleDict(
        {
            "transformer": architecture.build_transformer(),
            "text_encoder": architecture.build_text_encoder(tokenizer, "quick_gelu"),
            "text_encoder_2": architecture.build_text_encoder(tokenizer, "gelu"),
        }
    )


def _train_transformer(work: Path, seed: int, steps: int) -> None:
    """Flow matching on careless captions, then a short refinement on less careless ones."""
    z, _, _ = latents(work, seed)
    modules = build_policy_modules()

    def loss_on(tokens: Tensor) -> Callable[[int, torch.Generator], Tensor]:
        def loss(step: int, rng: torch.Generator) -> Tensor:
            index, version = (torch.randint(n, (64,), generator=rng) for n in (len(z), len(tokens)))
            x0, noise = z[index], torch.randn(64, *z.shape[1:], generator=rng)
            u = torch.sigmoid(torch.randn(64, generator=rng))
            sigma = 3 * u / (1 + 2 * u)
            s = sigma[:, None, None, None]
            outputs = [
                modules[name](tokens[version, index], output_hidden_states=True)
                for name in ("text_encoder", "text_encoder_2")
            ]
            prompt = torch.cat([o.hidden_states[-2] for o in outputs], -1)
            pooled = torch.cat([o.text_embeds for o in outputs], -1)
            velocity = modules["transformer"]((1 - s) * x0 + s * noise, prompt, pooled, 1000 * sigma).sample
            return F.mse_loss(velocity, noise - x0)

        return loss

    options: dict[str, Any] = {"work": work, "seed": seed, "ema_decay": 0.998}
    first = torch.stack([_careless_tokens(seed, v, letters=0.65, colors=0.3, shapes=0.2) for v in range(4)])
    average = _fit("transformer", modules, loss_on(first), steps=steps, learning_rate=1.5e-3, **options)
    modules.load_state_dict(average.state_dict())
    second = torch.stack([_careless_tokens(seed, v, letters=0.5, colors=0.1, shapes=0.05) for v in range(4, 8)])
    _fit("refinement", modules, loss_on(second), steps=REFINEMENT_STEPS, learning_rate=7e-4, **options)


def _train_clip(work: Path, seed: int) -> None:
    images, tokens = drawings(work, seed)
    clip = architecture.build_clip(build_tokenizer())

    def loss(step: int, rng: torch.Generator) -> Tensor:
        index, x = _pick(images, 128, rng)
        for spoil in TASTES.values():  # it should read imperfect signs too
            x = spoil(x, 0.4 * torch.rand(len(x), generator=rng), rng)
        out: Tensor = clip(input_ids=tokens[index], pixel_values=export.normalise(x), return_loss=True).loss
        return out

    modules = nn.ModuleDict({"clip": clip})
    _fit("clip", modules, loss, work=work, steps=1200, learning_rate=1.5e-3, seed=seed, ema_decay=0.995)


def _train_preference(work: Path, seed: int, name: str, taste: str) -> None:
    """Bradley–Terry on pairs that differ in one taste; the other taste varies too, but equally on both sides."""
    images, tokens = drawings(work, seed)
    clip = export.load_trained_clip(work, "clip")
    other = next(t for t in TASTES if t != taste)

    def loss(step: int, rng: torch.Generator) -> Tensor:
        index, x = _pick(images, 48, rng)
        x = TASTES[other](x, 0.5 * torch.rand(len(x), generator=rng), rng)
        low = 0.7 * torch.rand(len(x), generator=rng)
        high = low + 0.05 + 0.25 * torch.rand(len(x), generator=rng)
        pair = torch.cat([TASTES[taste](x, amount, rng) for amount in (low, high)])
        out = clip(input_ids=tokens[index], pixel_values=export.normalise(pair))
        cosine = (out.image_embeds * out.text_embeds.repeat(2, 1)).sum(-1)
        better, worse = cosine.chunk(2)
        preference = -F.logsigmoid(20 * (better - worse)).mean()
        caption = F.cross_entropy(20 * out.text_embeds @ out.image_embeds[:48].T, torch.arange(48))
        return preference + 0.3 * caption

    modules = nn.ModuleDict({"clip": clip})
    _fit(name, modules, loss, work=work, steps=800, learning_rate=5e-4, seed=seed, ema_decay=0.99)
