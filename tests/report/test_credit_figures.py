from dataclasses import replace

import numpy as np
import pytest
import torch

from recast_lightning.credit import CreditMatrix
from recast_lightning.report import demand, gain_curves, normalized_gains, save_figure, weight_heatmap


def _texts(axes):
    return [text.get_text() for text in axes.texts]


def _line(axes, label):
    return next(line for line in axes.get_lines() if line.get_label().startswith(label))


def _band(axes, place=0):
    """Low and high edge of a band over levels."""
    (path,) = axes.collections[place].get_paths()
    points = path.vertices
    return [np.array([f(points[points[:, 0] == x, 1]) for x in np.unique(points[:, 0])]) for f in (np.min, np.max)]


def test_gain_curves_show_raw_and_monotone_gains_in_a_band(make_profile):
    profile = make_profile(["ocr", "geneval"])
    figure = gain_curves(profile)
    assert [axes.get_title() for axes in figure.axes] == ["ocr", "geneval"]
    axes = figure.axes[0]
    raw, line = _line(axes, "as measured"), _line(axes, "made monotone")
    assert raw.get_xdata().tolist() == list(range(1, 11))
    np.testing.assert_allclose(raw.get_ydata(), profile.gains[0])
    np.testing.assert_allclose(line.get_ydata(), profile.monotone_gains[0])
    low, high = _band(axes)
    np.testing.assert_allclose(high - low, 2 * profile.gains_stderr[0])
    np.testing.assert_allclose(high + low, 2 * profile.monotone_gains[0], atol=1e-12)
    assert (raw.get_ydata() < 0).any()
    assert "interpolated" not in line.get_label()


def test_gain_curves_mark_measured_levels_only(make_profile):
    profile = make_profile(["ocr"], measured=[1, 4, 10])
    axes = gain_curves(profile).axes[0]
    assert _line(axes, "as measured").get_xdata().tolist() == [1, 4, 10]
    line = _line(axes, "made monotone")
    assert line.get_markevery() == [0, 3, 9]
    assert len(line.get_xdata()) == 10
    assert "no marker: interpolated" in line.get_label()


def test_gain_curves_say_what_is_flat(make_profile):
    profile = make_profile(["ocr", "flat"])
    assert profile.flat == ["flat"]
    assert [axes.get_title() for axes in gain_curves(profile).axes] == ["ocr", "flat (flat)"]


def test_gain_curves_without_error_bars(make_profile, tmp_path):
    profile = make_profile(["ocr"], replicates=torch.zeros(0, 1, 11), num_prompts=1)
    assert profile.gains_stderr.isinf().all()
    assert save_figure(gain_curves(profile), tmp_path / "gains.png").stat().st_size > 5000


def test_normalized_gains_name_flat_rows_and_have_bands(make_profile):
    matrix = CreditMatrix.from_profile(make_profile(["ocr", "flat"]), {"ocr": 1.0, "flat": 1.0})
    axes = normalized_gains(matrix).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ocr", "flat (flat)"]
    np.testing.assert_allclose(_line(axes, "ocr").get_ydata(), matrix.normalized[0])
    low, high = _band(axes)
    np.testing.assert_allclose(high - low, 2 * matrix.normalized_stderr[0])


def test_normalized_gains_without_error_bars(make_profile, tmp_path):
    matrix = CreditMatrix.from_gains(make_profile(["ocr"]).gains, {"ocr": 1.0})
    assert save_figure(normalized_gains(matrix), tmp_path / "shape.png").stat().st_size > 5000


@pytest.mark.parametrize("levels", [10, 25])
def test_weight_heatmap_annotates_weights_and_margins(make_profile, levels):
    budgets = {"ocr": 3.0, "geneval": 1.0, "hpsv2": 0.0}
    matrix = CreditMatrix.from_profile(make_profile(list(budgets), levels), budgets)
    axes = weight_heatmap(matrix).axes[0]
    texts = [text for text in _texts(axes) if not text.startswith("±")]
    weights = [float(text) for text in texts[: 3 * levels]]
    np.testing.assert_allclose(weights, matrix.level_weights.flatten(), atol=0.0051)
    assert texts[3 * levels : 3 * levels + 3] == ["0.750", "0.250", "0.000"]
    assert texts[3 * levels + 3 :] == ["1.00"] * levels


