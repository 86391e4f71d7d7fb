import itertools
import math

import pytest
import torch

from recast_lightning.evaluation.tag_means import TagMeans
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import Detection, Detector, GenEval
from recast_lightning.rewards.geneval.detection import Failure, Hint
from recast_lightning.rewards.geneval.geneval import TAGS, check_metadata, geneval_score, relative_position


def things(label, number, color=None, x=0.0, score=0.95):
    return [Detection(label, score, (x, 10.0 * i, x + 10, 10.0 * i + 10), color) for i in range(number)]


SINGLE = {"tag": "single_object", "include": [{"class": "cup", "count": 1}]}
COUNTING = {
    "tag": "counting",
    "include": [{"class": "cup", "count": 4}],
    "exclude": [{"class": "cup", "count": 5}],
}
COLORS = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}]}
COLOR_ATTR = {
    "tag": "color_attr",
    "include": [{"class": "cup", "count": 1, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}],
}
POSITION = {
    "tag": "position",
    "include": [{"class": "dog", "count": 1}, {"class": "cup", "count": 1, "position": ["right of", 0]}],
}
ALL = {
    "include": [
        {"class": "dog", "count": 1},
        {"class": "cup", "count": 2, "color": "red", "position": ["right of", 0]},
    ]
}


ALONE = SINGLE | {"exclude": [{"class": "dog", "count": 2}]}


# Columns: partial, upstream_partial, strict, exact, official.
@pytest.mark.parametrize(
    ("metadata", "found", "expected"),
    [
        (SINGLE, things("cup", 1), (1, 1, 1, 1, 1)),
        (SINGLE, [], (0, 0, 0, 0, 0)),
        (SINGLE, things("dog", 1), (0, 0, 0, 0, 0)),
        (SINGLE, things("cup", 2), (0, 0, 0, 0, 1)),
        (SINGLE, things("cup", 3), (0, -1, 0, 0, 1)),
        (SINGLE, things("cup", 40), (0, -14, 0, 0, 1)),  # at most 16 of a class are looked at
        (ALONE, things("cup", 1) + things("dog", 1), (1, 1, 1, 1, 1)),
        (ALONE, things("cup", 1) + things("dog", 2), (1, 1, 1, 0, 0)),  # the published server does not look
        (ALONE, things("cup", 2), (0, 0, 0, 0, 1)),
        (COUNTING, things("cup", 3), (0.75, 0.75, 0, 0, 0)),
        (COUNTING, things("cup", 4), (1, 1, 1, 1, 1)),
        (COUNTING, things("cup", 5), (0.75, 0.75, 0, 0, 0)),  # excluded officially
        (COUNTING, things("cup", 9), (0, -0.25, 0, 0, 0)),
        (COLORS, things("cup", 1, "red"), (1, 1, 1, 1, 1)),
        (COLORS, things("cup", 1, "blue"), (0.5, 0.5, 0, 0, 0)),
        (COLORS, [], (0, 0, 0, 0, 0)),
        (COLORS, things("cup", 2, "red"), (0, 0, 0, 0, 1)),
        (COLOR_ATTR, things("cup", 1, "red") + things("dog", 1, "red"), (0.75, 0.75, 0, 0, 0)),
        (COLOR_ATTR, things("cup", 1, "red") + things("dog", 1, "blue"), (1, 1, 1, 1, 1)),
        (POSITION, things("dog", 1) + things("cup", 1, x=50), (1, 1, 1, 1, 1)),
        (POSITION, things("dog", 1, x=50) + things("cup", 1), (2 / 3, 0.75, 0, 0, 0)),
        (POSITION, things("dog", 1), (1 / 3, 1 / 3, 0, 0, 0)),
        (POSITION, things("cup", 1), (1 / 3, 1 / 3, 0, 0, 0)),
        (POSITION, things("dog", 1) + things("cup", 2, x=50), (1 / 3, 1 / 3, 0, 0, 1)),
        # Wrong colour: upstream drops the relation from the mean, we count it as not fulfilled.
        (ALL, things("dog", 1) + things("cup", 2, "blue", x=90), (0.5, 2 / 3, 0, 0, 0)),
        (ALL, things("dog", 1) + things("cup", 1, "red", x=90), (0.375, 0.5, 0, 0, 0)),
        (ALL, things("dog", 1) + things("cup", 2, "red", x=90), (1, 1, 1, 1, 1)),
    ],
)
def test_vectors(metadata, found, expected):
    modes = ("partial", "upstream_partial", "strict", "exact", "official")
    assert [geneval_score(found, metadata, mode) for mode in modes] == pytest.approx(expected)


