"""Which of Lightning's strategies and precisions can train a policy, and what they must be kept from."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from recast_lightning.policy import Policy

_SHARDED = (
    "take configs/strategy/fsdp.yaml, which shards with lightning.pytorch.strategies.ModelParallelStrategy (FSDP2), "
    "or ddp."
)


def check_strategy_name(name: str) -> None:
    """Refuse strategies that cannot train several adapters on a frozen base, by their name or class path.

    Raises:
        ValueError: saying what to take.
    """
    if re.search("fsdp|deepspeed", name.rpartition(".")[2].lower()):
        raise ValueError(f"trainer.strategy {name!r} is not supported: {_SHARDED}")


def check_strategy(trainer: L.Trainer) -> None:
    """Refuse strategies, settings of them, and precisions that cannot train a policy.

    Raises:
        ValueError: saying what would be right.
    """
    if isinstance(trainer.precision_plugin, DoublePrecision):
        raise ValueError(
            "trainer.precision is 64-true, but adapters and noise are float32: take 32-true, or bf16-mixed."
        )
    strategy = trainer.strategy
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy)):
        raise ValueError(f"trainer.strategy {type(strategy).__name__!r} is not supported: {_SHARDED}")
    if not isinstance(strategy, ModelParallelStrategy):
        return
    if strategy._tensor_parallel_size != 1:
        raise ValueError(
            f"ModelParallelStrategy has tensor_parallel_size {strategy._tensor_parallel_size}, but policies are only "
            "sharded over data_parallel_size: set it to 1."
        )
    if strategy._data_parallel_size != trainer.world_size:
        means = ", which means the number of nodes" if strategy._data_parallel_size == "auto" else ""
        raise ValueError(
            f"ModelParallelStrategy has data_parallel_size {strategy._data_parallel_size}{means}: "
            f"set it to the number of processes (devices × num_nodes), {trainer.world_size}."
        )
    if strategy._save_distributed_checkpoint:
        raise ValueError(
            "ModelParallelStrategy has save_distributed_checkpoint true, but a distributed checkpoint that holds only "
            "the adapters cannot be loaded: set it to false."
        )


def keep_adapters_in_float32(trainer: L.Trainer, policy: Policy) -> None:
    """Let `bf16-true` and `16-true` mean the frozen weights alone.

    Lightning would round adapters, noise, r and scores likewise.
    """
    precision = trainer.precision_plugin
    if isinstance(precision, HalfPrecision):
        policy.dtype = precision._desired_input_dtype
        trainer.strategy.precision_plugin = Precision()


def number_weights_by_place(optimizer_states: list[dict[str, Any]], module: nn.Module) -> None:
    """Number the weights of saved optimizer states as `ModelParallelStrategy` does: by their place in the module.

    Other strategies read any numbers, so every checkpoint loads under every strategy.
    """
    places = [place for place, parameter in enumerate(module.parameters()) if parameter.requires_grad]
    for saved in optimizer_states:
        for group in saved.get("param_groups", []):  # none, where another process writes
            new = dict(zip(group["params"], places, strict=True))
            group["params"] = places
            saved["state"] = {new[number]: state for number, state in saved["state"].items()}
