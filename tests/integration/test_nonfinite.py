"""Bad numbers stop or skip a step on all processes alike; evaluation, failures in it and autocast leave training alone."""

import csv
import math
import os
import subprocess
import sys
import textwrap
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.toy_rewards import Brightness
from integration.tiny import ROOT, adapters, config, fit, newest_run
from lightning.pytorch.plugins import MixedPrecision

from recast_lightning.credit import Stage
from recast_lightning.evaluation import EvaluationBatch
from recast_lightning.objective import NFTLoss
from recast_lightning.policy import Policy
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rollout import RunContext, TrainItem, sample_latents
from recast_lightning.training import RecastModule

CLIP = {"clip": {"class_path": "recast_lightning.rewards.ClipScore", "init_args": {"model": "signboard:clip"}}}
SMALL = {
    "keep_steps": True,
    "model__rewards": CLIP,
    "model__stages": [{"name": "only", "epochs": 2, "budgets": {"clip": 1}, "credit": "static"}],
    "trainer__num_sanity_val_steps": 0,
    "trainer__check_val_every_n_epoch": 1000,
}  # 2 rollouts of 2 optimizer steps of 3 micro-batches


def poison_loss(monkeypatch, call, value=torch.nan):
    """Make one sample's loss of one micro-batch, counted from 1, a NaN."""
    calls, real = [], NFTLoss.forward

    def poisoned(*args, **kwargs):
        calls.append(1)
        terms = real(*args, **kwargs)
        if len(calls) == call:
            terms.loss[2] = value
        return terms

    monkeypatch.setattr(NFTLoss, "forward", poisoned)


def poison_gradient(monkeypatch, call):
    """Make one number of one weight's gradient an inf in one backward pass."""
    calls, real = [], Policy.load

    def load(self, seed=0):
        real(self, seed)
        self.adapter_parameters("default")[3].register_hook(poisoned)

    def poisoned(gradient):
        calls.append(1)
        gradient = gradient.clone()
        gradient[0, 0] += torch.inf if len(calls) == call else 0
        return gradient

    monkeypatch.setattr(Policy, "load", load)


def poison_sample(monkeypatch, call):
    """Put a NaN into the second image of one sampled batch."""
    calls, real = [], Policy.sample

    def poisoned(*args):
        calls.append(1)
        latents = real(*args)
        if len(calls) == call:
            latents[1, 0, 0, 0] = torch.nan
        return latents

    monkeypatch.setattr(Policy, "sample", poisoned)


def column(run, name):
    """A metric's values in the log."""
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def states(run, step):
    """Adapters and AdamW's state after a step."""
    checkpoint = torch.load(run / f"checkpoints/step={step}.ckpt", weights_only=True)
    return checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]


@pytest.mark.parametrize(
    ("poison", "expected"),
    [
        (poison_loss, ["Rollout 1, micro-batch 2, level ", "prompt '", "NaN or inf in the loss: this optimizer step"]),
        (poison_gradient, ["NaN or inf in the gradient of transformer.", "lora_B.default.weight: this optimizer step"]),
    ],
)
def test_a_bad_number_stops_the_run_before_the_optimizer(tmp_path, monkeypatch, capsys, poison, expected):
    poison(monkeypatch, 5)
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, **SMALL)
    assert stop.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("recast: error: ")]
    assert len(error) == 1
    assert all(part in error[0] for part in expected)
    assert [file.name for file in (newest_run(tmp_path) / "checkpoints").glob("step=*")] == ["step=1.ckpt"]


def test_a_bad_sample_stops_the_run_with_its_prompt(tmp_path, monkeypatch, capsys):
    poison_sample(monkeypatch, 2)
    with pytest.raises(SystemExit):
        fit(tmp_path, **SMALL)
    error = capsys.readouterr().err
    assert "recast: error: Rollout 2, prompt '" in error
    assert "NaN or inf in the latents of a sample: the image cannot be trained on" in error


