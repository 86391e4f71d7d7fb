"""Tiny ImageReward checkpoints in the published layout, and a forward pass written independently of transformers."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertTokenizer

VISION, TEXT, LAYERS, IMAGE, HEAD_WIDTH = 128, 192, 2, 32, 64
WORDS = ["a", "red", "cat", "two", "dogs", "sign", "blue", "on"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
UNKNOWN, FIRST, LAST = 1, 2, 3


def published_head(width: int, seed: int = 0) -> nn.Sequential:
    """The head of LAION's aesthetic predictor and of ImageReward as published, with dropout; keys `0.weight` and so on."""
    torch.manual_seed(seed)
    head = nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
    for parameter in head.parameters():  # the usual initialisation gives nearly the same score to everything
        parameter.data *= 2
    return head.eval().requires_grad_(False)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of [B, L, D] in heads of 64 numbers each."""
    q, k, v = (x.unflatten(2, (-1, HEAD_WIDTH)) for x in (queries, keys, values))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(HEAD_WIDTH**0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(VISION, eps=1e-6), nn.LayerNorm(VISION, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(VISION, 3 * VISION), "proj": nn.Linear(VISION, VISION)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(VISION, 4 * VISION), "fc2": nn.Linear(4 * VISION, VISION)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["proj"](attend(*self.attn["qkv"](self.norm1(x)).chunk(3, dim=2)))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class Vision(nn.Module):
    def __init__(self, image: int, patch: int):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, VISION))
        self.pos_embed = nn.Parameter(0.5 * torch.randn(1, 1 + (image // patch) ** 2, VISION))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, VISION, patch, patch)})
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(VISION, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def dense(width: int, inner: int = TEXT) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inner, width), "LayerNorm": nn.LayerNorm(width, eps=1e-12)})


class Attention(nn.Module):
    def __init__(self, source: int):
        super().__init__()
        names = {"query": TEXT, "key": source, "value": source}
        self.self = nn.ModuleDict({name: nn.Linear(width, TEXT) for name, width in names.items()})
        self.output = dense(TEXT)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        y = attend(self.self["query"](x), self.self["key"](source), self.self["value"](source))
        return self.output["LayerNorm"](x + self.output["dense"](y))


class TextBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.crossattention = Attention(TEXT), Attention(VISION)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(TEXT, 4 * TEXT)})
        self.output = dense(TEXT, 4 * TEXT)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.crossattention(self.attention(x, x), seen)
        return self.output["LayerNorm"](x + self.output["dense"](F.gelu(self.intermediate["dense"](x))))


class Text(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, TEXT),
                "position_embeddings": nn.Embedding(40, TEXT),
                "LayerNorm": nn.LayerNorm(TEXT, eps=1e-12),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(40)[None])
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(TextBlock() for _ in range(LAYERS))})

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        places = self.embeddings["position_embeddings"].weight[: ids.shape[1]]
        x = self.embeddings["LayerNorm"](self.embeddings["word_embeddings"](ids) + places)
        for block in self.encoder["layer"]:
            x = block(x, seen)
        return x[:, 0]


class ReferenceImageReward(nn.Module):
    """ImageReward with the names of its published file."""

    def __init__(self, seed: int = 0, vocabulary: int = len(VOCABULARY) + 2, image: int = IMAGE, patch: int = 8):
        super().__init__()
        torch.manual_seed(seed)
        self.blip = nn.ModuleDict(
            {
                "visual_encoder": Vision(image, patch),
                "text_encoder": Text(vocabulary),
                "vision_proj": nn.Linear(VISION, 8),
                "text_proj": nn.Linear(TEXT, 8),
            }
        )
        for parameter in self.parameters():  # biases and norms away from 0 and 1, so that swapping them shows
            parameter.data += 0.1 * torch.randn(parameter.shape)
        vision, text = self.blip["visual_encoder"], self.blip["text_encoder"].embeddings
        places = [vision.cls_token, vision.pos_embed, *vision.patch_embed.parameters()]
        for parameter in [*places, text["word_embeddings"].weight, text["position_embeddings"].weight]:
            parameter.data *= 0.02  # small beside the norms' epsilons, so that wrong ones show
        self.mlp = nn.ModuleDict({"layers": published_head(TEXT, seed)})

    @torch.no_grad()
    def score(self, pixels: Tensor, texts: list[str]) -> Tensor:
        """Score [B] of normalised pixels [B, 3, IMAGE, IMAGE] and lower-case texts, tokenised by hand, unpadded."""
        seen = self.blip["visual_encoder"](pixels)
        scores = []
        for image, text in zip(seen, texts, strict=True):
            body = [VOCABULARY.index(word) if word in WORDS else UNKNOWN for word in text.split()]
            ids = torch.tensor([[FIRST, *body[:33], LAST]])
            scores.append(self.mlp["layers"](self.blip["text_encoder"](ids, image[None]))[0, 0])
        return (torch.stack(scores) - 0.16717362830052426) / 1.0333394966054072


def save_tokenizer(folder: Path, words: int = len(WORDS)) -> None:
    """BERT's tokenizer with a tiny vocabulary."""
    vocabulary = {token: i for i, token in enumerate(VOCABULARY[: 5 + words])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
