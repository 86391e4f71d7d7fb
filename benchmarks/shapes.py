"""SD3.5-Medium and the models around it at their true sizes without a byte of weights, and runs of them on shapes.

Modules are built on the meta device and run on fake tensors: meta tensors that call themselves CPU tensors, so that autocast
and autograd treat them as real. Two things are put right by hand, because there is no CUDA here: CUDA's autocast runs layer
norms in float32 and the CPU's does not (`cuda_norms`), and the FLOPs of the CPU's flash attention, which saves for backward
what CUDA's saves, are counted by CUDA's formula.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from recast_lightning.objective import NFTLoss
from recast_lightning.policy import Condition, Policy
from recast_lightning.policy.families import SD3
from recast_lightning.policy.lora import Adapters
from recast_lightning.policy.pipeline_folder import PipelineFolder

SIZE, TOKENS, LEVELS = 512, 333, 25  # pixels a side; 77 tokens of CLIP and 256 of T5; T
BF16, FP32 = torch.bfloat16, torch.float32

# Modules -----------------------------------------------------------------------------------------------------------


def transformer() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=24, num_attention_heads=24,
        attention_head_dim=64, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
        pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
    )  # fmt: skip


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16,
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def clip_text(width: int, layers: int, heads: int, act: str) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
            projection_dim=width, hidden_act=act,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
    )


def clip(text: tuple[int, int, int], vision: tuple[int, int, int], width: int) -> nn.Module:
    """A CLIP from (width, layers, heads) of its two towers, patch 14."""
    from transformers import CLIPConfig, CLIPModel

    towers = [
        {"hidden_size": w, "intermediate_size": 4 * w, "num_hidden_layers": layers, "num_attention_heads": heads}
        for w, layers, heads in (text, vision)
    ]
    return CLIPModel(
        CLIPConfig(text_config=towers[0], vision_config={**towers[1], "patch_size": 14}, projection_dim=width)
    )


def clip_l() -> nn.Module:
    return clip((768, 12, 12), (1024, 24, 16), 768)


def clip_h() -> nn.Module:
    return clip((1024, 24, 16), (1280, 32, 16), 1024)


def mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = SwinConfig(embed_dim=96, depths=[2, 2, 18, 2], num_heads=[3, 6, 12, 24], window_size=7, out_features=stages)
    return Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=80))


def hpsv3() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLModel

    text = {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    }  # fmt: skip
    vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584}
    return Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision))


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "CLIP-L (text)": lambda: clip_text(768, 12, 12, "quick_gelu"),
    "OpenCLIP bigG (text)": lambda: clip_text(1280, 32, 20, "gelu"),
    "T5-XXL": t5,
}
REWARDS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "ClipScore: CLIP L/14, also GenEval's colours": (clip_l, FP32),
    "HPSv2: CLIP H/14": (clip_h, FP32),
    "PickScore: CLIP H/14": (clip_h, FP32),
    "GenEval: Mask2Former Swin-S": (mask2former, FP32),
}
LATER: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {"HPSv3: Qwen2-VL-7B": (hpsv3, BF16)}


def on_meta(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A module of the wanted type, all of shapes."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Module.to(build(), dtype).eval().requires_grad_(False)


@dataclass
class Weights:
    parameters: int
    total_bytes: int
    buffer_bytes: int
    dtype: str

    @classmethod
    def of(cls, module: nn.Module) -> "Weights":
        parameters, buffers = list(module.parameters()), size(list(module.buffers()))
        (dtype,) = {str(p.dtype).removeprefix("torch.") for p in parameters}
        return cls(sum(p.numel() for p in parameters), size(parameters) + buffers, buffers, dtype)


def size(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def with_adapters() -> tuple[Policy, Adapters]:
    """The policy with its three adapters, on the meta device."""
    policy = Policy(height=SIZE, width=SIZE, num_steps=LEVELS, max_sequence_length=TOKENS - 77, dtype="bfloat16")
    policy.transformer = on_meta(transformer, BF16)
    policy.family = SD3(PipelineFolder.find(policy.path), policy.max_sequence_length)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy.adapters = Adapters(policy.transformer, policy.lora_rank, policy.lora_alpha, policy.lora_targets, seed=0)
    return policy, policy.adapters


# Running on shapes -------------------------------------------------------------------------------------------------


FLASH = "_scaled_dot_product_flash_attention"
for here, there in ((f"{FLASH}_for_cpu", FLASH), (f"{FLASH}_for_cpu_backward", f"{FLASH}_backward")):
    flop_registry[getattr(torch.ops.aten, here)] = flop_registry[getattr(torch.ops.aten, there)]
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Live(TorchDispatchMode):
    """Adds up the storages that are alive, as an allocator without any loss would see them."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self.add(tensor)
                self.add(tensor.grad)
        self.before = self.now

    def add(self, tensor: object) -> None:
        if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.add(leaf)
        return result


@contextmanager
def cuda_norms() -> Iterator[None]:
    """Layer norms in float32, as under CUDA's autocast."""
    plain = functional.layer_norm

    def in_float32(*args: object) -> Tensor:
        return plain(*(a.float() if isinstance(a, Tensor) else a for a in args))

    with mock.patch.object(functional, "layer_norm", in_float32):
        yield


def fake(module: nn.Module) -> nn.Module:
    """A module that runs, of fake tensors."""
    with FAKE:
        return module.to_empty(device="cpu")


def peak(module: nn.Module, run: Callable[[], object], autocast: bool = False) -> int:
    """Bytes that a run takes at its worst, beyond what the module holds."""
    with FAKE, ExitStack() as stack:
        if autocast:
            stack.enter_context(torch.autocast("cpu", BF16, cache_enabled=False))
            stack.enter_context(cuda_norms())
        live = stack.enter_context(Live(module))
        run()
    return live.peak - live.before


def tflop(run: Callable[[], object]) -> float:
    """TFLOP of a run. Never together with `Live`: the counter keeps tensors alive."""
    with FAKE, FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / 1e12


def draw(policy: Policy, batch: int) -> tuple[Tensor, Tensor, Condition]:
    """Latents, their levels, and encoded prompts."""
    config = policy.transformer.config
    tensors = {
        "embeddings": torch.empty(batch, TOKENS, config.joint_attention_dim, dtype=policy.dtype),
        "pooled": torch.empty(batch, config.pooled_projection_dim, dtype=policy.dtype),
    }
    return torch.empty(batch, 16, SIZE // 8, SIZE // 8), torch.empty(batch), Condition(tensors)


def train_step(policy: Policy, batch: int) -> None:
    """Three forwards and a backward, as `RecastModule.training_step` does them."""
    x0, sigma, condition = draw(policy, batch)
    x_sigma = x0 + torch.empty_like(x0)
    with policy.adapter("old"):
        velocity_old = policy(x_sigma, sigma, condition)
    with policy.adapter(None):
        velocity_reference = policy(x_sigma, sigma, condition)
    velocity = policy(x_sigma, sigma, condition)
    r = torch.empty(batch)
    loss = NFTLoss()(velocity, velocity_old, x_sigma, x0, sigma, r).loss
    (loss + 1e-4 * (velocity - velocity_reference).square().flatten(1).mean(1)).mean().backward()


def sample_step(policy: Policy, batch: int) -> None:
    """One step of a rollout."""
    with policy.adapter("old"):
        policy(*draw(policy, batch))