def test_skip_leaves_out_the_step_and_the_image_and_goes_on(tmp_path, monkeypatch):
    poison_loss(monkeypatch, 5, torch.inf)
    poison_sample(monkeypatch, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(tmp_path, model__on_nonfinite="skip", **SMALL)
    said = [str(w.message) for w in caught if "said once" in str(w.message)]
    assert [sentence.split(": ")[1].split(" is ")[0] for sentence in said if "Rollout" in sentence] == [
        "NaN or inf in the loss", "NaN or inf in the latents of a sample",
    ]  # fmt: skip
    assert column(run, "train/skipped_steps") == [0, 1, 0, 0]
    assert column(run, "rollout/nonfinite_images") == [0, 1]
    assert column(run, "reward/clip/failed") == [0, 1]
    (before, state), (after, same), (later, _) = (states(run, step) for step in (1, 2, 3))
    assert all(torch.equal(before[k], after[k]) for k in before if ".old." not in k)
    assert all(torch.equal(state[i][k], same[i][k]) for i in state for k in state[i])
    for name in (".default.", ".ema."):
        assert any(not torch.equal(after[k], later[k]) for k in after if name in k)
    assert all(value.isfinite().all() for value in later.values())


SCRIPT = """
    import os, sys, torch
    from recast_lightning.cli import main
    from recast_lightning.objective import NFTLoss

    real, calls = NFTLoss.forward, []

    def poisoned(*args, **kwargs):
        calls.append(1)
        terms = real(*args, **kwargs)
        if len(calls) == 5 and os.environ.get("LOCAL_RANK") == "1":
            terms.loss[0] = torch.nan
        return terms

    NFTLoss.forward = poisoned
    main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_what_one_process_sees_all_do(tmp_path, action):
    file = config(tmp_path, model__rollout__micro_batch_size=2, trainer__devices=2, trainer__strategy="ddp",
                  model__on_nonfinite=action, **SMALL)  # fmt: skip
    (tmp_path / "poisoned.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(tmp_path / "poisoned.py"), "fit", "--config", str(file)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    run = newest_run(tmp_path)
    if action == "stop":
        assert done.returncode == 2, done.stderr[-2000:]
        assert "recast: error: Rollout 1, micro-batch 2" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (run / "checkpoints/step=2.ckpt").exists()
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert column(run, "train/skipped_steps") == [0, 1, 0, 0]
        (before, _), (after, _), (later, _) = (states(run, step) for step in (1, 2, 3))
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert all(value.isfinite().all() for value in later.values())


def test_evaluation_leaves_training_alone_bitwise(tmp_path):
    without = fit(tmp_path / "without", **SMALL)
    often = SMALL | {"trainer__num_sanity_val_steps": -1, "trainer__check_val_every_n_epoch": 1}
    evaluated = fit(tmp_path / "with", **often)
    assert len((evaluated / "evaluation.jsonl").read_text().splitlines()) == 3
    assert not (without / "evaluation.jsonl").exists()
    ours, theirs = (adapters(run / "checkpoints/last.ckpt") for run in (without, evaluated))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


@contextmanager
def trainable(policy, precision=nullcontext):
    """A module on the shared policy, whose adapters are put back afterwards."""
    before = {k: v.clone() for k, v in policy.state_dict().items() if ".lora_" in k}
    stages = [Stage("s", 1, {"light": 1.0})]
    module = RecastModule(policy, {"light": Brightness()}, stages, NFTLoss(kl_weight=0.1))
    module.context = RunContext(autocast=precision)
    try:
        yield module
    finally:
        policy.load_state_dict(before, strict=False)
        policy.zero_grad()


TEXTS = ['a sign with a blue star below the text "TO"', 'a sign with two red circles above the text "CAT"']
BATCH = EvaluationBatch([Prompt(t) for t in TEXTS], index=[0, 1], occurrence=[0, 0], real=[True, True])


def step(module, optimizer):
    """One training step; the trained weights after it."""
    torch.manual_seed(3)
    shape = (2, *module.policy.latent_shape)
    item = TrainItem(torch.randn(shape), torch.randn(shape), torch.tensor([2, 2]), TEXTS, torch.tensor([0.9, 0.2]))
    optimizer.zero_grad()
    loss = module.training_step(item, 0)
    loss.backward()
    optimizer.step()
    return [p.detach().clone() for p in module.policy.adapter_parameters("default")]


@pytest.mark.parametrize("where", ["sampling", "decoding", "scoring"])
def test_a_failure_in_an_evaluation_gives_the_adapters_back(policy, monkeypatch, where):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    results = []
    for failing in (False, True):
        with trainable(policy) as module:
            optimizer = torch.optim.AdamW(policy.adapter_parameters("default"), lr=1e-2)
            step(module, optimizer)
            policy.blend("ema", "default", keep=0.5)
            state = [(layer._active_adapter, layer._disable_adapters) for layer in policy.adapters.layers]
            if failing:
                places = {
                    "sampling": (policy.transformer, "forward"),
                    "decoding": (policy._helpers["vae"], "decode"),
                    "scoring": (Brightness, "score"),
                }
                with monkeypatch.context() as patched:
                    patched.setattr(*places[where], fail)
                    with pytest.raises(RuntimeError, match="out of memory"):
                        module.evaluator.evaluate(BATCH, module.context)
            assert [(x._active_adapter, x._disable_adapters) for x in policy.adapters.layers] == state
            assert all(p.requires_grad for p in policy.adapter_parameters("default"))
            results.append(step(module, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


FORGETFUL = MixedPrecision("bf16-mixed", "cpu").forward_context


def caching():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=True)


@pytest.mark.parametrize(("precision", "fresh"), [(FORGETFUL, True), (caching, False)])
def test_sampling_and_training_see_new_weights_inside_a_hand_made_autocast(policy, precision, fresh):
    """The second case is the harm that the first avoids: there, the cache of the outer context serves old weights."""
    with trainable(policy, precision) as module, torch.autocast("cpu", torch.bfloat16):
        weights, keys = policy.adapter_parameters("default"), [("a", 0), ("a", 1)]

        def draw():
            return sample_latents(policy, keys, TEXTS, "default", module.context)

        def loss():
            with precision():
                return step(module, torch.optim.SGD(weights, lr=0.0)) and torch.cat([w.grad.flatten() for w in weights])

        drawn, gradient = draw(), loss()
        with torch.no_grad():
            for weight in weights:
                weight += 0.1
        assert (not torch.equal(draw(), drawn)) == fresh
        assert (not torch.equal(loss(), gradient)) == fresh


class Dot(Brightness):
    """A reward that autocast would round."""

    score_range = (-math.inf, math.inf)

    def score(self, images, prompts):
        return images.flatten(1) @ torch.linspace(-1, 1, images[0].numel())


def test_scores_do_not_depend_on_autocast_around_them(policy):
    """Lightning evaluates inside autocast and rollouts are scored outside; a profile encodes prompts outside."""
    with trainable(policy, FORGETFUL) as module:
        module.rewards["light"] = Dot()
        latents = torch.randn(2, *policy.latent_shape)
        results = []
        for context in (nullcontext, FORGETFUL):
            policy._helpers["encoder"].cache.clear()
            with context():
                images = policy.decode(latents)
                results.append(
                    [images, module.scoring.score(images, BATCH.prompts, ["light"]), policy.encode_prompts(TEXTS)]
                )
    (images, scores, condition), (again, same, encoded) = results
    assert images.equal(again)
    assert scores.equal(same)
    assert all(tensor.equal(encoded.tensors[name]) for name, tensor in condition.tensors.items())
