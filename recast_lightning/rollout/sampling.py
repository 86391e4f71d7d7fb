"""Samples latents from keyed noise, encodes prompts ahead of that, and tells how far the old policy is from the reference.

Shape legend: B batch, C H W latents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.flow import noise_to
from recast_lightning.policy import Adapter, Policy
from recast_lightning.prompts import Prompt
from recast_lightning.rollout.context import RunContext
from recast_lightning.rollout.processes import gather_values
from recast_lightning.seeds import noise as keyed_noise

Key = tuple[str | int, ...]


def sample_latents(
    policy: Policy, keys: Sequence[Key], texts: Sequence[str], adapter: Adapter | None, context: RunContext
) -> Tensor:
    """Latents x_0 [B, C, H, W] of prompts.

    Args:
        policy: what samples.
        keys: of the noise, one an image: the same key gives the same image.
        texts: prompts, [B].
        adapter: `old` in rollouts, `ema` in evaluations; None is the reference.
        context: of the run.
    """
    noise = keyed_noise(policy.latent_shape, keys).to(context.device)
    with context.autocast():
        return policy.sample(noise, policy.encode_prompts(texts), adapter)


def encode_ahead(policy: Policy, prompts: Sequence[Prompt], context: RunContext) -> None:
    """Have the embedding of every prompt on disk, each encoded by one process, and free the text encoders.

    A collective call that does nothing without an `embedding_folder`.

    Raises:
        UserError: if the folder cannot be written to, or processes do not see each other's files.
    """
    if policy.embedding_folder is None:
        return
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    share, failure = texts[context.rank :: context.world_size], None
    with context.progress("encoding prompts", len(share)) as advance:
        try:
            policy.encode_ahead(share, advance)
        except UserError as error:
            failure = error
    if not context.all_agree(failure is None):  # waits for all processes, too
        raise failure or UserError("Another process could not encode its prompts; its own message says why.")
    if not all(map(policy.has_embedding, texts)):
        raise UserError(
            f"embedding_folder {policy.embedding_folder!r} lacks what other processes wrote to it: give a folder that all "
            "nodes share."
        )


@torch.no_grad()
def reference_deviation(
    policy: Policy, x0: Tensor, keys: Sequence[Key], texts: Sequence[str], context: RunContext
) -> float:
    """How far the old policy has left the reference: mean (v_old − v_ref)² / mean v_ref², over all processes.

    Args:
        policy: whose `old` adapter is compared.
        x0: latents [B, C, H, W], whose rows take turns through all levels.
        keys: of their noise.
        texts: their prompts.
        context: of the run; a collective call.
    """
    levels = 1 + torch.arange(len(x0)) % policy.num_steps
    sigma = policy.sigmas[levels].to(context.device, x0.dtype)
    noise = keyed_noise(policy.latent_shape, keys).to(context.device)
    x_sigma = noise_to(x0.to(context.device), noise, sigma)
    with context.autocast():
        condition = policy.encode_prompts(texts)
        with policy.adapter("old"):
            velocity = policy(x_sigma, sigma, condition)
        with policy.adapter(None):
            reference = policy(x_sigma, sigma, condition)
    ratio = (velocity - reference).square().mean() / reference.square().mean()
    everyone = gather_values(ratio.item())
    return sum(everyone) / len(everyone)
