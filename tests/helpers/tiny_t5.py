"""The embedded pipeline with a random T5 beside its CLIPs, as SD3.5-Medium has one."""

import json
import shutil
from pathlib import Path

import torch
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from recast_lightning.paths import EMBEDDED


def save_pipeline_with_t5(folder: Path, d_ff: int = 64) -> Path:
    """`d_ff` sets T5's size, at its width of 128."""
    shutil.copytree(EMBEDDED / "base", folder)
    letters = [(letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"]
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *letters], extra_ids=0)
    tokenizer.save_pretrained(folder / "tokenizer_3")
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=128, d_kv=16, d_ff=d_ff, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder / "text_encoder_3")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": ["transformers", "T5EncoderModel"], "tokenizer_3": ["transformers", "T5Tokenizer"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
