"""A tiny HPSv3 of the true architecture, in the published layout, and a forward pass independent of transformers."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Tokenizer

WIDTH, HEADS, KV_HEADS, HEAD, LAYERS, FFN = 64, 4, 2, 16, 2, 96
SEEN, SEEN_HEADS, DEPTH = 32, 2, 2
PATCH, MERGE, FRAMES = 14, 2, 2
CONTEXT = 700
THETA, EPS = 1e6, 1e-6
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.25, 0.2)  # not CLIP's own, so that ignoring the file shows

BYTES = sorted(ByteLevel.alphabet())
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: len(BYTES) + i for i, token in enumerate((*SPECIALS, "<|Reward|>"))}
ROWS = len(BYTES) + len(SPECIALS) + 1  # fewer than in the configuration, as published
TEMPLATE = "\nHow fine is it?\nPrompt - {text_prompt}\n\nMark: <|Reward|>\n\nDone\n"
CHAT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nLook well.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenize(text: str) -> list[int]:
    """ASCII text as ids: one byte, one token."""
    shifted = {" ": "Ġ", "\n": "Ċ"}
    return [BYTES.index(shifted.get(character, character)) for character in text]


def full_ids(caption: str, image_tokens: int) -> list[int]:
    """The whole chat, to the opening of the answer, put together by hand."""
    before, after = TEMPLATE.format(text_prompt=caption).split("<|Reward|>")
    return [
        *(IDS["<|im_start|>"], *tokenize("system\nLook well."), IDS["<|im_end|>"], *tokenize("\n")),
        *(IDS["<|im_start|>"], *tokenize("user\n"), IDS["<|vision_start|>"]),
        *(image_tokens * [IDS["<|image_pad|>"]]),
        *(IDS["<|vision_end|>"], *tokenize(before), IDS["<|Reward|>"], *tokenize(after), IDS["<|im_end|>"]),
        *(*tokenize("\n"), IDS["<|im_start|>"], *tokenize("assistant\n")),
    ]


def patchify(image: Tensor, height: int, width: int) -> Tensor:
    """uint8 image [3, H, W] at a given size as patches [h w, 1176], in blocks of 2 x 2, two equal frames each."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.BICUBIC)
    pixels = (torch.from_numpy(np.array(picture)).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    rows = []
    for top in range(0, height, MERGE * PATCH):
        for left in range(0, width, MERGE * PATCH):
            for y in range(top, top + MERGE * PATCH, PATCH):
                for x in range(left, left + MERGE * PATCH, PATCH):
                    patch = pixels[y : y + PATCH, x : x + PATCH].permute(2, 0, 1)
                    rows.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(rows)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs (i, i + D/2) of x [..., L, D] by angles [L, D/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def frequencies(count: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(count) / count)


class SeeingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SEEN, eps=1e-6), nn.LayerNorm(SEEN, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(SEEN, 3 * SEEN), "proj": nn.Linear(SEEN, SEEN)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(SEEN, 4 * SEEN), "fc2": nn.Linear(4 * SEEN, SEEN)})

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).view(len(x), 3, SEEN_HEADS, -1).permute(1, 2, 0, 3)
        q, k = rotate(q, angles), rotate(k, angles)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.attn["proj"]((weights @ v).transpose(0, 1).flatten(1))
        y = self.mlp["fc1"](self.norm2(x))
        return x + self.mlp["fc2"](y * torch.sigmoid(1.702 * y))


