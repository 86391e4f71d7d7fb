"""LoRA adapters on a diffusers transformer: trained, old, averaged; none is the frozen reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from recast_lightning.policy.sharding import gathered, reshard
from recast_lightning.seeds import derive_seed

Adapter = Literal["default", "old", "ema"]
ADAPTERS: tuple[Adapter, ...] = ("old", "ema", "default")  # diffusers trains the one added last


class Adapters:
    """The three adapters of a transformer, whose base they freeze.

    Args:
        transformer: a diffusers transformer.
        rank: of the adapters.
        alpha: their scale.
        targets: modules that get adapters, by the end of their name.
        seed: keys their first weights, which are the same for all three, and under every strategy: they are drawn on the
            CPU, whatever the default device is.
    """

    def __init__(self, transformer: Any, rank: int, alpha: int, targets: Sequence[str], seed: int) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        self.transformer = transformer
        transformer.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for name in ADAPTERS:
                torch.manual_seed(derive_seed(seed, "lora"))
                transformer.add_adapter(config, name)
        self.layers: list[Any] = [m for m in transformer.modules() if isinstance(m, LoraLayer)]
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(".default." in name)
            if ".lora_" in name:
                parameter.data = parameter.data.float()

    @contextmanager
    def use(self, name: Adapter | None) -> Iterator[None]:
        """Use another adapter (None: the frozen reference) for forwards without gradients.

        It touches neither `requires_grad` (peft's `set_adapter` does, which starves gradients) nor a forward that backward
        has yet to recompute: leave the block before the trained forward.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self.layers]
        for layer in self.layers:
            layer._disable_adapters = name is None
            layer._active_adapter = [name or "default"]
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, (active, disabled) in zip(self.layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def parameters(self, name: Adapter) -> list[nn.Parameter]:
        """The weights of one adapter, in the same order for every adapter."""
        reshard(self.transformer)
        return [p for n, p in self.transformer.named_parameters() if f".{name}." in n]

    @torch.no_grad()
    def blend(self, target: Adapter, source: Adapter, keep: float) -> None:
        """θ_target ← keep·θ_target + (1 − keep)·θ_source."""
        for p, q in zip(self.parameters(target), self.parameters(source), strict=True):
            p.lerp_(q, 1 - keep)

    def save(self, folder: Path, name: Adapter, pipeline_class: Any, write: bool) -> None:
        """Write `pytorch_lora_weights.safetensors` that `load_lora_weights` of the pipeline reads.

        The scale α/r is folded into `lora_B` (exact for a power of two, else rounded to float32) and the header says α = r,
        so that loaders that do not read the header see the same adapter.

        Args:
            folder: where to.
            name: of the adapter.
            pipeline_class: of diffusers, for this kind of transformer.
            write: false in the processes that only help to gather weights.
        """
        from peft import get_peft_model_state_dict

        reshard(self.transformer)
        lora = {n: gathered(p) for n, p in self.transformer.named_parameters() if f".{name}." in n}
        if not write:
            return
        weights = get_peft_model_state_dict(self.transformer, state_dict=lora, adapter_name=name)
        config = self.transformer.peft_config[name]
        scale = config.lora_alpha / config.r
        folded = {k: v * scale if ".lora_B." in k else v.contiguous() for k, v in weights.items()}
        options = config.to_dict() | {"lora_alpha": config.r}
        metadata = {k: sorted(v) if isinstance(v, set) else v for k, v in options.items()}
        pipeline_class.save_lora_weights(
            folder,
            transformer_lora_layers=folded,
            transformer_lora_adapter_metadata=metadata,
        )


def sample_of_weights(transformer: nn.Module) -> bytes:
    """Names and first few numbers of all weights, by which bases are told apart."""
    weights = transformer.named_parameters()
    return b"".join(n.encode() + w.detach().flatten()[:8].float().cpu().numpy().tobytes() for n, w in weights)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile blocks in place. Each kind of block is compiled anew for each adapter and mode that it meets."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 64)
    config.fail_on_recompile_limit_hit = True  # else it would go on uncompiled
    for block in blocks:
        block.compile()
