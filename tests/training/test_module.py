"""How scores become r and r a loss: failures are left out exactly, and credit differs by level."""

import copy
import gc
import signal
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_rewards import Brightness, Broken, SpawnedBrightness, ThreadedBrightness

from recast_lightning.credit import CreditMatrix, Stage
from recast_lightning.errors import UserError
from recast_lightning.objective import Advantages, NFTLoss
from recast_lightning.policy import Policy
from recast_lightning.prompts import Prompt
from recast_lightning.rewards import OCR, ClipScore
from recast_lightning.rollout import RolloutBuffer, RolloutOptions, SampleId, ScoringOptions, TrainItem, TrainItems
from recast_lightning.training import PromptDataModule, RecastModule

SAMPLES = [SampleId(group, group, image) for group in range(2) for image in range(3)]
NAN = float("nan")


def judged(rewards, matrix, *, advantages=Advantages(), rollouts=(0,)):
    """r [N, T] of SAMPLES and the rollout in numbers, of the last of some rollouts with the same rewards."""
    named = {"clip": ClipScore("signboard:clip"), "ocr": OCR(detect=False)}
    module = RecastModule(Policy(num_steps=2), named, [Stage("s", 1, {"clip": 1.0, "ocr": 1.0})], advantages=advantages)
    for rollout in rollouts:
        r, metrics = module.collector.judge(rollout, rewards, SAMPLES, matrix, module.context)
    return r, metrics


def credit(weights, budgets=None):
    return CreditMatrix(
        torch.tensor(weights, dtype=torch.float64), budgets or {"clip": 1.0, "ocr": 1.0}, "recast",
        torch.ones(2, 2), torch.ones(2, 2),
    )  # fmt: skip


EVEN = credit([[0.25, 0.25], [0.25, 0.25]])


