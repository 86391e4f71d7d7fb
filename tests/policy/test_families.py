"""The seam: each family gives diffusers' own latents, trains all its blocks, exports what diffusers loads."""

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from helpers import tiny_flux, tiny_sd3
from huggingface_hub import constants
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import init_device_mesh

from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.policy.families import SD3, Flux
from recast_lightning.policy.families.flux import pack, unpack
from recast_lightning.policy.pipeline_folder import PipelineFolder
from recast_lightning.seeds import noise

TEXTS = ["a red sign", "two blue stars above a cross"]
SIZE = {"height": 32, "width": 48}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {
        "sd3": tiny_sd3.save_pipeline(place / "sd3"),
        "sd3 without T5": tiny_sd3.save_pipeline(place / "sd3-without", with_t5=False),
        "sd3 dynamic": with_dynamic_shift(tiny_sd3.save_pipeline(place / "sd3-dynamic")),
        "flux": tiny_flux.save_pipeline(place / "flux"),
        "flux schnell": tiny_flux.save_pipeline(place / "schnell", guidance_embeds=False, dynamic=False),
    }


def with_dynamic_shift(folder: Path) -> Path:
    file = folder / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
    return folder


def loaded(folder: Path, **options) -> Policy:
    policy = Policy(str(folder), **({"num_steps": 3, "lora_rank": 2, **SIZE} | options))
    policy.validate()
    policy.load()
    return policy


def batch(policy: Policy, size: int = 2):
    x = noise(policy.latent_shape, [("test", i) for i in range(size)])
    return x, torch.tensor([0.4, 0.9][:size]), policy.encode_prompts(TEXTS[:size])


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


# Options and folders that do not fit --------------------------------------------------------------------------------


MISFITS = {
    "flux without T5": ("flux", {"use_t5": False}, "use_t5 is false, but .* reads prompts by T5 alone"),
    "flux with no tokens": ("flux", {"max_sequence_length": 0}, "max_sequence_length is 0, but .* takes 1 to 512"),
    "flux with many tokens": ("flux", {"max_sequence_length": 513}, "is 513, but .* takes 1 to 512"),
    "sd3 with T5 without tokens": ("sd3", {"max_sequence_length": 0}, "max_sequence_length is 0, but .* has T5"),
    "guidance of sd3": ("sd3", {"guidance": 3.5}, "guidance is 3.5, but .* has no guidance embedding"),
    "guidance of schnell": ("flux schnell", {"guidance": 0.0}, "guidance is 0, but .* has no guidance embedding"),
    "half a square": ("flux", {"height": 40}, "height is 40, but .* multiples of 16 pixels: take 32 or 48"),
    "nothing wide": ("flux", {"width": 0}, "width is 0, but .*: take 16 or 32"),
    "too high": ("sd3", {"height": 272}, "height is 272, but .* multiples of 16 pixels up to 256: take 240 or 256"),
    "targets of another family": ("sd3", {"lora_targets": ["proj_mlp"]}, "'proj_mlp', which is the end of no module"),
    "targets": ("flux", {"lora_targets": ["attn.to_q", "attn.to_x"]}, "'attn.to_x', which is the end of no module"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_options_that_do_not_fit_the_family_are_refused(folders, case):
    name, options, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        Policy(str(folders[name]), **SIZE | options).validate()


def test_defaults_are_the_familys_own(folders):
    def family(name, **options):
        return Policy(str(folders[name]), **SIZE, **options)._fitting_family(PipelineFolder.find(str(folders[name])))

    assert family("sd3").max_sequence_length == 256
    assert family("sd3", use_t5=False).max_sequence_length == 0
    assert family("sd3", use_t5=False, max_sequence_length=128).max_sequence_length == 128
    assert family("sd3 without T5").max_sequence_length == 0
    assert family("flux").max_sequence_length == 512
    assert [family(name).guidance for name in ("sd3", "flux", "flux schnell")] == [None, 3.5, None]
    assert Policy(str(folders["sd3"])).lora_targets == SD3.lora_targets
    assert Policy(str(folders["flux"])).lora_targets == Flux.lora_targets
    assert Policy(str(folders["flux"]), lora_targets=["proj_mlp"]).lora_targets == ("proj_mlp",)


BROKEN = {
    "another class": ("model_index.json", {"_class_name": "QwenImagePipeline"}, "is a QwenImagePipeline, but a policy"),
    "no class": ("model_index.json", {"_class_name": None}, "must be a StableDiffusion3Pipeline or FluxPipeline"),
    "no encoder": ("model_index.json", {"text_encoder_2": [None, None]}, "saved without its text_encoder_2"),
    "no JSON": ("vae/config.json", None, r"vae/config\.json cannot be read as JSON"),
    "no file": ("transformer/config.json", "absent", r"has no transformer/config\.json: it must be a saved diffusers"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_no_pipeline_of_a_family_is_refused(folders, tmp_path, case):
    name, change, message = BROKEN[case]
    file = Path(shutil.copytree(folders["flux"], tmp_path / "pipeline")) / name
    if change == "absent":
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change) if change else "{")
    with pytest.raises(ValueError, match=message):
        Policy(str(tmp_path / "pipeline"), **SIZE).validate()


# A hub id -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(folders, tmp_path, monkeypatch):
    """Puts a pipeline's files into the hub's local cache, as a download would; gives its hub id."""

    def cache(name: str, keep: str = "*") -> str:
        repository = tmp_path / "hub/models--someone--model"
        snapshot = repository / "snapshots/0123456789012345678901234567890123456789"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs/main").write_text(snapshot.name)
        for file in folders[name].rglob(keep):
            if file.is_file():
                target = snapshot / file.relative_to(folders[name])
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
        return "someone/model"

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return cache


def test_a_cached_hub_id_is_as_good_as_its_folder(folders, cached, tmp_path):
    path = cached("flux")
    with pytest.raises(ValueError, match="height is 40, but 'someone/model' draws"):
        Policy(path, height=40).validate()
    assert Policy(path).lora_targets == Flux.lora_targets
    ours, theirs = loaded(path, embedding_folder=str(tmp_path / "e")), loaded(folders["flux"])
    assert torch.equal(ours(*batch(ours)), theirs(*batch(theirs)))
    assert len(list((tmp_path / "e").iterdir())) == 2


def test_a_hub_id_that_is_not_cached_is_checked_when_it_is_loaded(cached, monkeypatch):
    policy = Policy("someone/model", height=40, width=48)
    policy.validate()
    assert policy.lora_targets == ()
    with pytest.raises(UserError, match='The policy found no pipeline in "someone/model", neither here nor on the hub'):
        policy.load()
    cached("flux", "model_index.json")
    policy.validate()  # its sizes are not known yet
    load = diffusers.FluxPipeline.from_pretrained

    def download_and_load(path, **options):
        cached("flux")
        return load(path, **options)

    monkeypatch.setattr(diffusers.FluxPipeline, "from_pretrained", download_and_load)
    with pytest.raises(UserError, match="height is 40, but 'someone/model' draws"):
        policy.load()
