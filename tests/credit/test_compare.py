import math

import pytest
import torch
from helpers.profiles import make_profile

from recast_lightning.credit import CreditMatrix, compare_profiles

F64 = torch.float64


def curves(*gains):
    """D with the given gains, [R, T + 1]."""
    return -torch.nn.functional.pad(torch.tensor(gains, dtype=F64).cumsum(1), (1, 0))


def exact(rewards, *gains, **changes):
    return make_profile(rewards, divergence=curves(*gains), noise=0.0, **changes)


def test_a_profile_agrees_with_itself():
    profile = make_profile(["ocr", "clip"])
    agreements = compare_profiles(profile, profile)
    assert list(agreements) == ["ocr", "clip"]
    for agreement, total in zip(agreements.values(), profile.totals[0].tolist(), strict=True):
        assert agreement.correlation == pytest.approx(1, abs=1e-12)
        assert agreement.moved == 0
        assert agreement.totals == (total, total)
        assert agreement.flat == (False, False)


def test_correlation_is_pearsons_of_the_monotone_gains():
    a = exact(["ocr", "clip"], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    b = exact(["clip", "ocr"], [1.0, 2.0, 3.0], [3.0, 1.0, 5.0])
    agreement = compare_profiles(a, b)
    assert list(agreement) == ["ocr", "clip"]
    assert agreement["ocr"].correlation == pytest.approx(0.5)  # (-1, 0, 1) . (0, -2, 2) / sqrt(2 * 8)
    assert agreement["clip"].correlation == pytest.approx(-1)
    assert agreement["ocr"].totals == pytest.approx((6, 9))
    falling = exact(["ocr"], [1.0, -1.0, 3.0])  # made monotone: 0.5, 0, 2.5 as levels 1 and 2 pool
    rising = exact(["ocr"], [0.0, 0.0, 3.0])
    monotone = falling.monotone_gains[0] - falling.monotone_gains[0].mean()
    raw = torch.tensor([0.0, -2.0, 2.0], dtype=F64)
    shape = torch.tensor([-1.0, -1.0, 2.0], dtype=F64)
    expected = float(monotone @ shape / monotone.norm() / shape.norm())
    assert compare_profiles(falling, rising)["ocr"].correlation == pytest.approx(expected)
    assert abs(expected - float(raw @ shape / raw.norm() / shape.norm())) > 0.05


@pytest.mark.parametrize("constant", [0.0, 0.1])  # 0.1: constant but for rounding
def test_constant_gains_correlate_with_nothing(constant):
    a, b = exact(["ocr"], [constant] * 7), exact(["ocr"], [1.0, 2, 3, 4, 3, 2, 1])
    assert math.isnan(compare_profiles(a, b)["ocr"].correlation)
    assert math.isnan(compare_profiles(b, a)["ocr"].correlation)


def test_moved_is_the_budget_at_other_levels():
    a = exact(["ocr", "clip", "only a"], [1.0, 4.0, 1.0], [1.0, 1.0, 4.0], [9.0, 1.0, 1.0])
    b = exact(["only b", "clip", "ocr"], [1.0, 9.0, 1.0], [1.0, 1.0, 4.0], [4.0, 1.0, 1.0])
    rows = [CreditMatrix.from_profile(p, {"ocr": 1.0, "clip": 1.0}).weights for p in (a, b)]
    assert rows[0][0].sum() == pytest.approx(0.5)
    expected = ((rows[0] - rows[1]).clamp(min=0).sum(1) / 0.5).tolist()  # what arrives is what leaves
    agreement = compare_profiles(a, b)
    assert [agreement["ocr"].moved, agreement["clip"].moved] == pytest.approx(expected)
    assert 0.2 < agreement["ocr"].moved < 1


def test_flat_is_told_of_each():
    shaped, noisy = make_profile(["ocr"], noise=0.01), make_profile(["ocr"], noise=1.0)
    assert compare_profiles(shaped, noisy)["ocr"].flat == (False, True)
    assert compare_profiles(noisy, shaped)["ocr"].flat == (True, False)


def test_profiles_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="The profiles share no reward: ocr and clip, geneval"):
        compare_profiles(make_profile(["ocr"]), make_profile(["clip", "geneval"]))
    with pytest.raises(ValueError, match="different noise levels, 8 from 0.1250 to 1.0000 and 5 from 0.2000 to 1.0000"):
        compare_profiles(make_profile(num_levels=8), make_profile(num_levels=5))
    shifted = torch.linspace(0, 1, 9).square()
    with pytest.raises(
        ValueError, match="different noise levels, .* from 0.0156 to 1.0000: measure both with one sampler"
    ):
        compare_profiles(make_profile(), make_profile(sigmas=shifted))