def test_a_level_listens_to_the_rewards_that_w_gives_it():
    rewards = torch.tensor([[0.0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [3, 0]])
    r, _ = judged(rewards, credit([[0.5, 0.0], [0.0, 0.5]]))
    assert r.shape == (6, 2)
    assert torch.equal(r[:3, 0], torch.full((3,), 0.5))  # level 1 hears clip alone, which says nothing of group 0
    assert r[3, 0] < 0.5 < r[5, 0]
    assert torch.equal(r[3:, 1], torch.full((3,), 0.5))
    assert r[0, 1] < 0.5 < r[2, 1]


def test_a_failed_score_leaves_its_sample_out_and_no_other():
    r, metrics = judged(torch.tensor([[0.0, 1], [0, 2], [0, NAN], [1, 0], [2, 0], [3, 0]]), EVEN)
    assert r[2].isnan().all()
    assert r[[0, 1, 3, 4, 5]].isfinite().all()
    torch.testing.assert_close(r[0] + r[1], torch.ones(2))  # the mean is over the two that are left
    assert metrics["reward/ocr/failed"] == 1
    assert metrics["reward/ocr/mean"] == pytest.approx(3 / 5)


def test_a_reward_without_a_budget_may_fail_without_harm():
    rewards = torch.tensor([[0.0, NAN]] * 3 + [[1, 1], [2, 1], [3, 1]])
    r, _ = judged(rewards, credit([[0.5, 0.5], [0.0, 0.0]], {"clip": 1.0, "ocr": 0.0}))
    assert r.isfinite().all()


def test_aggregation_reaches_r():
    rewards = torch.tensor([[0.1, 0.0], [0.0, 1.0], [0.0, 0.0]] * 2)
    loud, _ = judged(rewards, EVEN)
    fair, _ = judged(rewards, EVEN, advantages=Advantages(aggregation="per_reward"))
    assert loud[0, 0] < 0.5 < loud[1, 0]
    torch.testing.assert_close(fair[0], fair[1], atol=1e-3, rtol=0)  # each is best by one reward, whatever its range


def test_a_reward_that_tells_nothing_apart_is_named_once():
    rewards = torch.tensor([[0.0, 1], [0, 2], [0, 3], [0, 0], [0, 0], [0, NAN]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        judged(rewards, EVEN, rollouts=(2, 3))
    (said,) = [str(w.message) for w in caught if "same score" in str(w.message)]
    assert said.startswith("Reward 'clip' gave all images of rollout 3 the same score, 0:")


@pytest.fixture
def collecting(policy):
    """Makes a module that draws a rollout of 2 × 4 images in batches of 2, and remembers what it logged."""
    made = []

    def make(reward, **scoring):
        stages, sizes = [Stage("s", 1, {"light": 1.0}, "static")], RolloutOptions(2, 2)
        module = RecastModule(policy, {"light": reward}, stages, rollout=sizes, scoring=ScoringOptions(**scoring))
        data = PromptDataModule("signboard:train:4", "signboard:test:2", prompts_per_rollout=2, group_size=4)
        data.load(ocr=False)
        logged = []
        logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(dict(metrics)))
        module._trainer = SimpleNamespace(datamodule=data, global_step=0, loggers=[logger])
        made.append(module)
        return module, logged

    yield make
    for module in made:
        module.teardown("fit")


def test_a_rollout_scored_by_workers_is_the_rollout_scored_inline_bitwise(collecting):
    inline, logged = collecting(Brightness())
    expected = inline.collect(0)
    assert expected.optimality_probability.unique().numel() > 2
    for kind in (ThreadedBrightness, SpawnedBrightness):
        module, again = collecting(kind(delay=0.05), num_workers=1)
        buffer = module.collect(0)
        assert torch.equal(buffer.latents, expected.latents)
        assert torch.equal(buffer.optimality_probability, expected.optimality_probability)
        assert again[0]["reward/light/mean"] == logged[0]["reward/light/mean"]


def test_a_rollout_of_failures_is_logged_and_stops_the_run(collecting):
    module, logged = collecting(Brightness(least=2.0))
    with pytest.raises(UserError, match="Reward 'light' could not score 8 of the 8 images of rollout 1"):
        module.collect(0)
    assert logged[0]["reward/light/failed"] == 8
    module, logged = collecting(Brightness(least=2.0), failure_share=1.0)
    assert module.collect(0).optimality_probability.isnan().all()


def test_a_reward_that_breaks_in_a_rollout_leaves_no_worker(collecting):
    module, _ = collecting(Broken(how="key", workers="threads"), num_workers=1)
    with pytest.raises(RuntimeError, match="Reward 'light' broke with KeyError"):
        module.collect(0)
    assert module.scoring._workers is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScoringOptions(failure_share=1.5), r"scoring.failure_share must be in \[0, 1\], got 1.5"),
        (lambda: ScoringOptions(num_workers=-1), "scoring.num_workers must be at least 0, got -1"),
        (lambda: RolloutOptions(timestep_fraction=0.0), "rollout.timestep_fraction must be in"),
        (lambda: RolloutOptions(timestep_fraction=1.5), "rollout.timestep_fraction must be in"),
        (
            lambda: RecastModule(Policy(), {"ocr": OCR()}, [Stage("s", 1, {"ocr": 1.0})], seed=-1),
            "seed must be at least",
        ),
        (
            lambda: RecastModule(Policy(), {"o.r": OCR()}, [Stage("s", 1, {"o.r": 1.0})]),
            "Reward name 'o.r' must be made",
        ),
    ],
)
def test_options_outside_their_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sample_without_a_score_does_not_train(policy):
    loss = NFTLoss(kl_weight=0.5)
    module = RecastModule(policy, {"ocr": OCR(detect=False)}, [Stage("s", 1, {"ocr": 1.0})], loss)
    prompts = ['a sign with a blue star below the text "TO"', 'a sign with two red circles above the text "CAT"']
    latents, noise = torch.randn(2, *policy.latent_shape), torch.randn(2, *policy.latent_shape)
    both = TrainItem(latents, noise, torch.tensor([2, 2]), prompts, torch.tensor([0.7, NAN]))
    alone = TrainItem(latents[:1], noise[:1], torch.tensor([2]), prompts[:1], torch.tensor([0.7]))
    half, whole = module.training_step(both, 0), module.training_step(alone, 0)
    torch.testing.assert_close(2 * half, whole)  # the mean is over the micro-batch, whose other sample says nothing


def test_the_loss_of_a_micro_batch_is_the_mean_over_its_images_at_their_own_levels(policy):
    module = RecastModule(policy, {"ocr": OCR(detect=False)}, [Stage("s", 1, {"ocr": 1.0})], NFTLoss(kl_weight=0.5))
    prompts = ['a sign with a blue star below the text "TO"', 'a sign with two red circles above the text "CAT"']
    latents, noise = torch.randn(2, *policy.latent_shape), torch.randn(2, *policy.latent_shape)
    r = torch.tensor([0.7, 0.2])
    both = TrainItem(latents, noise, torch.tensor([1, 2]), prompts, r)
    single = [TrainItem(latents[i : i + 1], noise[i : i + 1], both.levels[i : i + 1], prompts[i : i + 1], r[i : i + 1])
              for i in range(2)]  # fmt: skip
    losses = [module.training_step(item, 0) for item in (both, *single)]
    torch.testing.assert_close(losses[0], (losses[1] + losses[2]) / 2)


