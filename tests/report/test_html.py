import json
import re
import shutil

import pytest

from recast_lightning.credit import CreditMatrix
from recast_lightning.report import write_report


def _report(run):
    return write_report(run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(make_run, tmp_path_factory):
    """The report of an intact run."""
    return _report(make_run(tmp_path_factory.mktemp("intact") / "my-run"))


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures of curves, which take most of the time."""
    monkeypatch.setattr("recast_lightning.report.html._inline", lambda figure, alt: f"[{alt}]")


def _visible(page):
    """The text without markup and pictures."""
    page = re.sub(r"<style>.*?</style>|src=\"[^\"]*\"", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_summary_says_gains_and_losses(page):
    text = _visible(page)
    assert (
        "4 rollouts in 2 stages (warmup, second). On 48 held-out prompts, from base policy to after 4 rollouts:" in text
    )
    assert "ocr rose, 0.410 → 0.620 (+0.210)" in text
    assert "geneval fell, 0.600 → 0.550 (−0.050)" in text
    assert "hpsv2 did not change, 2.500 → 2.500" in text
    assert "Of 3 rewards, 1 rose (1 by more than two standard errors) and 1 fell (0 by more than" in text


def test_table_has_changes_with_errors_and_weights(page):
    assert "<th>weight in warmup</th><th>weight in second</th>" in page
    assert "<td>+0.210 ± 0.042</td><td>0.500</td><td>0.250</td>" in page
    assert "each compared with itself" in page
    assert "Prompts without a score in final: ocr 2." in page


def test_stage_is_told_in_words(page):
    text = _visible(page)
    assert "Stage 1: warmup" in text
    assert re.search(r"ocr gains most at level [34] of 10 \(t = [34], σ = 0\.[34]0\), 2\.\d times its mean", text)
    assert "flat is flattened: its gain is indistinguishable from flat" in text
    assert "geneval is flattened" not in text
    assert "64 proposals with 1 rollout each and level, 3520 network calls; Rényi order 2, posterior sde2" in text
    assert "left out for a failed score: ocr 3." in text
    assert re.search(r"Largest error of a budget: \d\.\de-\d\d", text)
    assert "from pure noise (t = 10): the policy's own" in text.replace("&#x27;", "'")
    assert "Static credit: every reward counts the same" in text


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
    assert "<tr><td>reward/ocr/mean</td><td>0.1</td><td>0.4</td></tr>" in page


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("evaluation.jsonl", "No evaluation was recorded"),
        ("rollouts.jsonl", "There is no my-run/rollouts.jsonl."),
        ("config.yaml", "There is no my-run/config.yaml."),
        ("images", "There is no images/prompts.json."),
        ("images/rollout-0004/001.png", "no picture"),
        ("stages", "Stage warmup left no measurement (a static stage needs none)."),
        ("stages/1-warmup/profile.safetensors", "There is no 1-warmup/profile.safetensors."),
        ("stages/1-warmup/credit.safetensors", "There is no 1-warmup/credit.safetensors."),
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
