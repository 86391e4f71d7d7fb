"""The policy: a diffusers SD3 pipeline with LoRA adapters. The only place that knows diffusers and peft."""

from recast_lightning.policy.adapters import ADAPTERS, LORA_TARGETS, Adapter, Adapters
from recast_lightning.policy.embeddings import Condition, PromptEncoder
from recast_lightning.policy.policy import Policy

__all__ = ["ADAPTERS", "LORA_TARGETS", "Adapter", "Adapters", "Condition", "Policy", "PromptEncoder"]
