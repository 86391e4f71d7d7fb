"""The policy, and the traps of adapters: starved gradients, checkpointing, lost scale."""

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from recast_lightning.paths import EMBEDDED
from recast_lightning.policy import ADAPTERS, Policy
from recast_lightning.seeds import noise

TEXTS = ['a sign with two red circles above the text "TAN"', 'a sign with a blue star below the text "LO"']


def fresh(**options) -> Policy:
    policy = Policy(num_steps=3, lora_rank=2, **options)
    policy.load(seed=1)
    return policy


def batch(policy):
    x = noise(policy.latent_shape, [("test", i) for i in range(2)])
    return x, torch.tensor([0.5, 0.9]), policy.encode_prompts(TEXTS)


def perturb(policy, adapter):
    with torch.no_grad():
        for i, p in enumerate(policy.adapter_parameters(adapter)):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))


def test_adapters_start_equal_and_only_the_default_trains():
    policy = fresh()
    weights = [policy.adapter_parameters(name) for name in ADAPTERS]
    assert len(weights[0]) > 20
    for old, ema, default in zip(*weights, strict=True):
        assert torch.equal(old, default)
        assert torch.equal(ema, default)
        assert default.requires_grad
        assert not old.requires_grad
        assert not ema.requires_grad
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(".default." in n for n in trained)


