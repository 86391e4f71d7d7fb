"""Small random checkpoints in the published layouts, on which rewards are compared with the original packages.

Used by benchmarks/parity.py, and by tests/rewards/test_golden.py with the scores that it printed.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from helpers import tiny_blip, tiny_clip
from PIL import Image
from torch import nn
from transformers import BertTokenizer

from recast_lightning.rewards import Aesthetic, ClipScore, HPSv2, ImageReward, PickScore, RewardModel

SYMBOLS = string.ascii_lowercase + string.digits + string.punctuation
WORDS = ["a", "and", "the", "of", "on", "in", "red", "green", "blue", "cat", "dog", "street", "sign", "photo", "light"]
PROMPTS = [
    "a red cat",
    "A storefront sign that says “Grand Opening”, it’s evening",
    "salt &amp; pepper on the table",
    "Ｆｕｌｌ ｗｉｄｔｈ ﬁne art",
]
PICTURES = [(64, 64), (90, 61), (35, 32), (40, 97)]  # height and width


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Blocks of plain colours, with sharp edges, under some noise."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(192, (7, 9, 3), generator=generator)
    rows, columns = torch.arange(height) * 7 // height, torch.arange(width) * 9 // width
    pixels = blocks[rows][:, columns] + torch.randint(64, (height, width, 3), generator=generator)
    return Image.fromarray(pixels.numpy().astype(np.uint8))


def save(
    folder: Path,
    merges: Sequence[tuple[str, str]] = (),
    embed: int = 24,
    image: int = tiny_clip.IMAGE,
    patch: int = 8,
    head: Path | None = None,
) -> None:
    """Write checkpoints for every reward of :func:`rewards`.

    Args:
        folder: Where to.
        merges: Of CLIP's tokenizer; none: its tokens are bytes.
        embed: Width of CLIP's embeddings.
        image: Side of the pictures that the models take.
        patch: Side of their patches.
        head: A published head of the aesthetic predictor; None: a random one.
    """
    tokenizer = tiny_clip.build_byte_tokenizer(merges)
    sizes = tiny_clip.Sizes(len(tokenizer), 77, embed, image, patch)
    for seed, name in enumerate(("clip", "pickscore", "hpsv2")):
        reference = tiny_clip.ReferenceCLIP(name == "clip", seed, sizes)
        for parameter in reference.parameters():
            parameter.data = parameter.data.half().float()  # OpenAI's package reads all weights in half precision
        tiny_clip.save_model(folder / name, reference, name == "clip", sizes)
        tokenizer.save_pretrained(folder / name)
        torch.save({"state_dict": reference.state_dict()}, folder / f"{name}.pt")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()), encoding="utf-8")

    if head is None:
        random = nn.ModuleDict({"layers": tiny_blip.published_head(embed)})
        torch.save(random.state_dict(), folder / "aesthetic-model.pth")
    else:
        (folder / "aesthetic-model.pth").write_bytes(head.read_bytes())

    words = [*tiny_blip.VOCABULARY[:5], *SYMBOLS, *("##" + symbol for symbol in SYMBOLS), *WORDS]
    words = list(dict.fromkeys(words))
    (folder / "bert").mkdir()
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    judge = tiny_blip.ReferenceImageReward(3, len(words) + 2, image, patch)
    torch.save(judge.state_dict(), folder / "ImageReward.pt")


def rewards(folder: Path, differentiable: bool = False) -> dict[str, RewardModel]:
    """Our rewards on the checkpoints of :func:`save`."""
    clip, blip = str(folder / "clip"), str(folder / "bert")
    return {
        "clip_score": ClipScore(clip, differentiable=differentiable),
        "pickscore": PickScore(str(folder / "pickscore"), differentiable=differentiable),
        "hpsv2": HPSv2(str(folder / "hpsv2.pt"), processor=str(folder / "hpsv2"), differentiable=differentiable),
        "aesthetic": Aesthetic(clip, str(folder), differentiable=differentiable),
        "image_reward": ImageReward(str(folder), tokenizer=blip, differentiable=differentiable),
    }
