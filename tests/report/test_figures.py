import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from recast_lightning.report import divergence_change, reward_trajectories, save_figure
from recast_lightning.report.style import reward_styles


def _texts(axes):
    return [text.get_text() for text in axes.texts]


def test_divergence_change_shows_what_both_measured(make_profile):
    before = make_profile(["ocr", "geneval", "clip"])
    after = make_profile(["hpsv2", "geneval", "ocr"], scale=0.1)
    figure = divergence_change(before, after)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["ocr", "geneval"]
    first, second, *_ = [c for c in axes.containers if hasattr(c, "patches")]
    np.testing.assert_allclose([bar.get_height() for bar in first], before.totals[0][:2])
    np.testing.assert_allclose([bar.get_height() for bar in second], after.totals[0][[2, 1]])
    assert {bar.get_hatch() for bar in first}.isdisjoint({bar.get_hatch() for bar in second})
    sums = [f"{float(total):.2f}" for total in (before.totals[0][:2].sum(), after.totals[0][1:].sum())]
    assert axes.get_title() == f"ΣD {sums[0]} → {sums[1]} nats"
    errors = [c for c in axes.containers if not hasattr(c, "patches")]
    low, high = errors[1].lines[2][0].get_segments()[0][:, 1]
    assert high - low == pytest.approx(2 * float(after.totals[1][2]))


def test_divergence_change_without_error_bars_or_common_rewards(make_profile, tmp_path):
    before, after = make_profile(["ocr"]), make_profile(["ocr"], replicates=torch.zeros(0, 1, 11))
    assert save_figure(divergence_change(before, after), tmp_path / "change.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="share no reward: ocr and clip"):
        divergence_change(before, make_profile(["clip"]))


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
    for part in range(4):
        assert len({str(style[part]) for style in styles.values()}) == len(names)


def test_save_figure_is_a_png_of_report_width_without_global_state(evaluations, tmp_path):
    path = save_figure(reward_trajectories(evaluations), tmp_path / "deep" / "trajectories.png")
    with Image.open(path) as image:
        assert (image.format, image.width) == ("PNG", 850)
    assert not matplotlib._pylab_helpers.Gcf.figs
