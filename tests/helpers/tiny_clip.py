"""Tiny CLIP checkpoints of the true architecture, and a forward pass written independently of transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from recast_lightning.rewards.clip.hpsv2 import from_open_clip

WIDTH, HEADS, LAYERS, EMBED, IMAGE, CONTEXT = 128, 2, 2, 24, 32, 24
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.25, 0.2)  # not CLIP's own, so that ignoring the file shows


class Sizes(NamedTuple):
    vocabulary: int = 2 * len(LETTERS) + 2
    context: int = CONTEXT
    embed: int = EMBED
    image: int = IMAGE
    patch: int = 8


SIZES = Sizes()


def build_tokenizer() -> CLIPTokenizer:
    """One token a character; BOS and EOS have the two largest ids, as in CLIP."""
    tokens = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], unk_token="<|endoftext|>", model_max_length=CONTEXT)


def build_byte_tokenizer(merges: Sequence[tuple[str, str]]) -> CLIPTokenizer:
    """CLIP's own on bytes, which pairs of tokens are merged from; without merges, a token is a byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    tokens = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *map("".join, merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=list(merges), unk_token="<|endoftext|>", model_max_length=77)


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp["c_proj"](self.act(self.mlp["c_fc"](self.ln_2(x))))


class Tower(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.resblocks = nn.ModuleList(Block(act) for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, act, sizes: Sizes):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(0.5 * torch.randn(1 + (sizes.image // sizes.patch) ** 2, WIDTH))
        self.conv1 = nn.Conv2d(3, WIDTH, sizes.patch, sizes.patch, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.transformer = Tower(act)
        self.proj = nn.Parameter(torch.randn(WIDTH, sizes.embed))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class ReferenceCLIP(nn.Module):
    """CLIP as open_clip lays it out."""

    def __init__(self, quick_gelu: bool = False, seed: int = 0, sizes: Sizes = SIZES):
        super().__init__()
        torch.manual_seed(seed)
        act = (lambda x: x * torch.sigmoid(1.702 * x)) if quick_gelu else F.gelu
        self.logit_scale = nn.Parameter(torch.tensor(3.5))
        self.token_embedding = nn.Embedding(sizes.vocabulary, WIDTH)
        self.positional_embedding = nn.Parameter(0.5 * torch.randn(sizes.context, WIDTH))
        self.transformer = Tower(act)
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, sizes.embed))
        self.visual = Visual(act, sizes)
        for parameter in self.parameters():  # biases and norms away from 0 and 1, so that swapping them shows
            parameter.data += 0.1 * torch.randn(parameter.shape)

    def encode_text(self, ids: Tensor) -> Tensor:
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
        x = self.ln_final(self.transformer(x, mask))
        return x[torch.arange(len(ids)), ids.argmax(1)] @ self.text_projection

    @torch.no_grad()
    def cosine(self, pixels: Tensor, texts: list[str]) -> Tensor:
        """Cosine [B] of normalised pixels [B, 3, IMAGE, IMAGE] and lower-case texts, tokenised by hand, unpadded."""
        ids = []
        for text in texts:
            body = [
                LETTERS.index(c) + (i == len(word) - 1) * len(LETTERS)
                for word in text.split()
                for i, c in enumerate(word)
            ]
            ids.append([2 * len(LETTERS), *body[: CONTEXT - 2], 2 * len(LETTERS) + 1])
        text_side = torch.cat([self.encode_text(torch.tensor([row])) for row in ids])
        return F.cosine_similarity(self.visual(pixels), text_side)


def save_processor(folder: Path) -> None:
    """Tokenizer and image statistics."""
    build_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": IMAGE, "image_mean": MEAN, "image_std": STD}))


def save_transformers(folder: Path, *, quick_gelu: bool, processor: bool = True, seed: int = 0) -> ReferenceCLIP:
    """Write a CLIPModel folder; returns the reference that holds the same weights."""
    reference = ReferenceCLIP(quick_gelu, seed)
    save_model(folder, reference, quick_gelu)
    if processor:
        save_processor(folder)
    return reference


def save_model(folder: Path, reference: ReferenceCLIP, quick_gelu: bool, sizes: Sizes = SIZES) -> None:
    """Write the weights of a reference as a CLIPModel folder without tokenizer."""
    common = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "hidden_act": "quick_gelu" if quick_gelu else "gelu",
        "projection_dim": sizes.embed,
    }
    last = sizes.vocabulary - 1
    text = {
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context,
        "bos_token_id": last - 1,
        "eos_token_id": last,
        "pad_token_id": last,
    }
    model = CLIPModel(
        CLIPConfig(
            text_config={**common, **text},
            vision_config={**common, "image_size": sizes.image, "patch_size": sizes.patch},
            projection_dim=sizes.embed,
        )
    )
    model.load_state_dict(from_open_clip(reference.state_dict()))
    model.save_pretrained(folder)