def test_partial_is_bounded_and_falls_with_the_error_in_number():
    for wanted in range(1, 6):
        metadata = {"include": [{"class": "cup", "count": wanted}]}
        scores = [geneval_score(things("cup", n), metadata) for n in range(17)]
        assert all(0 <= s <= 1 for s in scores)
        assert scores[: wanted + 1] == sorted(scores[: wanted + 1])
        assert scores[wanted:] == sorted(scores[wanted:], reverse=True)
        assert [s == 1 for s in scores] == [n == wanted for n in range(17)]


def test_official_takes_the_most_certain_objects():
    sure_red = things("cup", 1, "red", score=0.9) + things("cup", 1, "blue", score=0.5)
    sure_blue = things("cup", 1, "red", score=0.5) + things("cup", 1, "blue", score=0.9)
    assert geneval_score(sure_red, COLORS, "official") == 1
    assert geneval_score(sure_blue, COLORS, "official") == 0


def test_every_pair_must_keep_the_relation():
    metadata = {"include": [{"class": "dog", "count": 1}, {"class": "cup", "count": 2, "position": ["right of", 0]}]}
    dog = [Detection("dog", 1, (40, 0, 50, 10))]
    cups = [Detection("cup", 1, (80, 0, 90, 10)), Detection("cup", 1, (0, 0, 10, 10))]
    assert geneval_score(dog + cups, metadata) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("a", "b", "relations"),
    [
        ((0, 0, 10, 10), (30, 0, 40, 10), {"left of"}),
        ((30, 0, 40, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 30, 10, 40), {"above"}),
        ((0, 30, 10, 40), (0, 0, 10, 10), {"below"}),
        ((30, 30, 40, 40), (0, 0, 10, 10), {"right of", "below"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),  # same place
        ((2, 0, 12, 10), (0, 0, 10, 10), set()),  # offset 2 is not more than 0.1 * (10 + 10)
        # offset 3.9: (3.9 - 2) / 3.9 = 0.487; offset 4.1: 2.1 / 4.1 = 0.512
        ((3.9, 0, 13.9, 10), (0, 0, 10, 10), set()),
        ((4.1, 0, 14.1, 10), (0, 0, 10, 10), {"right of"}),
    ],
)
def test_relative_position(a, b, relations):
    assert relative_position(a, b) == relations


def test_relative_position_agrees_with_a_plain_transcription():
    def transcription(a, b):
        offset = [(a[0] + a[2]) / 2 - (b[0] + b[2]) / 2, (a[1] + a[3]) / 2 - (b[1] + b[3]) / 2]
        norm = math.sqrt(offset[0] ** 2 + offset[1] ** 2)
        names = set()
        for axis, (low, high) in enumerate([("left of", "right of"), ("above", "below")]):
            reach = 0.1 * (a[axis + 2] - a[axis] + b[axis + 2] - b[axis])
            if abs(offset[axis]) > reach:
                amount = (abs(offset[axis]) - reach) / norm
                if amount > 0.5:
                    names.add(low if offset[axis] < 0 else high)
        return names

    corners = itertools.product((0, 3, 9, 20), (0, 5, 14), (4, 11), (6,))
    boxes = [(x, y, x + w, y + h) for x, y, w, h in corners]
    pairs = list(itertools.product(boxes, boxes))
    assert all(relative_position(a, b) == transcription(a, b) for a, b in pairs)
    assert {r for a, b in pairs for r in relative_position(a, b)} == {"left of", "right of", "above", "below"}


