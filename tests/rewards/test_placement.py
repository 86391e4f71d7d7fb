"""Where frozen models are: rewards on their devices, off them between batches, encoders and VAE only while they work."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_rewards import Brightness
from integration.tiny import config

from recast_lightning.cli import main
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy, PromptEncoder
from recast_lightning.policy.families import SD3
from recast_lightning.policy.pipeline_folder import PipelineFolder
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import ClipScore, GenEval, RewardModel
from recast_lightning.rewards.clip.backbone import ClipBackbone
from recast_lightning.rewards.geneval.detection import Detector
from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector
from recast_lightning.rollout import ScoringOptions, ScoringPool

FAR, NEAR = torch.device("meta"), torch.device("cpu")  # "meta" stands for a GPU
IMAGES, PROMPTS = torch.rand(2, 3, 64, 64), [Prompt("a sign")] * 2


class Weights:
    """Notes where it is sent; stays where it is."""

    def __init__(self) -> None:
        self.seen: list[torch.device] = []

    def to(self, device):
        self.seen.append(torch.device(device))
        return self

    def eval(self):
        return self

    def requires_grad_(self, _):
        return self


class Heavy(RewardModel):
    """Has weights, and can break."""

    name = "heavy"

    def __init__(self, breaks: bool = False, alone: bool = True) -> None:
        super().__init__()
        self.breaks, self.alone, self.weights = breaks, alone, Weights()

    def _load(self):
        return self.weights if self.alone else (self.weights, "tokenizer")

    def score(self, images, prompts):
        loaded = self.load()
        (loaded if self.alone else loaded[0]).to(self._device)
        if self.breaks:
            raise ValueError("it broke")
        return images.flatten(1).mean(1)


# Given devices ---------------------------------------------------------------------------------------------------


def placed(given, local_rank: int = 0, processes: int = 1) -> torch.device | None:
    """Where rewards score on one process."""
    return ScoringOptions(device=given).device_of(local_rank, processes)


def test_each_process_takes_its_device_of_a_list(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    given = ["cuda:4", "cuda:5", "cpu", "cuda"]
    assert [placed(given, rank, 4) for rank in range(4)] == [torch.device(name) for name in given]
    assert [placed("cuda:7", rank, 4) for rank in range(4)] == [torch.device("cuda:7")] * 4
    assert placed(None, 3, 4) is None


def test_devices_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(UserError, match="lists 2 devices for 3 processes on each machine"):
        placed(["cpu", "cpu"], 0, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert placed("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="'cuda:2' is not there: this machine has 2 CUDA devices"):
        placed("cuda:2")
    with pytest.raises(ValueError, match="scoring.device is 'gpu1': expected cpu"):
        ScoringOptions(device=["cpu", "gpu1"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["cpu", "cpu"], "lists 2 devices for 1 processes"), ("cuda:63", "'cuda:63' is not there: this machine has")],
)
def test_on_the_command_line_it_is_one_sentence_before_anything_is_loaded(
    given, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Policy, "load", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config(tmp_path, model__scoring__device=given))])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("recast: error: scoring.device ")
    assert expected in error
    assert len(error.splitlines()) == 1


# Off the device between batches ----------------------------------------------------------------------------------


@pytest.fixture
def _round_trips(monkeypatch):
    """Nothing comes back from "meta", so rewards only take note of their device."""
    monkeypatch.setattr(RewardModel, "to", lambda self, to: (setattr(self, "_device", torch.device(to)), self)[1])


pytestmark = pytest.mark.usefixtures("_round_trips")


@pytest.mark.parametrize("alone", [True, False])
def test_weights_are_on_the_device_for_a_batch_only(alone):
    reward = Heavy(alone=alone)
    pool = ScoringPool({"heavy": reward}, device=FAR, offload=True)
    assert reward.weights.seen == []
    scores = [pool.submit(IMAGES, PROMPTS, ["heavy"]).result() for _ in range(2)]
    assert reward.weights.seen == [FAR, NEAR, FAR, NEAR]
    assert torch.equal(scores[0], scores[1])
    assert scores[0].isfinite().all()


def test_they_stay_where_they_are_by_default():
    reward = Heavy()
    ScoringPool({"heavy": reward}, device=FAR).submit(IMAGES, PROMPTS, ["heavy"])
    assert reward.weights.seen == [FAR]


def test_they_leave_the_device_when_scoring_breaks():
    reward = Heavy(breaks=True)
    reward.offloaded = True
    with pytest.raises(ValueError, match="it broke"):
        reward.to(FAR)(IMAGES, PROMPTS)
    assert reward.weights.seen == [FAR, NEAR]


def test_offloading_notes_the_device():
    reward = Brightness().to("cpu")
    reward._device = FAR
    reward.offload()
    assert reward._device == NEAR


def test_a_clip_reward_takes_its_backbone_along(monkeypatch):
    reward, seen = ClipScore("signboard:clip"), Weights()
    expected = reward(IMAGES, PROMPTS)
    monkeypatch.setattr(ClipBackbone, "to", lambda self, device: (seen.to(device), self)[1])
    reward.offloaded = True
    assert torch.equal(reward.to(FAR)(IMAGES, PROMPTS), expected)
    assert seen.seen == [FAR, NEAR]


class FakeDetector(Detector):
    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()

    def load(self, device=None):
        self.weights.to(device or NEAR)

    def detect(self, images, hints=None):
        self.weights.to(images.device)
        return [[] for _ in images]


def test_geneval_takes_its_detector_along():
    detector = FakeDetector()
    reward = GenEval(detector)
    reward.offloaded = True
    prompts = [Prompt("a red cross", {"tag": "single_object", "include": [{"class": "cross", "count": 1}]})] * 2
    reward.to(FAR)(IMAGES, prompts)
    assert detector.weights.seen == [FAR, FAR, NEAR]  # read, used, brought back


def test_mask2former_takes_its_clip_along():
    detector = Mask2FormerDetector("nowhere/m", clip="nowhere/c")
    network, clip = Weights(), Weights()
    detector._loaded = network, SimpleNamespace(clip=clip)
    for device in (FAR, NEAR):
        detector.load(device)
    assert network.seen == clip.seen == [FAR, NEAR]


# Encoders and VAE -------------------------------------------------------------------------------------------------


class Pipeline:
    """A pipeline whose encoders note where they are sent."""

    def __init__(self) -> None:
        self.text_encoder, self.text_encoder_2, self.text_encoder_3 = Weights(), Weights(), None

    def encode_prompt(self, text, *args, device, **kwargs):
        if text == "break":
            raise RuntimeError("it broke")
        assert self.text_encoder.seen[-1] == self.text_encoder_2.seen[-1] == device
        return torch.zeros(1, 2, 4), None, torch.zeros(1, 4), None


@pytest.mark.parametrize("offload", [True, False])
def test_encoders_are_loaded_when_needed_and_on_the_device_while_they_work(offload):
    pipelines, family = [], SD3(PipelineFolder.find("signboard:base"))
    encoder = PromptEncoder(family, lambda: pipelines.append(Pipeline()) or pipelines[-1], 10, offload)
    assert not pipelines
    gpu = torch.device("cuda")
    for texts in (["a", "b"], ["c"], []):
        assert [text for text, _ in encoder._encode(texts, gpu)] == texts
    (pipeline,) = pipelines
    assert pipeline.text_encoder.seen == pipeline.text_encoder_2.seen == ([gpu, NEAR] if offload else [gpu]) * 2
    with pytest.raises(RuntimeError, match="it broke"):
        list(encoder._encode(["break"], gpu))
    assert pipeline.text_encoder.seen[-1] == (NEAR if offload else gpu)


@pytest.mark.parametrize("offload", [True, False])
def test_the_vae_is_on_the_device_while_it_works(offload, monkeypatch):
    policy = Policy(num_steps=2, lora_rank=1, offload_frozen=offload)
    policy.load()
    vae, seen = policy._helpers["vae"], Weights()
    vae.to = lambda device: (seen.to(device), vae)[1]
    latents = torch.zeros(1, *policy.latent_shape)
    monkeypatch.setattr(Policy, "device", FAR)
    monkeypatch.setattr(Policy, "_no_autocast", lambda self: nullcontext())  # which the far device does not know
    policy.float()  # moving the policy moves no helper
    assert not seen.seen
    policy.decode(latents)
    assert seen.seen == ([FAR, NEAR] if offload else [FAR])
    with pytest.raises(RuntimeError):
        policy.decode(latents[:, :1])
    assert seen.seen[-1] == (NEAR if offload else FAR)
