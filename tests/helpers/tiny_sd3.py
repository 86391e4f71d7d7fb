"""A random StableDiffusion3Pipeline with SD3.5-Medium's architecture cut to two narrow blocks, and its tiny rewards."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from helpers import tiny_clip, tiny_mask2former
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

TOKENS = 77  # of CLIP, as published
CLIP_L, CLIP_G, T5 = 16, 24, 48  # widths; published: 768, 1280, 4096
HEADS, HEAD = 2, 16  # published: 24, 64


def save_pipeline(folder: Path, *, with_t5: bool = True, seed: int = 0) -> Path:
    """Write the pipeline with the files that the hub has; without T5, its entries are empty, as diffusers saves them."""
    torch.manual_seed(seed)
    pipeline = StableDiffusion3Pipeline(
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(1.5305, 0.0609),
        text_encoder=CLIPTextModelWithProjection(clip_config(CLIP_L, "quick_gelu")),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(CLIP_G, "gelu")),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5() if with_t5 else None,
        tokenizer_3=t5_tokenizer() if with_t5 else None,
    )
    pipeline.save_pretrained(folder)
    name_as_published(folder, "tokenizer", "tokenizer_2")
    return folder


def name_as_published(folder: Path, *clip_tokenizers: str) -> None:
    """Give T5's tokenizer the class, and CLIP's the files, that they have on the hub."""
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"T5Tokenizer"', '"T5TokenizerFast"'))
    for name in clip_tokenizers:
        (folder / name / "tokenizer.json").unlink()
        (folder / name / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(_letters())}))
        (folder / name / "merges.txt").write_text("#version: 0.2\n")


def _transformer() -> torch.nn.Module:
    """Dual attention in the first of two blocks (published: the first 13 of 24); the last drops its text, as there."""
    transformer = SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=T5,
        caption_projection_dim=HEADS * HEAD,
        pooled_projection_dim=CLIP_L + CLIP_G,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return shaken(transformer)


def shaken(transformer: torch.nn.Module) -> torch.nn.Module:
    """Gates and norms away from 0 and 1, so that every part shows."""
    for parameter in transformer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return transformer


def vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """Four resolutions (8 pixels a latent), 16 channels, no quantisation convolutions, as SD3 and FLUX have it."""
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=16,
        sample_size=1024,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    model.decoder.conv_out.weight.data *= 4  # pictures with contrast
    return model


def clip_config(width: int, act: str) -> CLIPTextConfig:
    vocab = len(_letters())
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        hidden_act=act,
        projection_dim=width,
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        pad_token_id=vocab - 1,
    )


def t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=128, d_model=T5, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
        )
    )  # fmt: skip


def _letters() -> list[str]:
    letters = tiny_clip.LETTERS
    return [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]


def clip_tokenizer() -> CLIPTokenizer:
    """One token a character."""
    vocab = {token: i for i, token in enumerate(_letters())}
    return CLIPTokenizer(vocab=vocab, merges=[], unk_token="<|endoftext|>", model_max_length=TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    """One piece a character, as SentencePiece writes them."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *tiny_clip.LETTERS]
    vocab = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


@dataclass(frozen=True)
class Weights:
    """Every checkpoint that configs/sd35_medium names: tiny, in the layout in which it is published."""

    clip: str
    hpsv2: str
    pickscore: str
    processor: str
    mask2former: str


def save_rewards(folder: Path) -> Weights:
    """ClipScore and PickScore as transformers' folders, HPSv2 as open_clip's file, Mask2Former as transformers' folder."""
    tiny_clip.save_transformers(folder / "clip", quick_gelu=True)
    tiny_clip.save_transformers(folder / "pickscore", quick_gelu=False, processor=False, seed=1)
    torch.save(
        {"epoch": 1, "state_dict": tiny_clip.ReferenceCLIP(seed=2).state_dict()}, folder / "HPS_v2.1_compressed.pt"
    )
    (folder / "processor").mkdir()
    tiny_clip.save_processor(folder / "processor")
    tiny_mask2former.build().save_pretrained(folder / "mask2former")
    names = ("clip", "HPS_v2.1_compressed.pt", "pickscore", "processor", "mask2former")
    return Weights(*(str(folder / name) for name in names))
