"""The memory and compute figures of docs/scale.md: counts are the published ones, and the page shows what the script says."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scale.md"
sys.path.insert(0, str(ROOT / "benchmarks"))
import memory  # noqa: E402
import shapes  # noqa: E402

sys.path.pop(0)

PUBLISHED = {
    "transformer": 2_243_171_520, "VAE": 83_819_683, "CLIP-L (text)": 123_650_304, "OpenCLIP bigG (text)": 694_659_840,
    "T5-XXL": 4_762_310_656, "ClipScore: CLIP L/14, also GenEval's colours": 427_616_513, "HPSv2: CLIP H/14": 986_109_441,
    "PickScore: CLIP H/14": 986_109_441, "GenEval: Mask2Former Swin-S": 68_741_083,
}  # fmt: skip


def test_weights_are_those_of_the_published_models_and_of_the_page():
    weights = memory.weights()
    assert {name: weights[name].parameters for name in PUBLISHED} == PUBLISHED
    assert weights["transformer"].buffer_bytes == 2 * 384**2 * 1536  # position embeddings, which nothing shards
    _, adapters = shapes.with_adapters()
    assert len(adapters.layers) == 191
    for name in ("default", "old", "ema"):
        assert sum(p.numel() for p in adapters.parameters(name)) == 18_776_064
        assert {p.dtype for p in adapters.parameters(name)} == {torch.float32}
    lora = memory.Weights(18_776_064, 4 * 18_776_064, 0, "float32")
    rows = memory.weights_table({"weights": {n: vars(w) for n, w in (weights | {"LoRA, each of 3": lora}).items()}})
    assert memory.markdown(rows) in PAGE.read_text(encoding="utf-8")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def test_live_counts_what_is_alive_and_what_backward_needs():
    module = shapes.fake(shapes.on_meta(Twice, torch.float32))
    with torch.no_grad():  # at the worst moment: x, what `up` gave, and what gelu made of it, in fours of bytes
        assert shapes.peak(module, lambda: module(torch.empty(5, 8))) == 4 * 5 * (8 + 16 + 16)
    module.requires_grad_(True)
    with shapes.FAKE, shapes.Live(module) as live:
        result = module(torch.empty(5, 8))
        saved = 4 * 5 * (8 + 16 + 16)
        assert live.now - live.before == saved + 4 * 5 * 8
        result.sum().backward()
        del result
        assert live.now - live.before == sum(4 * p.numel() for p in module.parameters())  # the gradients


def test_layer_norms_are_float32_as_under_cudas_autocast():
    norm, seen = nn.LayerNorm(8, elementwise_affine=False), []
    with shapes.FAKE, torch.autocast("cpu", torch.bfloat16), shapes.cuda_norms():
        seen.append(norm(torch.empty(2, 8, dtype=torch.bfloat16)).dtype)
    assert seen == [torch.float32]


@pytest.mark.slow
def test_the_page_shows_what_the_script_finds():
    figures = memory.figures()
    assert figures["tflop"]["sample"] == pytest.approx(2.44, rel=0.02)  # without adapters
    text = PAGE.read_text(encoding="utf-8")
    for title, rows in memory.tables(figures).items():
        assert memory.markdown(rows) in text, title
