"""The policy: a flow-matching diffusers pipeline with LoRA adapters. The only place that knows diffusers and peft."""

from recast_lightning.policy.condition import Condition
from recast_lightning.policy.lora import ADAPTERS, Adapter, Adapters
from recast_lightning.policy.policy import Policy
from recast_lightning.policy.prompt_encoder import PromptEncoder

__all__ = ["ADAPTERS", "Adapter", "Adapters", "Condition", "Policy", "PromptEncoder"]
