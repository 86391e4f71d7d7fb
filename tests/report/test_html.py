import json
import re
import shutil

import pytest
import torch

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.credit.artefact import load_artefact, save_artefact
from recast_lightning.report import write_report


def _report(run):
    return write_report(run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(intact):
    """The report of an intact run."""
    return _report(intact)


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures of curves, which take most of the time."""
    for module in ("html", "stage"):
        monkeypatch.setattr(f"recast_lightning.report.{module}.inline", lambda figure, alt: f"[{alt}]")


def _visible(page):
    """The text without markup and pictures."""
    page = re.sub(r"<style>.*?</style>|src=\"[^\"]*\"", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def _rows(page, column):
    """Rows of the first table that has a column: first cell to the cells by their heading."""
    for table in re.findall(r"<table>(.*?)</table>", page, flags=re.DOTALL):
        heading, *rows = (re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table))
        if column in heading:
            return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    raise AssertionError(f"no table has a column {column!r}")


def test_summary_says_gains_and_losses(page):
    text = _visible(page)
    for part in ("4 rollouts in 2 stages (warmup, second)", "48 held-out prompts", "after 4 rollouts"):
        assert part in text
    assert "ocr rose, 0.410 → 0.620 (+0.210)" in text
    assert "geneval fell, 0.600 → 0.550 (−0.050)" in text
    assert "hpsv2 did not change" in text
    assert re.search(r"1 rose \(1 by .*?\) and 1 fell \(0 by ", text)


def test_table_has_changes_with_errors_and_weights(page):
    ocr = _rows(page, "change")["ocr"]
    assert (ocr["base"], ocr["final"], ocr["change"]) == ("0.410", "0.620", "+0.210 ± 0.042")
    assert (ocr["weight in warmup"], ocr["weight in second"]) == ("0.500", "0.250")
    assert "Prompts without a score in final: ocr 2." in page


def test_stage_is_told_in_words(page):
    text = _visible(page)
    assert "Stage 1: warmup" in text
    assert re.search(r"ocr gains most at level [34] of 10 \(t = [34], σ = 0\.[34]0\), 2\.\d times its mean", text)
    assert "flat has a flat row" in text
    assert "geneval has a flat row" not in text
    for fact in ("16 prompts, 64 proposals", "all 10 levels", "3520 network calls", "posterior sde2, Rényi order 2"):
        assert fact in text
    assert "Cannot be told from flat: flat (weighted as static" in text
    for name, good, own, failed in (("ocr", "0.800", "0.333", "3"), ("geneval", "0.820", "0.341", "0")):
        row = _rows(page, "failed scores")[name]
        assert (row["of the proposals"], row["of the policy"], row["failed scores"]) == (good, own, failed)
    assert "effective" not in text
    assert re.search(r"Largest error of a budget: \d\.\de-\d\d; .* [1-9]\d* iterations", text)
    assert "Static credit" in text


def test_unprojected_stage_shows_its_residual(run, undrawn):
    folder = run / "stages" / "1-warmup"
    credit = CreditMatrix.load(folder / "credit")
    unprojected = CreditMatrix.from_gains(credit.gains, credit.budgets, "unprojected")
    unprojected.save(folder / "credit")
    assert f"of a level&#x27;s total (1/T): {unprojected.residuals[1]:.1e}" in _report(run)


def test_pictures_are_first_and_last_in_pairs(page):
    grid = page[page.index('<div class="grid">') : page.index("<h2>Details")]
    assert grid.count("data:image/png;base64,") == 6
    assert grid.count("base policy") == grid.count("after 4 rollouts") == 3
    assert "after 2 rollouts" not in grid
    assert grid.count('class="small"') == 6


def test_everything_is_escaped(page):
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot; &amp; a red circle" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page


def test_file_is_self_contained(page):
    assert not re.search(r"https?:|<link|url\(|@import", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)', page))
    assert page.count("<details>") == 2
    assert "Not in this report" not in page


def test_diagnostics_show_first_and_last_rollout(page):
    assert list(_rows(page, "rollout 1")["reward/ocr/mean"].values())[1:] == ["0.1", "0.4"]


def test_stage_has_its_pictures(run, undrawn):
    page = _report(run)
    stage = page[page.index("Stage 1") : page.index("Stage 2")]
    weights = "Weights by reward and noise level"
    assert sorted(re.findall(r"\[([A-Z].*?)\]", stage)) == sorted(
        ["Discriminability gains", "Normalised gains", "Aggregate demand", weights, weights, "D before and after"]
    )
    assert re.findall(r"\[([A-Z].*?)\]", page[page.index("Stage 2") :]) == [weights]


def test_what_the_stage_left_to_learn(page, intact):
    ends = [Profile.load(intact / "stages" / "1-warmup" / name).totals for name in ("profile", "after")]
    cells = [f"{float(total[0]):.3f} ± {float(error[0]):.3f}" for total, error in ends]
    ocr = _rows(page, "D₀ − D_T (nats)")["ocr"]
    assert [ocr["before"], ocr["after"]] == cells
    assert float(ends[1][0][0]) < 0.2 * float(ends[0][0][0])


def test_profiles_that_were_not_taken_are_said_so(run, undrawn):
    folder = run / "stages" / "1-warmup"
    (folder / "after.safetensors").unlink()
    shutil.copy(folder / "profile.safetensors", run / "stages" / "2-second" / "after.safetensors")
    page = _report(run)
    first, second = (
        _rows(part, "D₀ − D_T (nats)")["ocr"] for part in (page[: page.index("Stage 2")], page[page.index("Stage 2") :])
    )
    assert first["before"].startswith("0.876 ± 0.")
    assert second["after"] == first["before"]
    assert first["after"] == second["before"] == "not measured"
    assert "[D before and after]" not in page
    assert "Not in this report" not in page


def test_refreshes_are_told_with_their_weights(run, undrawn):
    shutil.copytree(run / "stages" / "1-warmup" / "rollout-1", run / "stages" / "1-warmup" / "rollout-11")
    (run / "stages" / "1-warmup" / "rollout-11" / "credit.safetensors").unlink()
    shutil.copytree(run / "stages" / "1-warmup" / "rollout-1", run / "stages" / "1-warmup" / "rollout-2")
    text = _visible(_report(run))
    places = [text.index(f"Measured again before rollout {n}") for n in (2, 3, 12)]
    assert places == sorted(places)
    assert re.search(r"D₀ − D_T in nats: ocr 0\.438 ± 0\.\d+; geneval", text[places[0] :])
    assert "[Weights by reward and noise level]" in text[places[1] : places[2]]
    assert "Its weights are missing." in text[places[2] :]
    assert text.count("Numbers are T·W") == 2  # once a stage
    assert "Not in this report" not in text


def test_damaged_extras_are_named(run, undrawn):
    folder = run / "stages" / "1-warmup"
    (folder / "after.safetensors").write_bytes(b"half")
    (folder / "rollout-1" / "credit.safetensors").write_bytes(b"half")
    shutil.copytree(folder / "rollout-1", folder / "rollout-old")  # no number: not ours
    text = _visible(_report(run))
    for name in ("after", "rollout-1/credit"):
        assert f"stages/1-warmup/{name}.safetensors could not be read" in text
    assert "Measured again before rollout 2" in text
    assert text.count("Measured again") == 1


def test_files_of_another_version_are_named(run, undrawn):
    path = run / "stages" / "1-warmup" / "profile"
    tensors, header = load_artefact(path, "recast profile")
    save_artefact(path, "recast profile", tensors, {k: v for k, v in header.items() if k != "format"})
    assert "is of another version of recast_lightning" in _visible(_report(run))
    path = run / "stages" / "1-warmup" / "credit"
    tensors, header = load_artefact(path, "recast credit matrix")
    save_artefact(path, "recast credit matrix", tensors, header | {"surprise": 1})
    assert "stages/1-warmup/credit.safetensors could not be read" in _visible(_report(run))


def test_measurement_of_some_levels_with_own_proposals(run, undrawn, make_profile):
    settings = {"steps": 20, "rollouts": [1, 2, 4], "mean_rewards": torch.full((1, 11), 0.5, dtype=torch.float64)}
    profile = make_profile(["ocr"], measured=[1, 4, 10], importance=True, **settings)
    folder = run / "stages" / "1-warmup"
    profile.save(folder / "profile")
    CreditMatrix.from_profile(profile, {"ocr": 1.0}).save(folder / "credit")
    page = _report(run)
    text = _visible(page)
    assert re.search(r"1, 2, 4 \w+ each from levels 1, 4, 10 of 10", text)
    assert "20 steps" in text
    ocr = _rows(page, "failed scores")["ocr"]
    assert ocr["of the proposals, weighted"] == ocr["of the policy"] == "0.500"
    assert ocr["effective samples a prompt (of 4)"] == "2.500"
    assert "no better than the policy&#x27;s own pictures for ocr." in text
    assert "The gains of every reward can be told from flat." in text


def test_flat_rewards_that_are_not_shrunk(run, undrawn, make_profile):
    folder = run / "stages" / "1-warmup"
    profile = make_profile(["ocr", "flat"])
    profile.divergence[1, 4] -= 0.003  # within its noise
    profile.save(folder / "profile")
    CreditMatrix.from_profile(profile, {"ocr": 1.0, "flat": 1.0}, shrinkage="none").save(folder / "credit")
    text = _visible(_report(run))
    assert "Cannot be told from flat: flat. Taken as measured all the same: flat." in text


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("evaluation.jsonl", "No evaluation was recorded"),
        ("rollouts.jsonl", "There is no rollouts.jsonl."),
        ("config.yaml", "There is no config.yaml."),
        ("images", "There is no images/prompts.json."),
        ("images/rollout-0004/001.png", "no picture"),
        ("stages", "Stage warmup left no measurement (a static stage needs none)."),
        ("stages/1-warmup/profile.safetensors", "There is no stages/1-warmup/profile.safetensors."),
        ("stages/1-warmup/credit.safetensors", "There is no stages/1-warmup/credit.safetensors."),
        ("stages/2-second/credit.safetensors", "Neither profile nor weights of this stage"),
    ],
)
def test_missing_parts_are_named(run, undrawn, missing, says):
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert says in _visible(_report(run))


def test_empty_folder(tmp_path):
    text = _visible(_report(tmp_path))
    assert "0 rollouts in 0 stages. No evaluation was recorded" in text


def test_base_evaluation_alone(run, undrawn, evaluations):
    (run / "evaluation.jsonl").write_text(json.dumps(evaluations[0]))
    shutil.rmtree(run / "images" / "rollout-0002")
    shutil.rmtree(run / "images" / "rollout-0004")
    text = _visible(_report(run))
    assert "the only evaluation (base policy) gave ocr 0.410, geneval 0.600, hpsv2 2.500." in text
    assert "there is no after" in text


def test_damage_is_named_and_survived(run, undrawn, evaluations):
    with (run / "evaluation.jsonl").open("a") as file:
        file.write(json.dumps(evaluations[-1] | {"metrics": {"ocr": 0.7}}) + '\n{"rollout": 6, "met')
    (run / "stages" / "1-warmup" / "profile.safetensors").write_bytes(b"half")
    (run / "images" / "rollout-0000" / "000.png").write_bytes(b"\x89PNG half")
    text = _visible(_report(run))
    assert "0.410 → 0.700 (+0.290)" in text  # a rollout that was done twice counts as done last
    assert "hpsv2 cannot be compared" in text
    assert "evaluation.jsonl has 1 unreadable line(s)" in text
    assert "1-warmup/profile.safetensors could not be read" in text


def test_stages_are_in_order_of_training(run, undrawn):
    shutil.rmtree(run / "stages" / "1-warmup")
    assert "in 2 stages (warmup, second)" in _visible(_report(run))


def test_run_without_base_evaluation(run, undrawn, evaluations):
    (run / "evaluation.jsonl").write_text("\n".join(map(json.dumps, evaluations[1:])))
    page = _report(run)
    assert "from after 2 rollouts to after 4 rollouts" in page
    assert "<th>first</th><th>final</th>" in page


def test_no_folder_is_one_clear_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no run folder at .*nowhere"):
        write_report(tmp_path / "nowhere")
