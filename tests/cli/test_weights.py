"""`recast weights`, from the command line and as functions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.profiles import assert_same, make_profile

from recast_lightning.cli import main
from recast_lightning.cli.weights import compare, parse_budgets, weights, weights_table
from recast_lightning.credit import CreditMatrix, compare_profiles

ROOT = Path(__file__).parents[2]
FILES = {"credit.safetensors", "credit.json", "weights.png", "normalized_gains.png", "gain_curves.png"}


def save(path, *args, **kwargs):
    profile = make_profile(*args, **kwargs)
    profile.save(path)
    return profile


def run(capsys, *arguments):
    """The lines that `recast weights` prints."""
    main(["weights", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take the most time; these tests do not look at them."""
    monkeypatch.setattr("recast_lightning.cli.weights.draw_pictures", lambda built: None)


def refusal(capsys, *arguments):
    """The one sentence with which it leaves."""
    with pytest.raises(SystemExit) as left:
        main(["weights", *map(str, arguments)])
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("recast: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("recast: error: ").strip()


def row(lines, label):
    """The cells of a table's row."""
    (line,) = [line for line in lines if line.strip("│ ").split(" ")[0] == label]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_any_budgets_of_a_saved_profile(tmp_path, capsys):
    profile = save(tmp_path / "profile")
    lines = run(capsys, tmp_path / "profile", "--budgets", "geneval=2", "ocr=1", "--output", tmp_path / "out")
    assert lines[-1] == str(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert_same(
        CreditMatrix.load(tmp_path / "out" / "credit"), CreditMatrix.from_profile(profile, {"geneval": 2.0, "ocr": 1.0})
    )
    assert row(lines, "share")[1:] == ["0.667", "0.333", "1"]
    for name in FILES:
        if name.endswith(".png"):
            assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_defaults_are_every_reward_and_a_folder_beside_the_profile(tmp_path, capsys, undrawn):
    profile = save(tmp_path / "run-1.5")
    lines = run(capsys, tmp_path / "run-1.5.safetensors")
    assert lines[-1] == str(tmp_path / "run-1.5-weights")
    expected = CreditMatrix.from_profile(profile, dict.fromkeys(profile.rewards, 1.0))
    assert_same(CreditMatrix.load(tmp_path / "run-1.5-weights" / "credit"), expected)


@pytest.mark.parametrize(
    "options",
    [{"method": "static"}, {"method": "unprojected", "temperature": 0.5}, {"shrinkage": "none", "temperature": 2.0}],
)
def test_every_option_reaches_the_matrix(tmp_path, capsys, options, undrawn):
    profile = save(tmp_path / "profile", noise=0.05)
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    run(capsys, tmp_path / "profile.json", *given)
    expected = CreditMatrix.from_profile(profile, dict.fromkeys(profile.rewards, 1.0), **options)
    assert_same(CreditMatrix.load(tmp_path / "profile-weights" / "credit"), expected)
    assert not expected.weights.equal(CreditMatrix.from_profile(profile, expected.budgets).weights)


def test_the_table_has_weights_errors_and_margins(tmp_path, capsys, undrawn):
    save(tmp_path / "profile", ["ocr", "clip"], 10, noise=0.03)
    lines = run(capsys, tmp_path / "profile", "--budgets", "ocr=3", "clip=1", "--method", "unprojected")
    matrix = CreditMatrix.load(tmp_path / "profile-weights" / "credit")
    assert lines[0] == "T W, the weight of each reward at each noise level (unprojected, temperature 1)"
    assert row(lines, "share")[1:] == ["0.750", "0.250", "1"]
    for t in (1, 10):
        level, errors = matrix.level_weights[:, t - 1].tolist(), (10 * matrix.weights_stderr[:, t - 1]).tolist()
        cells = [f"{weight:.2f} ± {error:.2f}" for weight, error in zip(level, errors, strict=True)]
        assert row(lines, str(t)) == [str(t), *cells, f"{sum(level):.2f}"]
    column = 10 * matrix.residuals[1]
    assert column > 0.01
    assert f"of the sum of a level {column:.0e}." in lines[-2]


def test_lines_fit_a_terminal_and_errors_give_way(tmp_path, capsys, undrawn):
    five = ["ocr", "a" * 30, "clip", "[bold]x", "geneval"]
    save(tmp_path / "five", five, 25)
    lines = run(capsys, tmp_path / "five", "--output", tmp_path / "out")
    assert max(map(len, lines[:-1])) <= 100
    heading = [line for line in lines if line.startswith("┃")]
    assert any("[bold]x" in line for line in heading)
    assert "±" in row(lines, "25")[1]
    save(tmp_path / "eight", [*five, "s", "t", "u"], 25)
    lines = run(capsys, tmp_path / "eight", "--output", tmp_path / "out")
    assert max(map(len, lines[:-1])) <= 100
    assert len(row(lines, "25")) == 10
    assert not any("±" in line for line in lines)


def test_static_has_no_error_to_show(tmp_path, undrawn):
    save(tmp_path / "profile")
    table = weights_table(weights(tmp_path / "profile", method="static").matrix)
    assert list(table.columns[1].cells) == ["0.333"] * 8


@pytest.mark.parametrize(
    ("rewards", "options", "sentence"),
    [
        (["ocr", "straight", "even", "clip"], [], "Cannot be told from flat: straight, even."),
        (["ocr", "straight", "clip"], ["--budgets", "ocr=1", "clip=1"], "Every reward can be told from flat."),
    ],
)
def test_it_says_which_rewards_are_flat(tmp_path, capsys, rewards, options, sentence, undrawn):
    save(tmp_path / "profile", rewards)
    assert sentence in run(capsys, tmp_path / "profile", *options)


def test_it_says_when_errors_are_unknown(tmp_path, capsys, undrawn):
    save(tmp_path / "profile", num_replicates=0)
    lines = run(capsys, tmp_path / "profile")
    assert "The profile is of one prompt, so its errors are unknown: no reward can be told from flat." in lines
    assert row(lines, "3") == ["3", "0.333", "0.333", "0.333", "1.000"]


def test_comparing_two_profiles(tmp_path, capsys):
    a = save(tmp_path / "a", ["ocr", "clip", "straight"])
    b = save(tmp_path / "b", ["straight", "ocr"], seed=1, noise=0.08)
    lines = run(capsys, "--compare", tmp_path / "a", tmp_path / "b.json")
    agreement = compare_profiles(a, b)
    for name in ("ocr", "straight"):
        one = agreement[name]
        correlation = f"{one.correlation:.3f}" if name == "ocr" else "none"
        flat = {"ocr": "neither", "straight": "both"}[name]
        totals = [f"{total:.3f}" for total in one.totals]
        assert row(lines, name) == [name, correlation, *totals, flat, f"{one.moved:.1%}"]
    assert not any("clip" in line for line in lines)
    assert lines[-2:] == [f"A: {tmp_path / 'a'}", f"B: {tmp_path / 'b.json'}"]
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.{s}" for n in "ab" for s in ("json", "safetensors")}


def test_a_comparison_as_a_file(tmp_path, capsys):
    a, b = save(tmp_path / "a", ["ocr", "straight"]), save(tmp_path / "b", ["ocr", "straight"], seed=1)
    lines = run(capsys, "--compare", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "deep" / "out")
    assert lines[-1] == str(tmp_path / "deep" / "out" / "compare.json")
    content = json.loads(Path(lines[-1]).read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["a"] == str(tmp_path / "a")
    expected = compare_profiles(a, b)
    for name, found in content["rewards"].items():
        assert found["moved"] == expected[name].moved
        assert tuple(found["totals"]) == expected[name].totals
        assert tuple(found["flat"]) == expected[name].flat
    assert content["rewards"]["ocr"]["correlation"] == expected["ocr"].correlation
    assert content["rewards"]["straight"]["correlation"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give either a PROFILE or --compare with two of them"),
        (["P", "--compare", "P", "P"], "Give either a PROFILE or --compare with two of them"),
        (["--budgets", "ocr=1", "P"], "A budget is written NAME=NUMBER, as in ocr=2, got "),
        (["P", "--budgets", "ocr"], "A budget is written NAME=NUMBER, as in ocr=2, got 'ocr'."),
        (["P", "--budgets", "=2"], "A budget is written NAME=NUMBER, as in ocr=2, got '=2'."),
        (["P", "--budgets", "ocr=two"], "The budget of 'ocr' must be a number, got 'two'."),
        (["P", "--budgets", "ocr="], "The budget of 'ocr' must be a number, got ''."),
        (["P", "--budgets", "ocr=-1"], "The budget of 'ocr' must be non-negative and finite, got -1.0."),
        (["P", "--budgets", "ocr=nan"], "The budget of 'ocr' must be non-negative and finite, got nan."),
        (["P", "--budgets", "ocr=0", "clip=0"], "At least one budget must be positive, got 0 for each of ocr, clip."),
        (["P", "--budgets", "ocr=1", "ocr=1"], "The reward 'ocr' has two budgets: give it one."),
        (["P", "--budgets", "hps=1"], "The profile has no reward 'hps'; it measured ocr, clip, geneval."),
        (["P", "--budgets"], "argument --budgets: expected at least one argument"),
        (["P", "--method", "best"], "argument --method: invalid choice: 'best'"),
        (["P", "--temperature", "0"], "temperature must be positive and finite, got 0.0."),
        (["P", "--temperature", "hot"], "temperature: expected a number, got 'hot'."),
        (["P", "--out", "x"], "There is no option 'out': did you mean output?"),
        (["P", "P"], "unrecognized arguments: "),
        (["P", "--output", "P.json"], "P.json: File exists."),
        (["missing"], "There is no recast profile at missing.safetensors."),
        (["damaged"], "damaged.safetensors is damaged or not a safetensors file"),
        (["matrix"], "matrix.safetensors holds recast credit matrix, not a recast profile."),
        (["old"], "The profile 'old' is of another version of recast_lightning: measure it anew."),
        (["--compare", "P"], "argument --compare: expected 2 arguments"),
        (["--compare", "P", "missing"], "There is no recast profile at missing.safetensors."),
        (["--compare", "P", "P", "--method", "static"], "--method does not go with --compare"),
        (["--compare", "P", "P", "--budgets", "ocr=1"], "--budgets does not go with --compare"),
        (["--compare", "P", "short"], "The profiles are of different noise levels, 8 from "),
        (["--compare", "P", "other"], "The profiles share no reward: ocr, clip, geneval and hps."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    save("P")
    save("short", num_levels=4)
    save("other", ["hps"])
    Path("damaged.safetensors").write_bytes(Path("P.safetensors").read_bytes()[:500])
    CreditMatrix.from_gains(torch.rand(1, 3), {"ocr": 1.0}).save("matrix")
    with monkeypatch.context() as past:
        past.setattr("recast_lightning.credit.profile._FORMAT", 1)
        save("old")
    assert refusal(capsys, *arguments).startswith(sentence)
    assert not Path("P-weights").exists()


def test_the_functions_serve_without_a_command_line(tmp_path, capsys):
    profile = save(tmp_path / "a")
    save(tmp_path / "b", seed=1)
    built = weights(tmp_path / "a", {"clip": 1.0, "ocr": 1.0}, temperature=0.5)
    assert built.folder == tmp_path / "a-weights"
    assert {path.name for path in built.folder.iterdir()} == FILES
    assert_same(built.profile, profile)
    assert_same(built.matrix, CreditMatrix.load(built.folder / "credit"))
    assert compare(tmp_path / "a", tmp_path / "b").keys() == {"ocr", "clip", "geneval"}
    assert parse_budgets(["a=b=2", "c=.5"]) == {"a=b": 2.0, "c": 0.5}
    with pytest.raises(ValueError, match="method must be 'recast', 'static' or 'unprojected', got 'best'"):
        weights(tmp_path / "a", method="best")
    with pytest.raises(FileNotFoundError, match="There is no recast profile at"):
        compare(tmp_path / "a", tmp_path / "c")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "matplotlib"}),
        (["profile", "--budgets", "ocr"], {"torch", "matplotlib"}),
        (["profile"], {"lightning", "transformers", "diffusers", "peft", "wandb"}),
    ],
)
def test_nothing_is_imported_that_is_not_needed(tmp_path, arguments, absent):
    save(tmp_path / "profile")
    code = (
        "import sys; from recast_lightning.cli import main\n"
        f"try: main(['weights', *{arguments!r}])\n"
        f"finally: print('loaded:', *sorted({absent!r} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr
    assert (tmp_path / "profile-weights" / "weights.png").exists() == (arguments == ["profile"])


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as left:
        main(["weights", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "PROFILE",
        "--budgets",
        "--method",
        "--temperature",
        "--shrinkage",
        "--output",
        "--compare",
        "Example:",
    ):
        assert word in text
