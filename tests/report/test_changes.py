import math

import pytest
from rich.console import Console

from recast_lightning.report import changes, summary_table
from recast_lightning.report.changes import number


def _evaluation(rollout, metrics, stderr):
    return {"rollout": rollout, "metrics": metrics, "stderr": stderr}


PAIR = [
    _evaluation(0, {"ocr": 0.41, "geneval": 0.60, "same": 1.0, "nan": math.nan}, {"ocr": 0.03, "geneval": 0.03}),
    _evaluation(4, {"ocr": 0.62, "geneval": 0.55, "same": 1.0, "nan": 0.5}, {"ocr": 0.04, "geneval": 0.04}),
]


def test_changes_are_differences_with_independent_errors():
    ocr, geneval, same, nan = changes(PAIR)
    assert ocr.delta == pytest.approx(0.21)
    assert ocr.stderr == pytest.approx(0.05)
    assert [c.verb for c in (ocr, geneval, same, nan)] == ["rose", "fell", "did not change", "cannot be compared"]
    assert [c.clear for c in (ocr, geneval, same, nan)] == [True, False, False, False]


def test_kept_scores_are_compared_prompt_by_prompt():
    """Differences 0.1, 0.3 (the prompt without a score drops out): s.d. 0.1414, over the root of two."""
    before = _evaluation(0, {"ocr": 0.5}, {"ocr": 9.0}) | {"scores": {"ocr": [0.1, 0.9, None]}}
    after = _evaluation(4, {"ocr": 0.7}, {"ocr": 9.0}) | {"scores": {"ocr": [0.2, 1.2, 0.4]}}
    assert changes([before, after])[0].stderr == pytest.approx(0.1)


def test_evaluations_under_other_settings_are_not_compared():
    first, last = PAIR
    between = _evaluation(2, {"ocr": 0.5}, {"ocr": 0.03}) | {"settings": {"rewards.ocr.detect": True}}
    assert changes([first | {"settings": {}}, last | {"settings": between["settings"]}]) == []
    (change, *_) = changes([first | {"settings": {}}, between, last | {"settings": between["settings"]}])
    assert change.base == 0.5
    assert changes([first, last | {"settings": {}}])[0].base == 0.41  # a record of before settings were kept


@pytest.mark.parametrize("evaluations", [[], PAIR[:1]])
def test_one_evaluation_is_no_change(evaluations):
    assert changes(evaluations) == []


@pytest.mark.parametrize(
    ("value", "text"), [(0.62, "0.620"), (0.0012, "0.0012"), (-0.05, "−0.050"), (0.0, "0.000"), (math.nan, "–")]
)
def test_number(value, text):
    assert number(value) == text


def test_summary_table_on_the_console():
    console = Console(width=80, record=True)
    console.print(summary_table(PAIR))
    console.print(summary_table(PAIR[:1]))
    console.print(summary_table([]))
    text = console.export_text()
    assert "+0.210 ± 0.050" in text
    assert "−0.050 ± 0.050" in text
    assert text.count("0.410") == 2