def test_first_adapter_weights_depend_on_the_seed_only():
    torch.manual_seed(5)
    one = fresh().adapter_parameters("default")
    torch.manual_seed(6)
    two = fresh().adapter_parameters("default")
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_first_adapter_weights_do_not_depend_on_the_default_device():
    """Which is a GPU under some strategies, whose numbers are others than the CPU's; here it is one without numbers."""
    on_cpu = fresh()
    with torch.device("meta"):
        policy = fresh()
    for name in ADAPTERS:
        pairs = zip(on_cpu.adapter_parameters(name), policy.adapter_parameters(name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(on_cpu.sigmas, policy.sigmas)
    assert {p.device.type for p in policy.parameters()} == {"cpu"}


def test_the_vae_has_a_precision_of_its_own():
    half, exact = fresh(dtype="bfloat16"), fresh()
    latents = noise(half.latent_shape, [("test", 0)])
    assert half.transformer.dtype == torch.bfloat16
    assert torch.equal(half.decode(latents), exact.decode(latents))
    assert not torch.equal(fresh(vae_dtype="bfloat16").decode(latents), exact.decode(latents))


def test_the_reference_is_the_base_bitwise():
    policy = fresh()
    x, sigma, condition = batch(policy)
    base = StableDiffusion3Pipeline.from_pretrained(
        EMBEDDED / "base", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    ).transformer
    expected = base(x, condition.tensors["embeddings"], condition.tensors["pooled"], 1000 * sigma, return_dict=False)[0]
    perturb(policy, "default")
    with policy.adapter(None):
        assert torch.equal(policy(x, sigma, condition), expected)
    assert not torch.allclose(policy(x, sigma, condition), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_switching_before_the_trained_pass_keeps_every_gradient(checkpointing):
    policy = fresh(gradient_checkpointing=checkpointing)
    policy.train()
    perturb(policy, "default")
    x, sigma, condition = batch(policy)
    for name in (None, "old"):
        with policy.adapter(name):
            policy(x, sigma, condition)
    policy(x, sigma, condition).square().mean().backward()
    gradients = [p.grad for p in policy.adapter_parameters("default")]
    assert all(g is not None for g in gradients)
    assert (
        sum(float(g.abs().sum()) > 0 for g in gradients) >= len(gradients) - 4
    )  # the last text block drops its output
    assert all(p.grad is None for p in policy.adapter_parameters("old"))


def test_adapter_is_restored_after_an_exception(policy):
    before = [(layer._active_adapter, layer._disable_adapters) for layer in policy.adapters.layers]
    with pytest.raises(RuntimeError, match="stop"), policy.adapter("old"):
        raise RuntimeError("stop")
    assert [(layer._active_adapter, layer._disable_adapters) for layer in policy.adapters.layers] == before


def test_blend_is_the_decay_of_the_design():
    policy = fresh()
    perturb(policy, "default")
    old = [p.clone() for p in policy.adapter_parameters("old")]
    policy.blend("old", "default", keep=0.25)
    for now, before, target in zip(
        policy.adapter_parameters("old"), old, policy.adapter_parameters("default"), strict=True
    ):
        torch.testing.assert_close(now, 0.25 * before + 0.75 * target)


@pytest.mark.parametrize("header", [True, False], ids=["with header", "without"])
@pytest.mark.parametrize("alpha", [4, 6])
def test_saved_lora_gives_the_same_velocity_in_diffusers(alpha, header, tmp_path):
    """α is not in the header alone: many loaders run what has no α beside its weights at scale 1."""
    policy = fresh(lora_alpha=alpha)
    perturb(policy, "ema")
    x, sigma, condition = batch(policy)
    with policy.adapter("ema"):
        expected = policy(x, sigma, condition)
    policy.save_lora(tmp_path)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        EMBEDDED / "base", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.load_lora_weights(tmp_path if header else load_file(tmp_path / "pytorch_lora_weights.safetensors"))
    actual = pipeline.transformer(
        x, condition.tensors["embeddings"], condition.tensors["pooled"], 1000 * sigma, return_dict=False
    )[0]
    if alpha == 4:  # a scale of 2, a power of two
        assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected)


def test_sampling_matches_the_pipeline_itself(policy):
    """Euler on the scheduler's grid is what diffusers does; ours must be the same picture."""
    euler = Policy(num_steps=4, lora_rank=2, solver="euler")
    euler.load()
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        EMBEDDED / "base", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    start = noise(euler.latent_shape, [("test", 0)])
    expected = pipeline(
        TEXTS[0], num_inference_steps=4, guidance_scale=1.0, height=64, width=64, latents=start.clone(),
        max_sequence_length=0, output_type="pt",
    ).images  # fmt: skip
    actual = euler.decode(euler.sample(start, euler.encode_prompts(TEXTS[:1]), None))
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


def test_a_prompts_embedding_does_not_depend_on_its_neighbours(policy):
    policy._helpers["encoder"].cache.clear()
    together = policy.encode_prompts(TEXTS)
    policy._helpers["encoder"].cache.clear()
    alone = policy.encode_prompts(TEXTS[1:])
    assert all(torch.equal(together.tensors[name][1:], tensor) for name, tensor in alone.tensors.items())


def test_the_prompt_cache_is_bounded():
    policy = fresh(embedding_cache=1)
    assert policy.encode_prompts(TEXTS).tensors["embeddings"].shape[0] == 2
    assert list(policy._helpers["encoder"].cache) == TEXTS[1:]


def test_autoencoder_round_trip_keeps_a_sign(policy):
    from recast_lightning.proposals.renderer import RendererProposals
    from recast_lightning.signboard.world import make_prompts

    signs = RendererProposals().images(make_prompts(8, 0, "test"), 64, 64)
    assert float((policy.decode(policy.encode(signs)) - signs).abs().mean()) < 0.03


def test_a_path_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        Policy(path=str(tmp_path)).validate()
    with pytest.raises(ValueError, match="does not exist"):
        Policy(path="./nowhere").validate()
    with pytest.raises(ValueError, match="signboard:base"):
        Policy(path="signboard:nothing").validate()


def test_the_state_dict_has_the_adapters_only(policy):
    names = set(policy.state_dict())
    assert names == {n for n, _ in policy.named_parameters() if ".lora_" in n}
    assert len(names) == 3 * len(policy.adapter_parameters("default"))


def test_the_fingerprint_tells_policies_apart():
    one, two = fresh(), fresh()
    assert one.fingerprint() == two.fingerprint()
    perturb(two, "default")
    assert one.fingerprint() != two.fingerprint()


def test_autocast_neither_touches_frozen_helpers_nor_serves_stale_weights():
    policy = fresh()
    x, sigma, condition = batch(policy)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as Lightning's bf16-mixed opens it
        policy._helpers["encoder"].cache.clear()
        assert torch.equal(policy.encode_prompts(TEXTS).tensors["embeddings"], condition.tensors["embeddings"])
        pictures = policy.decode(x)
        with policy.adapter("default"):
            before = policy(x, sigma, condition)
            perturb(policy, "default")
            after = policy(x, sigma, condition)
    assert torch.equal(pictures, policy.decode(x))
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_in_every_state(monkeypatch):
    """Each state is compiled by itself; dynamo's graphs run as they are, without a compiler."""
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: compile_(block, backend="eager"))
    plain, compiled = fresh(), fresh(compile_blocks=True)
    for policy in (plain, compiled):
        for scale, name in enumerate(ADAPTERS):
            for _ in range(scale + 1):
                perturb(policy, name)
    x, sigma, condition = batch(plain)
    seen = []
    for name in (None, *ADAPTERS):
        with plain.adapter(name), compiled.adapter(name):
            seen.append(plain(x, sigma, condition))
            torch.testing.assert_close(compiled(x, sigma, condition), seen[-1], atol=1e-5, rtol=0)
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    for policy in (plain, compiled):
        policy(x, sigma, condition).square().mean().backward()
    for a, b in zip(*(p.adapter_parameters("default") for p in (plain, compiled)), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