def test_a_micro_batch_is_let_go_before_the_optimizer_steps(policy):
    """Thousands may be accumulated, and their latents and noise are on the GPU."""
    module = RecastModule(policy, {"ocr": OCR(detect=False)}, [Stage("s", 1, {"ocr": 1.0})])
    noise = torch.randn(1, *policy.latent_shape)
    item = TrainItem(noise.clone(), noise, torch.tensor([1]), ["a sign"], torch.tensor([0.7]))
    module.training_step(item, 0).backward()
    policy.zero_grad()
    kept = [weakref.ref(tensor) for tensor in (item.latents, item.noise)]
    del item, noise
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def drawn_levels(size, num_levels, share, rollout, batch):
    """Levels [turns, B] of one of the micro-batches of a rollout."""
    items = TrainItems(RolloutOptions(micro_batch_size=size, timestep_fraction=share), num_levels, seed=0)
    samples = [SampleId(i, i, 0) for i in range(size * (batch + 1))]
    buffer = RolloutBuffer(
        samples, torch.zeros(len(samples), 1), [""] * len(samples), torch.zeros(len(samples), num_levels)
    )
    turns = items.levels_per_image
    return torch.stack([items.item(buffer, rollout, batch * turns + turn).levels for turn in range(turns)])


@pytest.mark.parametrize(("size", "num_levels"), [(24, 10), (20, 10), (8, 25), (1, 5), (7, 3)])
@pytest.mark.parametrize("share", [1.0, 0.99, 0.4])
def test_images_train_at_levels_of_their_own_and_each_item_has_all_levels_about_equally(size, num_levels, share):
    for batch in range(3):
        levels = drawn_levels(size, num_levels, share, 0, batch)
        assert len(levels) == max(1, int(share * num_levels))  # rounded down, as published
        for image in levels.T:
            assert len(image.unique()) == len(image)
        for turn in levels:
            count = turn.bincount(minlength=num_levels + 1)[1:]
            assert count.max() - count.min() <= 1
        spread = levels.flatten().bincount(minlength=num_levels + 1)[1:]
        assert spread.max() - spread.min() <= 1 + (len(levels) - 1) * (size % num_levels > 0)


def test_every_image_has_every_level_with_the_same_probability():
    share = torch.zeros(8, 6)  # a mean over levels that are drawn so is the mean over all levels
    for rollout in range(1500):
        share.scatter_add_(1, drawn_levels(8, 6, 0.5, rollout, 0).T - 1, torch.full((8, 3), 1 / 1500))
    assert (share - 0.5).abs().max() < 5 * (0.25 / 1500) ** 0.5


def test_an_item_is_the_same_whenever_it_is_asked_for():
    items = TrainItems(RolloutOptions(micro_batch_size=3, timestep_fraction=0.5), num_levels=2, seed=0)
    assert items.count(6) == 2
    assert replace(items, options=RolloutOptions(micro_batch_size=3)).count(6) == 4
    buffer = RolloutBuffer(SAMPLES, torch.randn(6, 1, 2, 2), [str(s) for s in SAMPLES], torch.rand(6, 2))
    item, again, other = (items.item(buffer, rollout, 1) for rollout in (0, 0, 1))
    assert item.texts == buffer.texts[3:]
    rows = torch.arange(3)
    assert torch.equal(item.optimality_probability, buffer.optimality_probability[3:][rows, item.levels - 1])
    assert item.where(2) == f"Rollout 1, micro-batch 2, level {item.levels[2]}, prompt {buffer.texts[5]!r}"
    assert torch.equal(again.noise, item.noise)
    assert torch.equal(again.levels, item.levels)
    assert not torch.equal(other.noise, item.noise)


def test_a_module_can_be_copied_in_the_middle_of_a_run():
    """As callbacks do that average weights; handlers of signals, threads and worker processes stay behind."""
    rewards = {"b": ThreadedBrightness()}
    module = RecastModule(Policy(), rewards, [Stage("s", 1, {"b": 1.0})], scoring=ScoringOptions(num_workers=1))
    lock = threading.Lock()
    handler = signal.signal(
        signal.SIGTERM, partial(lambda lock, number, frame: None, lock)
    )  # as Lightning's hold a Trainer
    module.interruption.catch()
    image, names = torch.full((1, 3, 4, 4), 0.5), ["b"]
    try:
        module.scoring.score(image, [Prompt("a")], names)
        twin = copy.deepcopy(module)
        assert twin.scoring.models["b"] is twin.rewards["b"] is not rewards["b"]
        assert twin.scoring.score(image, [Prompt("a")], names).item() == 0.5
        twin.scoring.close()
        assert module.scoring.score(image, [Prompt("a")], names).item() == 0.5
    finally:
        module.scoring.close()
        module.interruption.release()
        signal.signal(signal.SIGTERM, handler)