def test_weight_heatmap_has_errors_where_there_is_room(make_profile):
    budgets = {"ocr": 3.0, "geneval": 1.0, "hpsv2": 0.0}
    matrix = CreditMatrix.from_profile(make_profile(list(budgets)), budgets)
    errors = [text for text in _texts(weight_heatmap(matrix).axes[0]) if text.startswith("±")]
    expected = 10 * matrix.weights_stderr[:2].flatten()  # a reward without budget has none
    np.testing.assert_allclose([float(text[1:]) for text in errors], expected, atol=0.0051)
    many = CreditMatrix.from_profile(make_profile(list(budgets), 25), budgets)
    for without in (many, replace(matrix, weights_stderr=None)):
        assert not any(text.startswith("±") for text in _texts(weight_heatmap(without).axes[0]))


def test_weight_heatmap_is_neutral_when_static(make_profile):
    matrix = CreditMatrix.from_gains(torch.ones(2, 5), {"ocr": 3.0, "geneval": 1.0}, "static")
    axes = weight_heatmap(matrix).axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), 0, atol=1e-12)
    assert {text.get_weight() for text in axes.texts[:10]} == {"normal"}


def test_weight_heatmap_is_bold_above_static(make_profile):
    matrix = CreditMatrix.from_profile(make_profile(["ocr", "geneval"]), {"ocr": 1.0, "geneval": 1.0})
    texts = weight_heatmap(matrix).axes[0].texts[:20]
    above = (matrix.level_weights / 0.5).log2().flatten() > 0.1
    assert above.any()
    assert [text.get_weight() == "bold" for text in texts] == above.tolist()


def _stacks(axes):
    bars = [container.patches for container in axes.containers]
    return np.array([[bar.get_height() for bar in row] for row in bars]), bars


def test_demand_stacks_shares_of_normalized_gains(make_profile):
    profile = make_profile(["ocr", "geneval", "clip"])
    matrix = CreditMatrix.from_profile(profile, {"geneval": 3.0, "ocr": 1.0, "clip": 0.0})
    axes = demand(profile, matrix).axes[0]
    heights, bars = _stacks(axes)
    expected = torch.tensor([[0.75], [0.25]]) * matrix.normalized[:2]
    np.testing.assert_allclose(heights, expected)
    np.testing.assert_allclose([bar.get_y() for bar in bars[1]], expected[0])
    total = expected.sum(0)[1:]
    assert axes.get_title() == f"Aggregate demand: largest / smallest {total.max() / total.min():.2f} over t = 2 … 10"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["flat (static)", "ocr", "geneval"]
    assert bars[0][1].get_hatch() != bars[1][1].get_hatch()
    colours = [bar.get_facecolor() for bar in bars[0]]
    assert colours[0] != colours[1]
    assert len(set(colours[1:])) == 1
    assert len(set(colours[0][:3])) == 1  # grey


def test_demand_of_a_profile_alone_has_equal_budgets(make_profile):
    profile = make_profile(["ocr", "geneval", "flat"])
    heights, _ = _stacks(demand(profile).axes[0])
    gains = profile.monotone_gains
    np.testing.assert_allclose(heights, gains / gains.mean(1, keepdim=True) / 3)
    assert heights.sum(0).mean() == pytest.approx(1)


def test_demand_without_a_finite_ratio_says_none(make_profile):
    divergence = torch.tensor([[1.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
    profile = make_profile(["ocr"], 3, divergence=divergence, replicates=divergence.repeat(3, 1, 1))
    assert demand(profile).axes[0].get_title() == "Aggregate demand"


def test_demand_needs_the_rewards_of_the_credit(make_profile):
    credit = CreditMatrix.from_gains(torch.ones(1, 10), {"clip": 1.0})
    with pytest.raises(ValueError, match="clip"):
        demand(make_profile(["ocr"]), credit)
