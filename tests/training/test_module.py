"""How scores become r: failures are left out exactly, and credit differs by level."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_rewards import Brightness, Broken, SpawnedBrightness, ThreadedBrightness

from recast_lightning.credit import CreditMatrix
from recast_lightning.credit.stages import Stage
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.rewards import OCR, ClipScore
from recast_lightning.rollout.samples import RolloutBuffer, Sample, TrainItem
from recast_lightning.training.data import PromptDataModule
from recast_lightning.training.module import RecastModule

SAMPLES = [Sample(group, group, image) for group in range(2) for image in range(3)]
NAN = float("nan")


@pytest.fixture
def module():
    rewards = {"clip": ClipScore("signboard:clip"), "ocr": OCR(detect=False)}
    module = RecastModule(Policy(num_steps=2), rewards, [Stage("s", 1, {"clip": 1.0, "ocr": 1.0})])
    module._trainer = SimpleNamespace(global_rank=0, world_size=1, current_epoch=0)
    module.all_gather = lambda tensor: tensor[None]
    return module


def credit(weights, budgets=None):
    return CreditMatrix(
        torch.tensor(weights, dtype=torch.float64), budgets or {"clip": 1.0, "ocr": 1.0}, "recast",
        torch.ones(2, 2), torch.ones(2, 2),
    )  # fmt: skip


def test_a_level_listens_to_the_rewards_that_w_gives_it(module):
    rewards = torch.tensor([[0.0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [3, 0]])
    r = module._optimality(rewards, SAMPLES, credit([[0.5, 0.0], [0.0, 0.5]]), rollout=0)
    assert r.shape == (6, 2)
    assert torch.equal(r[:3, 0], torch.full((3,), 0.5))  # level 1 hears clip alone, which says nothing of group 0
    assert r[3, 0] < 0.5 < r[5, 0]
    assert torch.equal(r[3:, 1], torch.full((3,), 0.5))
    assert r[0, 1] < 0.5 < r[2, 1]


def test_a_failed_score_leaves_its_sample_out_and_no_other(module):
    rewards = torch.tensor([[0.0, 1], [0, 2], [0, NAN], [1, 0], [2, 0], [3, 0]])
    even = credit([[0.25, 0.25], [0.25, 0.25]])
    r = module._optimality(rewards, SAMPLES, even, rollout=0)
    assert r[2].isnan().all()
    assert r[[0, 1, 3, 4, 5]].isfinite().all()
    torch.testing.assert_close(r[0] + r[1], torch.ones(2))  # the mean is over the two that are left
    assert module.rollout_metrics["reward/ocr/failed"] == 1
    assert module.rollout_metrics["reward/ocr/mean"] == pytest.approx(3 / 5)


def test_a_reward_without_a_budget_may_fail_without_harm(module):
    rewards = torch.tensor([[0.0, NAN]] * 3 + [[1, 1], [2, 1], [3, 1]])
    matrix = credit([[0.5, 0.5], [0.0, 0.0]], {"clip": 1.0, "ocr": 0.0})
    assert module._optimality(rewards, SAMPLES, matrix, rollout=0).isfinite().all()


def test_aggregation_reaches_r(module):
    rewards = torch.tensor([[0.1, 0.0], [0.0, 1.0], [0.0, 0.0]] * 2)
    even = credit([[0.25, 0.25], [0.25, 0.25]])
    loud = module._optimality(rewards, SAMPLES, even, rollout=0)
    module.aggregation = "per_reward"
    fair = module._optimality(rewards, SAMPLES, even, rollout=0)
    assert loud[0, 0] < 0.5 < loud[1, 0]
    torch.testing.assert_close(fair[0], fair[1], atol=1e-3, rtol=0)  # each is best by one reward, whatever its range


def test_a_reward_that_tells_nothing_apart_is_named_once(module):
    rewards = torch.tensor([[0.0, 1], [0, 2], [0, 3], [0, 0], [0, 0], [0, NAN]])
    even = credit([[0.25, 0.25], [0.25, 0.25]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rollout in (2, 3):
            module._optimality(rewards, SAMPLES, even, rollout)
    (said,) = [str(w.message) for w in caught if "same score" in str(w.message)]
    assert said.startswith("Reward 'clip' gave all images of rollout 3 the same score, 0:")


@pytest.fixture
def collecting(policy):
    """Makes a module that draws a rollout of 2 × 4 images in batches of 2, and remembers what it logged."""
    made = []

    def make(reward, **options):
        module = RecastModule(policy, {"light": reward}, [Stage("s", 1, {"light": 1.0}, "static")], 2, 2, **options)
        data = PromptDataModule("signboard:train:4", "signboard:test:2", prompts_per_rollout=2, group_size=4)
        data.load(ocr=False)
        logged = []
        module._trainer = SimpleNamespace(
            global_rank=0, world_size=1, current_epoch=0, datamodule=data, global_step=0, progress_bar_callback=None,
            loggers=[SimpleNamespace(log_metrics=lambda metrics, step: logged.append(dict(metrics)))],
            precision_plugin=SimpleNamespace(forward_context=nullcontext),
        )  # fmt: skip
        module.all_gather = lambda tensor: tensor[None]
        made.append(module)
        return module, logged

    yield make
    for module in made:
        module.teardown("fit")


def test_a_rollout_scored_by_workers_is_the_rollout_scored_inline_bitwise(collecting):
    inline, logged = collecting(Brightness())
    expected = inline.collect(0)
    assert expected.optimality.unique().numel() > 2
    for kind in (ThreadedBrightness, SpawnedBrightness):
        module, again = collecting(kind(delay=0.05), num_workers=1)
        buffer = module.collect(0)
        assert torch.equal(buffer.latents, expected.latents)
        assert torch.equal(buffer.optimality, expected.optimality)
        assert again[0]["reward/light/mean"] == logged[0]["reward/light/mean"]


def test_a_rollout_of_failures_is_logged_and_stops_the_run(collecting):
    module, logged = collecting(Brightness(least=2.0))
    with pytest.raises(UserError, match="Reward 'light' could not score 8 of the 8 images of rollout 1"):
        module.collect(0)
    assert logged[0]["reward/light/failed"] == 8
    module, logged = collecting(Brightness(least=2.0), failure_share=1.0)
    assert module.collect(0).optimality.isnan().all()


def test_a_reward_that_breaks_in_a_rollout_leaves_no_worker(collecting):
    module, _ = collecting(Broken(how="key", workers="threads"), num_workers=1)
    with pytest.raises(RuntimeError, match="Reward 'light' broke with KeyError"):
        module.collect(0)
    assert module.scoring._crew is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"failure_share": 1.5}, r"failure_share must be in \[0, 1\], got 1.5"),
        ({"aggregation": "mean"}, "aggregation must be 'sum' or 'per_reward', got 'mean'"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
    ],
)
def test_options_outside_their_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        RecastModule(Policy(), {"ocr": OCR()}, [Stage("s", 1, {"ocr": 1.0})], **option)


def test_w_of_other_rewards_or_levels_is_refused(module):
    with pytest.raises(ValueError, match="W is for clip at 2 levels"):
        module.set_credit(CreditMatrix.from_gains(torch.ones(1, 2), {"clip": 1.0}))


def test_a_measured_stage_without_a_profiler_says_what_to_add(module):
    with pytest.raises(RuntimeError, match="add RenyiProfilerCallback"):
        module.current_credit()


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match="timestep_fraction must be in"):
        RecastModule(Policy(), {"ocr": OCR()}, [Stage("s", 1, {"ocr": 1.0})], timestep_fraction=fraction)


def test_a_sample_without_a_score_does_not_train(policy):
    module = RecastModule(policy, {"ocr": OCR(detect=False)}, [Stage("s", 1, {"ocr": 1.0})], kl_weight=0.5)
    prompts = ['a sign with a blue star below the text "TO"', 'a sign with two red circles above the text "CAT"']
    latents, noise = torch.randn(2, *policy.latent_shape), torch.randn(2, *policy.latent_shape)
    both = TrainItem(latents, noise, 2, prompts, torch.tensor([0.7, NAN]))
    alone = TrainItem(latents[:1], noise[:1], 2, prompts[:1], torch.tensor([0.7]))
    half, whole = module.training_step(both, 0), module.training_step(alone, 0)
    torch.testing.assert_close(2 * half, whole)  # the mean is over the micro-batch, whose other sample says nothing


def test_a_micro_batch_trains_at_its_share_of_the_levels(module, monkeypatch):
    monkeypatch.setattr(Policy, "latent_shape", (1, 2, 2))
    module.levels_per_batch, module.micro_batch_size = 1, 3
    buffer = RolloutBuffer(SAMPLES, torch.randn(6, 1, 2, 2), [str(s) for s in SAMPLES], torch.rand(6, 2))
    items = [module.train_item(buffer, rollout, place) for rollout in range(8) for place in range(2)]
    assert {item.level for item in items} == {1, 2}
    second = items[1]
    assert second.texts == buffer.texts[3:]
    assert torch.equal(second.optimality, buffer.optimality[3:, second.level - 1])
    again = module.train_item(buffer, 0, 1)
    assert torch.equal(again.noise, second.noise)
    assert not torch.equal(items[3].noise, second.noise)
