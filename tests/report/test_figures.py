import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from recast_lightning.credit import CreditMatrix
from recast_lightning.report import gain_curves, normalized_gains, reward_trajectories, save_figure, weight_heatmap
from recast_lightning.report.figures import reward_styles


def _texts(axes):
    return [text.get_text() for text in axes.texts]


def test_gain_curves_show_raw_and_monotone_gains_with_errors(make_profile):
    profile = make_profile(["ocr", "geneval"])
    figure = gain_curves(profile)
    assert [axes.get_title() for axes in figure.axes] == ["ocr", "geneval"]
    raw = figure.axes[0].get_lines()[1]
    assert raw.get_xdata().tolist() == list(range(1, 11))
    np.testing.assert_allclose(raw.get_ydata(), profile.gains[0])
    bars = figure.axes[0].containers[0]
    np.testing.assert_allclose(bars.lines[0].get_ydata(), profile.monotone_gains[0])
    low, high = bars.lines[2][0].get_segments()[2][:, 1]
    assert high - low == pytest.approx(0.04)
    assert (raw.get_ydata() < 0).any()


def test_gain_curves_without_error_bars(make_profile, tmp_path):
    profile = make_profile(["ocr"])
    profile.gains_stderr.fill_(torch.inf)
    assert save_figure(gain_curves(profile), tmp_path / "gains.png").stat().st_size > 5000


def test_normalized_gains_name_flat_rows(make_profile):
    matrix = CreditMatrix.from_profile(make_profile(["ocr", "flat"]), {"ocr": 1.0, "flat": 1.0})
    axes = normalized_gains(matrix).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ocr", "flat (flat)"]
    np.testing.assert_allclose(axes.get_lines()[1].get_ydata(), matrix.normalized[0])


@pytest.mark.parametrize("levels", [10, 25])
def test_weight_heatmap_annotates_weights_and_margins(make_profile, levels):
    budgets = {"ocr": 3.0, "geneval": 1.0, "hpsv2": 0.0}
    matrix = CreditMatrix.from_profile(make_profile(list(budgets), levels), budgets)
    axes = weight_heatmap(matrix).axes[0]
    texts = _texts(axes)
    weights = [float(text) for text in texts[: 3 * levels]]
    np.testing.assert_allclose(weights, matrix.level_weights.flatten(), atol=0.0051)
    assert texts[3 * levels : 3 * levels + 3] == ["0.750", "0.250", "0.000"]
    assert texts[3 * levels + 3 :] == ["1.00"] * levels


def test_weight_heatmap_colour_is_neutral_when_static():
    matrix = CreditMatrix.from_gains(torch.ones(2, 5), {"ocr": 3.0, "geneval": 1.0}, "static")
    image = weight_heatmap(matrix).axes[0].images[0]
    np.testing.assert_allclose(image.get_array(), 0, atol=1e-12)


def test_trajectories_have_one_panel_a_reward_and_stage_lines(evaluations):
    figure = reward_trajectories(evaluations, {"warmup": 0, "second": 3})
    assert [axes.get_title() for axes in figure.axes] == ["ocr", "geneval", "hpsv2"]
    axes = figure.axes[0]
    assert _texts(axes) == [" warmup", " second"]
    assert axes.get_lines()[1].get_xdata() == [3, 3]
    assert axes.get_lines()[-1].get_ydata().tolist() == [0.41, 0.50, 0.62]
    band = axes.collections[0].get_datalim(axes.transData)
    assert (band.y0, band.y1) == pytest.approx((0.38, 0.65))


def test_trajectories_read_stages_off_the_evaluations(evaluations):
    lines = reward_trajectories(evaluations).axes[0].get_lines()
    assert [line.get_xdata()[0] for line in lines[:2]] == [0, 2]


def test_trajectories_of_a_reward_that_came_late(evaluations, tmp_path):
    del evaluations[0]["metrics"]["hpsv2"]
    evaluations[1]["metrics"]["hpsv2"] = None
    assert save_figure(reward_trajectories(evaluations), tmp_path / "late.png").stat().st_size > 5000


def test_styles_depend_on_the_name_and_differ():
    names = ["ocr", "geneval", "clip_score", "pickscore", "hpsv2", "aesthetic", "mine"]
    styles = reward_styles(names)
    assert styles["ocr"] == reward_styles(["other", "ocr"])["ocr"]
    for part in (0, 1, 2):
        assert len({str(style[part]) for style in styles.values()}) == len(names)


def test_save_figure_is_a_png_of_report_width_without_global_state(evaluations, tmp_path):
    path = save_figure(reward_trajectories(evaluations), tmp_path / "deep" / "trajectories.png")
    with Image.open(path) as image:
        assert (image.format, image.width) == ("PNG", 850)
    assert not matplotlib._pylab_helpers.Gcf.figs
