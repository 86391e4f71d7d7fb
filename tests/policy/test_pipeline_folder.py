"""Options that do not fit a family, folders that are no pipeline of one, and hub ids: refused before anything is loaded."""

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from helpers.tiny_policy import SIZE, batch, loaded
from huggingface_hub import constants

from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.policy.families import SD3, Flux
from recast_lightning.policy.pipeline_folder import PipelineFolder

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


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_schedulers_without_levels_that_fall_to_0_are_refused(folders, name):
    family = Policy(str(folders[name]), **SIZE)._fitting_family(PipelineFolder.find(str(folders[name])))
    fit = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    assert family.levels(fit, 4, 32, 32).shape == (5,)
    for scheduler, message in (
        (
            diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=None),
            "gives no noise levels: ",
        ),
        (diffusers.DDIMScheduler(), "has a DDIMScheduler, which gives no noise levels: "),
        (
            diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            "whose levels for 4 steps are 0, .*: they must fall",
        ),
    ):
        with pytest.raises(UserError, match=message):
            family.levels(scheduler, 4, 32, 32)


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
    "rising levels": (
        "scheduler/scheduler_config.json",
        {"invert_sigmas": True},
        "invert_sigmas, whose noise levels rise",
    ),
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
