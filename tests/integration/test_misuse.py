"""Bad input: one sentence, exit code 2, before any model is loaded."""

import math
from functools import reduce

import pytest
import torch
import wandb
import yaml
from helpers.profiles import make_profile
from integration.tiny import config
from lightning.pytorch.loggers import WandbLogger

from recast_lightning.checkpointing.compatibility import check_checkpoint
from recast_lightning.checkpointing.renamed import RENAMED
from recast_lightning.cli import main
from recast_lightning.cli.trainer_checks import check_wandb
from recast_lightning.policy import Policy
from recast_lightning.policy.families import SD3

CALLBACK = "trainer__callbacks__0__init_args__"
POLICY = "model__policy__init_args__"
REWARDS = "recast_lightning.rewards"
CASES = {
    # names
    "misspelt key": ({"model__betta": 0.1}, "model has no option 'betta': did you mean objective.beta?"),
    "misspelt group": ({"model__objectiv": {"beta": 1}}, "model has no option 'objectiv': did you mean objective?"),
    "misspelt key of a group": ({"model__rollout__batchsize": 4}, "has no option 'batchsize': did you mean batch_size?"),
    "misspelt key of the objective": ({"model__objective__betta": 4}, "NFTLoss has no option 'betta': did you mean beta?"),
    "a word for a number": ({"model__optimizer__learning_rate": "low"}, "learning_rate: expected a number, got 'low'"),
    "a word for the objective's": ({"model__objective__beta": "low"}, "beta: expected a number, got 'low'"),
    "a number for a group": ({"model__rollout": 4}, "model.rollout: expected"),
    "misspelt data key": ({"data__groupsize": 4}, "data has no option 'groupsize': did you mean group_size?"),
    "misspelt trainer key": ({"trainer__max_epoch": 1}, "trainer has no option 'max_epoch': did you mean max_epochs?"),
    "misspelt section": ({"modle": {"beta": 1}}, "There is no option 'modle': did you mean model?"),
    "misspelt policy option": ({POLICY + "lora_rang": 4}, "Policy has no option 'lora_rang': did you mean lora_rank?"),
    "misspelt profiler option": ({CALLBACK + "num_prompt": 4}, "has no option 'num_prompt': did you mean num_prompts?"),
    "misspelt stage key": ({"model__stages__0__rollout": 1}, "Stage has no option 'rollout'. Known are name, epochs"),
    "missing stage key": ({"model__stages": [{"name": "a", "budgets": {"clip": 1}}]}, "Stage needs epochs"),
    "unknown reward class": (
        {"model__rewards__clip": {"class_path": f"{REWARDS}.ClopScore"}},
        "'ClopScore' in recast_lightning.rewards: did you mean ClipScore?",
    ),
    "unknown short class": ({"model__rewards__clip": {"class_path": "ClipScor"}}, "'ClipScor': did you mean ClipScore?"),
    "unknown module": ({"model__rewards__clip": {"class_path": "recast.ClipScore"}}, "No module named 'recast'"),
    "reward without a class": ({"model__rewards__clip": {"model": "x"}}, "model.rewards: there is no class_path"),
    "proposals as a reward": (
        {"model__rewards__clip": {"class_path": "recast_lightning.proposals.RendererProposals"}}, "subclass of RewardModel",
    ),
    "misspelt reward option": (
        {"model__rewards__clip__init_args__modell": "x"}, "ClipScore has no option 'modell': did you mean model?",
    ),
    "misspelt callback": ({"trainer__callbacks": [{"class_path": "RunRepot"}]}, "'RunRepot': did you mean RunReport?"),
    "misspelt logger": ({"trainer__logger": {"class_path": "CSVLoger"}}, "'CSVLoger': did you mean CSVLogger?"),
    "misspelt strategy": ({"trainer__strategy": "ddpp"}, "trainer.strategy is 'ddpp', which is unknown: did you mean ddp?"),
    "misspelt accelerator": ({"trainer__accelerator": "gpuu"}, "is 'gpuu', which is unknown: did you mean gpu?"),
    "misspelt precision": ({"trainer__precision": "bf17"}, "bf16-mixed"),
    "two 16-bit types": (
        {"trainer__precision": "bf16-mixed", POLICY + "dtype": "float16"},
        "'bf16-mixed' does not go with policy.dtype 'float16': take precision 16-mixed or 16-true, or dtype float32 or",
    ),
    "float16 without a scaler": ({POLICY + "dtype": "float16"}, "'32-true' does not go with policy.dtype 'float16'"),
    "unknown credit": ({"model__stages__0__credit": "magic"}, "expected one of recast, static, unprojected, got 'magic'"),
    "unknown solver": ({POLICY + "solver": "ddim"}, "expected one of dpm2, euler, got 'ddim'"),
    "unknown dtype": ({POLICY + "dtype": "fp16"}, "expected one of float32, bfloat16, float16, got 'fp16'"),
    "aggregation": ({"model__advantages__aggregation": "mean"}, "expected one of sum, per_reward, got 'mean'"),
    "a device that is none": ({"model__scoring__device": "gpu0"}, "scoring.device is 'gpu0': expected cpu, cuda"),
    # rewards, budgets, stages
    "budget for an absent reward": (
        {"model__stages__0__budgets": {"aesthetic": 1}}, "'aesthetic', but there is no such reward; configured are clip,",
    ),
    "negative budget": ({"model__stages__0__budgets": {"clip": -1}}, "budget of 'clip' must be a number ≥ 0, got -1.0"),
    "budget NaN": ({"model__stages__0__budgets": {"clip": math.nan}}, "must be a number ≥ 0, got nan"),
    "budget infinite": ({"model__stages__0__budgets": {"clip": math.inf}}, "must be a number ≥ 0, got inf"),
    "budgets all zero": ({"model__stages__0__budgets": {"clip": 0}}, "Stage 'warmup': at least one budget must be above 0"),
    "budget that is a word": ({"model__stages__0__budgets": {"clip": "much"}}, "Stage.budgets: expected a number, got 'much'"),
    "budgets in a list": ({"model__stages__0__budgets": ["clip"]}, "Stage.budgets: expected a mapping, got ['clip']"),
    "two stages of one name": ({"model__stages__1__name": "warmup"}, "Stage 'warmup' comes twice"),
    "a stage's name as a path": ({"model__stages__0__name": "../up"}, "Stage '../up'"),
    "a stage's name beyond file names": ({"model__stages__0__name": "ü" * 101}, "a stage's name has at most 200 bytes"),
    "a stage without epochs": ({"model__stages__0__epochs": 0}, "epochs must be at least 1, got 0"),
    "no stages": ({"model__stages": []}, "stages is empty"),
    "no rewards": ({"model__rewards": {}}, "configured are none"),
    "reward name": ({"model__rewards": {"a b": {"class_path": f"{REWARDS}.ClipScore"}}}, "Reward name 'a b'"),
    # numbers
    "beta 0": ({"model__objective__beta": 0}, "beta must be above 0, got 0.0"),
    "beta NaN": ({"model__objective__beta": math.nan}, "beta must be above 0, got nan"),
    "kl_weight": ({"model__objective__kl_weight": -1}, "kl_weight must be at least 0, got -1.0"),
    "ema_decay": ({"model__ema_decay": 1.5}, "ema_decay must be in [0, 1), got 1.5"),
    "advantage_clip": ({"model__objective__advantage_clip": 0}, "advantage_clip must be above 0, got 0.0"),
    "learning_rate": ({"model__optimizer__learning_rate": -1e-4}, "learning_rate must be above 0, got -0.0001"),
    "old_maximum": ({"model__old_policy__maximum": 2}, "old_policy.maximum must be in [0, 1), got 2.0"),
    "seed": ({"model__seed": -1}, "seed must be at least 0, got -1"),
    "failure share": ({"model__scoring__failure_share": 2}, "failure_share must be in [0, 1], got 2"),
    "negative workers": ({"model__scoring__num_workers": -1}, "num_workers must be at least 0, got -1"),
    "no micro-batch": ({"model__rollout__micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
    "micro-batch that does not divide": ({"model__rollout__micro_batch_size": 3}, "take 2 or 4"),
    "no rollout batch": ({"model__rollout__batch_size": 0}, "rollout.batch_size must be at least 1, got 0"),
    "group of one": ({"data__group_size": 1}, "group_size must be at least 2, got 1"),
    "too many prompts": ({"data__prompts_per_rollout": 40}, "prompts_per_rollout is 40, but 'signboard:train:12' has only 12"),
    # trainer
    "too many epochs": ({"trainer__max_epochs": 9}, "only 3 rollouts"),
    "no epochs": ({"trainer__max_epochs": 0}, "trainer.max_epochs must be 1 to 3, the rollouts of the stages, got 0"),
    "no steps": ({"trainer__max_steps": 0}, "trainer.max_steps must be at least 1, or -1 for no limit, got 0"),
    "no accumulation": ({"trainer__accumulate_grad_batches": 0}, "accumulate_grad_batches must be at least 1, got 0"),
    "accumulation that does not divide": ({"trainer__accumulate_grad_batches": 4}, "does not divide the 6 training steps"),
    "evaluation never": ({"trainer__check_val_every_n_epoch": 0}, "check_val_every_n_epoch must be at least 1, got 0"),
    "a share of batches": ({"trainer__limit_val_batches": 2.5}, "invalid value 2.5 for limit_val_batches"),
    "devices": ({"trainer__devices": "two"}, "trainer.devices is 'two': on the CPU it is a number"),
    "too many devices": ({"trainer__accelerator": "gpu", "trainer__devices": 64}, "trainer."),
    "W&B first": (
        {"trainer__logger": [{"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"offline": True}}]},
        "begins with WandbLogger",
    ),
    "checkpoint cadence": (
        {"trainer__callbacks__4__init_args": {"every_n_epochs": 0}}, "every_n_epochs must be at least 1, got 0",
    ),
    "double precision": ({"trainer__precision": "64-true"}, "trainer.precision is '64-true': policies train in 32-true,"),
    "a run folder in a file": (
        {"trainer__logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": __file__}}},
        "test_misuse.py' is a file",
    ),
    # policy
    "missing policy path": ({POLICY + "path": "./nowhere"}, "'./nowhere' does not exist"),
    "unknown embedded policy": ({POLICY + "path": "signboard:bas"}, "known are signboard:base"),
    "picture size": ({POLICY + "height": 60}, "height is 60, but 'signboard:base' draws pictures whose sides are"),
    "picture too large": ({POLICY + "width": 128}, "width is 128"),
    "one level": ({POLICY + "num_steps": 1}, "num_steps must be at least 2, got 1"),
    "lora_alpha": ({POLICY + "lora_alpha": 0}, "lora_alpha must be above 0, got 0"),
    "lora_targets": ({POLICY + "lora_targets": ["attn.to_x"]}, "'attn.to_x', which is the end of no module's name"),
    "no lora_targets": ({POLICY + "lora_targets": []}, "lora_targets is empty"),
    # files
    "missing reward path": ({"model__rewards__clip__init_args__model": "./nowhere"}, "./nowhere"),
    "missing prompt file": ({"data__train": "nowhere.txt"}, "nowhere.txt does not exist"),
    "prompts in a table": ({"data__train": "prompts.csv"}, "must be a .txt file"),
    "malformed source": ({"data__train": "signboard:train"}, "SPLIT:COUNT"),
    "unknown split": ({"data__train": "signboard:trian:10"}, "'trian' is unknown: choose one of train"),
    "a template that is not there": (
        {"model__rewards__clip": {"class_path": f"{REWARDS}.HPSv3", "init_args": {"template": "./nowhere"}}}, "./nowhere",
    ),
    "missing proposals": (
        {CALLBACK + "proposals": {
            "class_path": "recast_lightning.proposals.FolderProposals", "init_args": {"path": "nowhere"}}},
        "metadata.jsonl",
    ),
    # profile
    "no profiler": ({"trainer__callbacks": []}, "add RenyiProfilerCallback"),
    "missing profile": ({CALLBACK + "profile": "nowhere"}, "nowhere"),
    "no proposals": ({CALLBACK + "proposals": None}, "has neither proposals to measure a profile with nor a saved profile"),
    "levels of a profile": ({CALLBACK + "levels": 6}, "levels must be 2 to 3"),
    "levels without T": ({CALLBACK + "levels": [1, 2]}, "levels must lie in 1 ... 3 and hold 3, got [1, 2]"),
    "nested order, one completion": ({CALLBACK + "order": 1.0}, "Order 1 needs at least 2 completions"),
    "order 0": ({CALLBACK + "order": 0}, "order must be positive, got 0.0"),
    "temperature": ({CALLBACK + "temperature": 0}, "temperature must be above 0, got 0.0"),
    "steps in words": ({CALLBACK + "steps": "many"}, "expected a whole number or one of auto, grid, got 'many'"),
    "prompts of a profile": ({CALLBACK + "num_prompts": 100}, "num_prompts is 100, but there are only 12"),
    "a signed reward to be measured": (
        {"model__rewards__clip": {"class_path": f"{REWARDS}.HTTPReward", "init_args": {"url": "http://localhost:1"}}},
        "http can score below 0 (down to -inf)",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the configuration was checked")

    monkeypatch.setattr(Policy, "load", load)


def refused(arguments, capsys) -> str:
    """The sentence with which `recast` leaves."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("recast: error: ")
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_one_sentence(case, tmp_path, capsys):
    changes, expected = CASES[case]
    assert expected in refused(["fit", "--config", str(config(tmp_path, **changes))], capsys)


FILES = {
    "syntax": (b"model:\n  beta: [1\n", "config.yaml, line 3: not valid YAML"),
    "list": (b"- model\n", "must hold keys and values"),
    "empty": (b"", "must hold keys and values"),
    "bytes": (b"model: \xff\n", "not UTF-8"),
    "reward twice": (
        b"model:\n  rewards:\n    clip: {class_path: A}\n    clip: {class_path: B}\n",
        "line 4: the key 'clip' is already there in line 3",
    ),
    "budget twice": (b"model: {stages: [{budgets: {a: 1, a: 2}}]}\n", "line 1: the key 'a' is already there in line 1"),
}


@pytest.mark.parametrize("option", ["-c", "--config="])
@pytest.mark.parametrize("case", FILES)
def test_a_malformed_file_is_one_sentence(case, option, tmp_path, capsys):
    content, expected = FILES[case]
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    arguments = [option + str(file)] if option.endswith("=") else [option, str(file)]
    assert expected in refused(["fit", *arguments], capsys)


PROMPTS = {
    "empty": ("a.txt", b"\n\n", "holds no prompts"),
    "not UTF-8": ("a.txt", b"caf\xe9\n", "not UTF-8 (byte 3)"),
    "bad JSON": ("a.jsonl", b'{"prompt": "a dog", "ocr": "A"}\n{prompt\n', "line 2: not valid JSON"),
    "no prompt": ("a.jsonl", b'{"text": "a dog"}\n', "line 1: expected a JSON object with the text of the prompt"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_malformed_prompt_file_is_one_sentence(case, tmp_path, capsys):
    name, content, expected = PROMPTS[case]
    (tmp_path / name).write_bytes(content)
    assert expected in refused(["fit", "-c", str(config(tmp_path, data__train=str(tmp_path / name)))], capsys)


@pytest.mark.parametrize(("command", "credit"), [("fit", "static"), ("validate", "recast")])
def test_what_will_not_be_used_is_not_checked(tmp_path, command, credit):
    stages = [{"name": "only", "epochs": 1, "budgets": {"clip": 1}, "credit": credit}]
    unfit = {CALLBACK + "proposals": None, CALLBACK + "num_prompts": 100, CALLBACK + "levels": 50}
    with pytest.raises(AssertionError, match="before the configuration was checked"):
        main([command, "-c", str(config(tmp_path, model__stages=stages, **unfit))])


def test_a_profile_of_another_number_of_levels_is_refused(tmp_path, capsys):
    make_profile(("clip", "hpsv2"), 8).save(tmp_path / "profile")
    file = config(tmp_path, **{CALLBACK + "profile": str(tmp_path / "profile")})
    assert "has 8 levels, but policy.num_steps is 3" in refused(["fit", "-c", str(file)], capsys)


def checkpoint(rank=4, width=96, targets=SD3.lora_targets, levels=3) -> dict:
    """What a run leaves, as far as it is looked at before a model is loaded."""
    names = [f"policy.transformer.transformer_blocks.0.{target}" for target in targets]
    weights = {f"{name}.lora_A.default.weight": torch.zeros(rank, width) for name in names}
    return {"state_dict": weights, "recast": {"credit": {"weights": torch.zeros(2, levels)}}}


CHECKPOINTS = {
    "rank": (checkpoint(rank=8), "has adapters of rank 8, but lora_rank is 4"),
    "levels": (checkpoint(levels=10), "was trained at 10 levels, but num_steps is 3"),
    "targets": (checkpoint(targets=SD3.lora_targets[:2]), "has no adapters on 'attn.to_v'"),
    "more targets": (checkpoint(targets=(*SD3.lora_targets, "ff.net.2")), "which lora_targets does not name"),
    "base": (checkpoint(width=1536), "is of another base than 'signboard:base'"),
    "another project": ({"state_dict": {}}, "is no checkpoint of this project"),
    "weights alone": (torch.zeros(3), "is no checkpoint of this project"),
    "code": (pytest.raises, "cannot be read as a checkpoint"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_of_something_else_is_refused(case, tmp_path, capsys):
    content, expected = CHECKPOINTS[case]
    torch.save(content, tmp_path / "last.ckpt")
    error = refused(["fit", "-c", str(config(tmp_path)), "--ckpt_path", str(tmp_path / "last.ckpt")], capsys)
    assert expected in error


def test_a_tilde_is_the_users_folder_in_every_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "~/runs", "name": "a"}}
    config(tmp_path, data__train="~/a.csv", trainer__logger=[logger])
    with pytest.raises(SystemExit):
        main(["fit", "--config=~/config.yaml", "--ckpt_path", "last"])
    said = capsys.readouterr()
    assert f"No run in {tmp_path}/runs/a has a checkpoint yet" in said.out
    assert f"The prompt file {tmp_path}/a.csv must be" in said.err
    assert f"ckpt_path '{tmp_path}/no.ckpt'" in refused(["fit", "-c", "~/config.yaml", "--ckpt_path=~/no.ckpt"], capsys)
    assert f"no recast profile at {tmp_path}/p" in refused(["weights", "~/p"], capsys)


@pytest.mark.parametrize("content", [b"hello\n", b"model:\n", b"K\x01.", b"\x80\x04K\x01.", b"\x89PNG\r\n"])
def test_a_file_of_another_kind_is_no_checkpoint(tmp_path, content):
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(ValueError, match="notes.txt cannot be read as a checkpoint"):
        check_checkpoint(str(tmp_path / "notes.txt"), Policy(), training=True)


def test_wandb_without_a_key_is_refused_unless_it_is_offline(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # it has kept the settings of the environment before
    with pytest.raises(ValueError, match="W&B has no key: run `wandb login`, or set WANDB_API_KEY or offline: true"):
        check_wandb(WandbLogger(save_dir=tmp_path))
    check_wandb(WandbLogger(save_dir=tmp_path, offline=True))
    check_wandb(WandbLogger(save_dir=tmp_path, mode="disabled"))


def test_the_check_of_wandb_leaves_an_offline_run_offline(tmp_path, monkeypatch):
    """Once wandb has set itself up, it takes no notice of the mode that an offline logger asks for as it starts."""

    def settled(*arguments, **keywords):
        raise AssertionError("wandb has settled its mode")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.setup", settled)
    monkeypatch.setattr("wandb.login", settled)
    check_wandb(WandbLogger(save_dir=tmp_path, offline=True))
    with pytest.raises(AssertionError, match="settled"):
        check_wandb(WandbLogger(save_dir=tmp_path))
    wandb.teardown()


def test_a_truncated_checkpoint_is_refused(tmp_path, capsys):
    torch.save(checkpoint(), tmp_path / "whole.ckpt")
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:1000])
    error = refused(["fit", "-c", str(config(tmp_path)), "--ckpt_path", str(tmp_path / "last.ckpt")], capsys)
    assert "last.ckpt cannot be read as a checkpoint: it is cut off" in error


def test_a_fitting_checkpoint_is_let_through(tmp_path):
    torch.save(checkpoint(), tmp_path / "last.ckpt")
    with pytest.raises(AssertionError, match="before the configuration was checked"):
        main(["fit", "-c", str(config(tmp_path)), "--ckpt_path", str(tmp_path / "last.ckpt")])


@pytest.mark.parametrize("arguments", [["fti"], [], ["-c", "x.yaml", "fit"]])
def test_an_unknown_command_is_told_the_known_ones(arguments, capsys):
    assert "expected one of fit, validate, test, predict, profile, doctor, weights" in refused(arguments, capsys)


def test_prompts_without_a_target_are_refused_when_ocr_is_used(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text('a sign that says "TAN"\na dog\n')
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config(tmp_path, data__train=str(tmp_path / "prompts.txt")))])
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_answered_with_the_new_one_before_torch_is_imported(tmp_path, capsys, old, new):
    nested = reduce(
        lambda inner, key: {key: [inner] if key in ("stages", "callbacks") else inner}, old.split(".")[::-1], 1
    )
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(nested))
    assert f"old.yaml, line {len(old.split('.'))}: {old} is now {new}." in refused(
        ["fit", "-c", str(tmp_path / "old.yaml")], capsys
    )
    assert f"--{old} is now --{new}." in refused(["fit", f"--{old}=1"], capsys)
    assert f"--{old} is now --{new}." in refused(["fit", f"--{old}", "1"], capsys)


def test_a_missing_configuration_file_is_named(capsys):
    assert "nowhere.yaml does not exist" in refused(["fit", "--config", "nowhere.yaml"], capsys)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["fit", "--help"], ["report", "--help"], ["signboard", "pretrain", "--help"]]
)
def test_help_is_there(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--model.betta", "did you mean objective.beta?"),
        ("--model.objective.betta", "did you mean beta?"),
        ("--model.optimizer.rate", "no option 'rate'. Known are learning_rate, weight_decay, warmup_steps"),
        ("--trainer.stragety", "did you mean strategy?"),
        ("--foo", "no option 'foo'"),
    ],
)
def test_a_misspelt_option_of_the_command_line_is_named(tmp_path, capsys, argument, expected):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config(tmp_path)), argument, "3"])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
