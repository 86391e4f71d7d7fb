"""The seam: each family gives diffusers' own latents, trains all its blocks, exports what diffusers loads."""

import diffusers
import pytest
import torch
from helpers.tiny_policy import SIZE, TEXTS, batch, loaded
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import init_device_mesh

from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.policy.families.flux import Flux, pack, unpack
from recast_lightning.policy.pipeline_folder import PipelineFolder
from recast_lightning.seeds import noise


def perturb(policy: Policy, adapter: str) -> None:
    with torch.no_grad():
        for i, p in enumerate(policy.adapter_parameters(adapter)):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))


def diffusers_pipeline(policy: Policy):
    found = PipelineFolder.find(policy.path)
    absent = dict.fromkeys(part for part in policy.family.text_parts if not found.has(part))
    pipeline = getattr(diffusers, found.pipeline_class).from_pretrained(found.folder, dtype=torch.float32, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


CASES = {  # options of ours, arguments of diffusers' pipeline
    "sd3": ({}, {"guidance_scale": 1.0}),
    "sd3 without T5": ({}, {"guidance_scale": 1.0, "max_sequence_length": 0}),
    "sd3 dynamic": ({"height": 64}, {"guidance_scale": 1.0, "height": 64}),
    "flux": ({}, {}),
    "flux schnell": ({"max_sequence_length": 16}, {"max_sequence_length": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_euler_gives_the_latents_of_diffusers_pipeline(folders, case):
    options, arguments = CASES[case]
    policy = loaded(folders[case], solver="euler", num_steps=4, **options)
    pipeline = diffusers_pipeline(policy)
    start = noise(policy.latent_shape, [("test", 0)])
    packed = isinstance(policy.family, Flux)
    sizes = {"height": policy.height, "width": policy.width}
    theirs = pipeline(
        TEXTS[0], num_inference_steps=4, latents=pack(start) if packed else start, output_type="latent",
        **({"max_sequence_length": policy.family.max_sequence_length} | sizes | arguments),
    ).images  # fmt: skip
    if packed:
        theirs = pipeline._unpack_latents(theirs, *sizes.values(), pipeline.vae_scale_factor)
    ours = policy.sample(start, policy.encode_prompts(TEXTS[:1]), None)
    assert torch.equal(policy.sigmas.flip(0).float(), pipeline.scheduler.sigmas)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    images = pipeline.image_processor.postprocess(
        pipeline.vae.decode(theirs / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor)[0], "pt"
    )
    torch.testing.assert_close(policy.decode(ours), images.detach(), atol=1e-5, rtol=0)


def test_flux_shifts_its_levels_for_the_configured_picture(folders):
    """mu = 0.5 at 256 tokens and 1.15 at 4096 (16 pixels a side each): 1 / (1 + e^-mu) in the middle."""
    for side, mu in ((256, 0.5), (1024, 1.15)):
        policy = loaded(folders["flux"], height=side, width=side, num_steps=2)
        torch.testing.assert_close(policy.sigmas[1], torch.tensor(mu).sigmoid().double(), atol=1e-6, rtol=0)


def test_packing_is_undone():
    x = torch.randn(2, 3, 4, 6)
    assert pack(x).shape == (2, 6, 12)
    assert torch.equal(unpack(pack(x), 2, 3), x)


@pytest.mark.parametrize("case", ["sd3", "flux"])
def test_velocity_treats_each_row_by_itself(folders, case):
    policy = loaded(folders[case])
    x, sigma, condition = batch(policy)
    together = policy(x, sigma, condition)
    for i in range(2):
        row = torch.tensor([i])
        torch.testing.assert_close(policy(x[row], sigma[row], condition[row]), together[row], atol=1e-5, rtol=0)
    assert not torch.allclose(policy(x, sigma.flip(0), condition), together)
    assert not torch.allclose(policy(x, sigma, condition[torch.tensor([1, 0])]), together)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["sd3", "flux"])
def test_gradients_reach_the_adapters_of_every_block(folders, case, checkpointing):
    policy = loaded(folders[case], gradient_checkpointing=checkpointing)
    policy.train()
    perturb(policy, "default")
    policy(*batch(policy)).square().mean().backward()
    trained = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    reached = {
        name.partition(".lora_")[0] for name, grad in trained.items() if grad is not None and grad.abs().sum() > 0
    }
    adapted = {name.partition(".lora_")[0] for name in trained}
    prefixes = [f"transformer.{kind}.{i}." for kind in policy.family.block_lists for i in range(2)]
    assert all(any(name.startswith(prefix) for name in reached) for prefix in prefixes)
    assert all(".1.attn." in name for name in adapted - reached)  # SD3's last block drops its text
    assert len(adapted - reached) == {"sd3": 1, "flux": 0}[case]
    if checkpointing:
        plain = loaded(folders[case])
        plain.train()
        perturb(plain, "default")
        plain(*batch(plain)).square().mean().backward()
        for a, b in zip(*(p.adapter_parameters("default") for p in (policy, plain)), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("case", ["sd3", "flux"])
def test_an_exported_adapter_gives_the_same_latents_in_diffusers(folders, case, tmp_path):
    policy = loaded(folders[case], lora_alpha=6, solver="euler")
    perturb(policy, "ema")
    start = noise(policy.latent_shape, [("test", 0)])
    packed = isinstance(policy.family, Flux)
    pipeline = diffusers_pipeline(policy)

    def draw() -> torch.Tensor:
        arguments = {"guidance_scale": 3.5} if packed else {"guidance_scale": 1.0, "max_sequence_length": 256}
        latents = pipeline(
            TEXTS[0], num_inference_steps=3, latents=pack(start) if packed else start, output_type="latent", **SIZE,
            **arguments,
        ).images  # fmt: skip
        return pipeline._unpack_latents(latents, *SIZE.values(), 8) if packed else latents

    ours, base = policy.sample(start, policy.encode_prompts(TEXTS[:1]), "ema"), draw()
    policy.save_lora(tmp_path)
    pipeline.load_lora_weights(tmp_path)
    assert (ours - base).abs().max() > 0.01
    torch.testing.assert_close(draw(), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["sd3", "flux"])
def test_every_block_is_a_unit_of_sharding_and_the_state_dict_stays(folders, case, single_process):
    policy = loaded(folders[case])
    names, before = set(policy.state_dict()), policy(*batch(policy))
    policy.shard(init_device_mesh("cpu", (1,)))
    blocks = policy.family.blocks(policy.transformer)
    assert len(blocks) == {"sd3": 2, "flux": 4}[case]
    assert {m for m in policy.transformer.modules() if isinstance(m, FSDPModule)} == {policy.transformer, *blocks}
    assert set(policy.state_dict()) == names
    torch.testing.assert_close(policy(*batch(policy)), before)


@pytest.fixture
def single_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sd3", "flux"])
def test_compiled_blocks_of_every_kind_give_the_same(folders, case, monkeypatch):
    compiled, compile_ = [], torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda block: (compiled.append(block), compile_(block, backend="eager"))
    )
    policy = loaded(folders[case], compile_blocks=True)
    assert compiled == policy.family.blocks(policy.transformer)
    for adapter in (None, "old"):
        with policy.adapter(adapter):
            torch.testing.assert_close(policy(*batch(policy)), loaded(folders[case])(*batch(policy)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flux_embeddings_come_back_from_disk_bitwise(folders, tmp_path, dtype):
    options = {"dtype": dtype, "embedding_folder": str(tmp_path / "e"), "max_sequence_length": 24}
    first = loaded(folders["flux"], **options)
    first.encode_ahead(TEXTS, lambda _: None)
    again = loaded(folders["flux"], **options)
    again._helpers["encoder"].load = None  # which fails where an encoder is needed
    encoded = loaded(folders["flux"], **options | {"embedding_folder": None}).encode_prompts(TEXTS).tensors
    found = again.encode_prompts(TEXTS).tensors
    assert {name: tensor.shape for name, tensor in found.items()} == {"embeddings": (2, 24, 48), "pooled": (2, 16)}
    assert all(torch.equal(tensor, encoded[name]) for name, tensor in found.items())
    with pytest.raises(UserError, match="family flux, but this run has family sd3"):
        Policy(str(folders["sd3"]), **SIZE, **options).validate()


def test_guidance_is_embedded_and_tells_bases_apart(folders):
    default, same, other = (loaded(folders["flux"], guidance=scale) for scale in (None, 3.5, 1.0))
    x, sigma, condition = batch(default)
    assert torch.equal(default(x, sigma, condition), same(x, sigma, condition))
    assert not torch.allclose(default(x, sigma, condition), other(x, sigma, condition))
    assert default.base_fingerprint == same.base_fingerprint != other.base_fingerprint
    assert default.fingerprint() == same.fingerprint() != other.fingerprint()
