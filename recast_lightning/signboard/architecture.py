"""The tiny models of Signboard: the classes and key layouts of the real ones, small numbers."""

from __future__ import annotations

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from recast_lightning.signboard.tokenizer import MAX_TOKENS
from recast_lightning.signboard.world import SIZE

LATENT_CHANNELS = 8
TEXT_WIDTH = 64


def build_autoencoder() -> AutoencoderKL:
    """64×64×3 → 16×16×8, with a thin full-resolution part, which is where the time goes."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer() -> SD3Transformer2DModel:
    """SD3.5's blocks (qk_norm, dual attention in the first), 4 layers of width 96."""
    return SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        caption_projection_dim=96,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=SIZE // 8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _token_ids(tokenizer: CLIPTokenizer) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def build_text_encoder(tokenizer: CLIPTokenizer, hidden_act: str) -> CLIPTextModelWithProjection:
    """A CLIP text tower of two layers ("quick_gelu" as CLIP-L, "gelu" as bigG)."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            hidden_act=hidden_act,
            **_token_ids(tokenizer),
        )
    )


def build_clip(tokenizer: CLIPTokenizer, hidden_act: str = "quick_gelu") -> CLIPModel:
    """A CLIP of 64×64 pictures in patches of 8."""
    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "projection_dim": 64}
    text = {"num_hidden_layers": 2, "max_position_embeddings": MAX_TOKENS, **_token_ids(tokenizer)}
    vision = {"num_hidden_layers": 4, "image_size": SIZE, "patch_size": 8}
    return CLIPModel(
        CLIPConfig(
            text_config={**width, **text, "hidden_act": hidden_act},
            vision_config={**width, **vision, "hidden_act": hidden_act},
            projection_dim=64,
        )
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """SD3.5's scheduler."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0)