class Scripted(Detector):
    """Finds what it is told to."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def detect(self, images, hints=None):
        self.hints = hints
        return self.found[: len(images)]


@pytest.mark.parametrize(
    ("certainty", "metadata", "score"),
    [(0.3, SINGLE, 0), (0.31, SINGLE, 1), (0.9, COUNTING, 0), (0.91, COUNTING, 1)],
)
def test_thresholds_are_strict_and_higher_for_counting(certainty, metadata, score):
    count = metadata["include"][0]["count"]
    reward = GenEval(Scripted([things("cup", count, score=certainty)]))
    assert reward(torch.rand(1, 3, 8, 8), [Prompt("p", metadata)]).tolist() == [score]


def test_thresholds_can_be_set():
    reward = GenEval(Scripted([things("cup", 4, score=0.6)]), threshold=0.7, counting_threshold=0.5)
    assert reward(torch.rand(1, 3, 8, 8), [Prompt("p", COUNTING)]).item() == 1
    assert reward(torch.rand(1, 3, 8, 8), [Prompt("p", SINGLE)]).item() == 0


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ([{"class": "cup"}], r'include\[0\] is .*: expected a "class" and a "count"'),
        ([{"class": "cup", "count": 0}], r"include\[0\]"),
        ([{"count": 1}], r"include\[0\]"),
        ([{"class": "cup", "count": 1, "position": ["above", 0]}], "index of an earlier item"),
        ([{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["near", 0]}], "expected one of left of"),
        ([{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": "above"}], "index of an earlier item"),
        (
            [{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["above", -1]}],
            "index of an earlier item",
        ),
        (
            [{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["above", "0"]}],
            "index of an earlier item",
        ),
        ([{"class": "cup", "count": True}], r"include\[0\]"),
        ([{"class": "cup", "count": 1, "color": ["red"]}], r"include\[0\] has the color \['red'\]: expected a name"),
        (
            [{"class": "cup", "count": 1, "colour": "red"}],
            r"include\[0\] has the key 'colour': expected class, count, color",
        ),
        ([{"class": "cup", "count": 16}], r"include\[0\] has the count 16, and GenEval .* 16 .*: ask for at most 15"),
        (["cup"], "include is .*: expected a list of objects"),
        ({"class": "cup", "count": 1}, "include is .*: expected a list of objects"),
    ],
)
def test_malformed_metadata(include, message):
    reward = GenEval(Scripted([[]]))
    with pytest.raises(ValueError, match="metadata of the prompt 'two' is not GenEval's: .*" + message):
        reward(torch.rand(1, 3, 8, 8), [Prompt("two", {"include": include})])


def test_unknown_mode():
    with pytest.raises(
        ValueError, match='mode is "lax": expected one of partial, strict, exact, official, upstream_partial'
    ):
        GenEval(Scripted([]), mode="lax")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tag": "colour"},
            "its tag is 'colour': expected one of single_object, two_object, counting, colors, position",
        ),
        (
            {"exclude": [{"class": "cup", "count": 1, "color": "red"}]},
            r"exclude\[0\] has the key 'color': expected class",
        ),
        ({"exclude": [{"class": "cup", "count": 17}]}, r"exclude\[0\] has the count 17"),
        ({"exclude": [{"class": "cup"}]}, r'exclude\[0\] is .*: expected a "class" and a "count"'),
    ],
)
def test_the_rest_of_the_schema(change, message):
    check_metadata(COUNTING)
    check_metadata({**COUNTING, "ocr": "free"})
    with pytest.raises(ValueError, match=message):
        check_metadata(COUNTING | change)


def test_detectors_are_told_what_matters():
    detector = Scripted([[]] * 3)
    GenEval(detector)(torch.rand(3, 3, 8, 8), [Prompt("p", m) for m in (COUNTING, COLOR_ATTR, POSITION)])
    cup_and_dog = frozenset({"cup", "dog"})
    assert detector.hints == [Hint(0.9, frozenset()), Hint(0.3, cup_and_dog), Hint(0.3, frozenset())]


def test_classes_and_colours_that_the_detector_does_not_know():
    detector = Scripted([[]])
    detector.classes, detector.colors = ("cup",), ("red",)
    reward = GenEval(detector)
    reward(torch.rand(1, 3, 8, 8), [Prompt("p", COLORS)])
    with pytest.raises(ValueError, match="the class 'dog', which Scripted does not know: expected one of cup"):
        reward(torch.rand(1, 3, 8, 8), [Prompt("p", COLOR_ATTR)])
    with pytest.raises(ValueError, match=r"exclude\[0\] has the class 'dog', which Scripted does not know"):
        reward(torch.rand(1, 3, 8, 8), [Prompt("p", ALONE)])
    detector.colors = ("blue",)
    with pytest.raises(ValueError, match="the color 'red', which Scripted does not know: expected one of blue"):
        reward(torch.rand(1, 3, 8, 8), [Prompt("p", COLORS)])


def test_more_objects_than_the_detector_finds_are_named():
    detector = Scripted([[]])
    detector.most = 3
    GenEval(detector)(torch.rand(1, 3, 8, 8), [Prompt("p", ALL)])
    with pytest.raises(ValueError, match="prompt 'p' .*: it asks for 4 objects, and Scripted finds at most 3"):
        GenEval(detector)(torch.rand(1, 3, 8, 8), [Prompt("p", COUNTING)])


@pytest.mark.parametrize("mode", ["partial", "strict", "exact", "official", "upstream_partial"])
def test_a_failed_detector_is_not_a_zero(mode, caplog):
    nan_box = [Detection("cup", 0.95, (0, 0, math.nan, 10))]
    nan_score = [Detection("cup", math.nan, (0, 0, 10, 10))]
    reward = GenEval(Scripted([Failure("the lens is broken"), nan_box, nan_score, [], things("cup", 1)]), mode=mode)
    scores = reward(torch.rand(5, 3, 8, 8), [Prompt("p", SINGLE)] * 5)
    assert scores.isnan().tolist() == [True, True, True, False, False]
    assert scores[3:].tolist() == [0, 1]
    assert reward.failed == 3
    assert "the lens is broken" in caplog.text
    assert "a certainty or a box that is NaN or infinite" in caplog.text


def tagged(*tags):
    return [Prompt(f"a {tag}", {"tag": tag}) for tag in tags]


def test_overall_is_the_mean_over_tags():
    metric = TagMeans()
    metric.update(torch.tensor([1.0, 1, 1, 0]), tagged("counting", "counting", "counting", "counting"))
    metric.update(torch.tensor([0.5, math.nan]), tagged("position", "position"))
    result = {name: value.item() for name, value in metric.compute().items()}
    assert result == {"overall": pytest.approx((0.75 + 0.5) / 2), "counting": 0.75, "position": 0.5}

    # Two processes: their states are summed.
    other = TagMeans()
    other.update(torch.tensor([1.0, 0.25]), tagged("position", "colors"))
    for state, reduce in metric._reductions.items():
        setattr(metric, state, reduce(torch.stack([getattr(metric, state), getattr(other, state)])))
    metric._computed = None
    result = {name: value.item() for name, value in metric.compute().items()}
    assert result == {
        "overall": pytest.approx((0.75 + 0.25 + 0.75) / 3),
        "counting": 0.75,
        "colors": 0.25,
        "position": 0.75,
    }

    metric.reset()
    metric.update(torch.arange(6.0), tagged(*TAGS))
    assert {name: value.item() for name, value in metric.compute().items()} == {
        "overall": 2.5,
        **dict(zip(TAGS, range(6), strict=True)),
    }


def test_a_tag_without_scores_makes_the_whole_unknown():
    metric = TagMeans()
    metric.update(torch.tensor([1.0, math.nan]), tagged("counting", "colors"))
    result = metric.compute()
    assert result["counting"] == 1
    assert result["colors"].isnan()
    assert result["overall"].isnan()


def test_means_need_the_tags():
    metric = TagMeans()
    with pytest.raises(ValueError, match="'p' has the tag None: expected one of single_object"):
        metric.update(torch.zeros(1), [Prompt("p", SINGLE | {"tag": None})])
    with pytest.raises(ValueError, match=r"scores of shape \[2\] for 1 prompts"):
        metric.update(torch.zeros(2), tagged("colors"))