class Visual(nn.Module):
    def __init__(self):
        super().__init__()
        kernel = (FRAMES, PATCH, PATCH)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, SEEN, kernel, kernel, bias=False)})
        self.blocks = nn.ModuleList(SeeingBlock() for _ in range(DEPTH))
        wide = SEEN * MERGE**2
        mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(SEEN, eps=1e-6), "mlp": mlp})

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        x = self.patch_embed["proj"](patches.view(-1, 3, FRAMES, PATCH, PATCH)).flatten(1)
        places = [
            (top + y, left + x)
            for top in range(0, height, MERGE)
            for left in range(0, width, MERGE)
            for y in range(MERGE)
            for x in range(MERGE)
        ]
        half = frequencies(SEEN // SEEN_HEADS // 4, 1e4)
        angles = (torch.tensor(places)[:, :, None] * half).flatten(1)  # rows turn the first half, columns the second
        for block in self.blocks:
            x = block(x, angles)
        return self.merger["mlp"](self.merger["ln_q"](x).view(-1, SEEN * MERGE**2))


class Scale(nn.Module):
    """RMS normalisation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Scale(), Scale()
        sizes = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
        self.self_attn = nn.ModuleDict({name: nn.Linear(WIDTH, n * HEAD) for name, n in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(WIDTH, FFN, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{n}_proj"](y).view(len(x), -1, HEAD).transpose(0, 1) for n in "qkv")
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
        future = torch.full((len(x), len(x)), -torch.inf).triu(1)
        weights = (q @ k.mT / HEAD**0.5 + future).softmax(-1)
        x = x + self.self_attn["o_proj"]((weights @ v).transpose(0, 1).flatten(1))
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class ReferenceHPSv3(nn.Module):
    """HPSv3 under the names of its published file."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.visual = Visual()
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(ROWS, WIDTH), "layers": nn.ModuleList(), "norm": Scale()}
        )
        self.model["layers"].extend(Layer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        layers = (nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
        self.rm_head = nn.Sequential(*layers)
        for parameter in self.parameters():  # biases and norms away from 0 and 1, and layers that matter
            parameter.data = 1.5 * parameter.data + 0.1 * torch.randn(parameter.shape)
        self.eval()

    @torch.no_grad()
    def hidden(self, image: Tensor, caption: str, size: tuple[int, int]) -> Tensor:
        """Hidden state [D] at the reward token, with the whole chat read; the size is that after scaling, in pixels."""
        height, width = (side // PATCH for side in size)
        seen = self.visual(patchify(image, *size), height, width)
        ids = torch.tensor(full_ids(caption, len(seen)))
        x = self.model["embed_tokens"](ids)
        x[ids == IDS["<|image_pad|>"]] = seen
        angles = torch.arange(len(x))[:, None] * frequencies(HEAD // 2, THETA)
        for layer in self.model["layers"]:
            x = layer(x, angles)
        return self.model["norm"](x)[ids == IDS["<|Reward|>"]][0]

    @torch.no_grad()
    def mu_sigma(self, image: Tensor, caption: str, size: tuple[int, int]) -> Tensor:
        return self.rm_head(self.hidden(image, caption, size))


def save_base(folder: Path) -> Path:
    """Configuration, tokenizer and image processor, in the layout that Qwen published: flat, and with min_pixels."""
    folder.mkdir()
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(BYTES)},
        merges=[],
        extra_special_tokens=list(SPECIALS[1:]),
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vocab_size": ROWS + 5,
        "tie_word_embeddings": False,
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        **{f"{name}_token_id": IDS[f"<|{name}|>"] for name in ("vision_start", "vision_end")},
        **{f"{name}_token_id": IDS[f"<|{name}_pad|>"] for name in ("image", "video")},
        "vision_config": {
            "depth": DEPTH,
            "embed_dim": SEEN,
            "num_heads": SEEN_HEADS,
            "mlp_ratio": 4,
            "hidden_size": WIDTH,
            "in_chans": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": MEAN,
        "image_std": STD,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def save_hpsv3(folder: Path, seed: int = 0) -> ReferenceHPSv3:
    """Write base/, template.txt and HPSv3.safetensors; returns the reference that holds the same weights."""
    save_base(folder / "base")
    (folder / "template.txt").write_text(TEMPLATE)
    reference = ReferenceHPSv3(seed)
    save_file(dict(reference.state_dict()), folder / "HPSv3.safetensors")
    return reference
