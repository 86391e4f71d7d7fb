import pytest
import torch

from recast_lightning.rewards.ocr.score import ocr_score


@pytest.mark.parametrize(
    ("recognised", "target", "score"),
    [
        ("HELLO WORLD 2024", "Hello World", 1.0),
        ("helo world", "Hello World", 0.9),
        ("", "Hello World", 0.0),
        ("zzzzzzzzzzzzzzzz", "Hello World", 0.0),
        ("h e l l oworld", "Hello World", 1.0),
        ("Hello, World", "Hello World", 0.9),  # punctuation counts
        ("xxHELLO WORLDxx", "Hello World", 1.0),
        ("ABD", "abc", 2 / 3),
        ("a", "A", 1.0),
        ("AB", "A", 0.0),  # one letter is no lottery
        ("xyzA", "A", 0.0),
        (" a ", "A", 1.0),
        ("Welcome to\nA shop", "A", 1.0),  # a word of its own
        ("KNOT", "NO", 0.0),
        ("NOT", "NO", 0.5),
        ("N O", "NO", 1.0),
        ("N\nO", "NO", 1.0),
        ("exit: no!", "NO", 1.0),
        ("No. 42", "42", 1.0),
        ("1423", "42", 0.0),
        ("knots", "not", 1.0),  # from three letters on, anywhere
        ("HELLO\nWORLD", "Hello World", 1.0),
        ("WORLD\nHELLO", "Hello World", 0.2),  # the order of lines counts
        ("CAFE\u0301", "Café", 1.0),
        ("ＳＡＬＥ", "★ Sale ★", 1.0),
        ("straße", "STRASSE", 1 - 2 / 7),
    ],
)
def test_score(recognised, target, score):
    assert ocr_score(recognised, target) == pytest.approx(score)


@pytest.mark.parametrize(
    ("recognised", "target", "score"), [("KNOT", "no", 1), ("AB", "A", 1), ("B", "A", 0), ("Hello!", "Hello", 1)]
)
def test_published_rule(recognised, target, score):
    assert ocr_score(recognised, target, "anywhere") == score


def test_score_agrees_with_a_slow_edit_distance():
    def distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            row, last = [i], row
            for j, y in enumerate(b, 1):
                row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y)))
        return row[-1]

    generator = torch.Generator().manual_seed(0)
    words = [
        "".join("abc"[i] for i in torch.randint(3, (n,), generator=generator)) for n in range(2, 9) for _ in range(8)
    ]
    for a, b in zip(words, reversed(words), strict=True):
        expected = 1.0 if a == b or (len(b) > 2 and b in a) else 1 - min(distance(a, b), len(b)) / len(b)
        assert ocr_score(a, b) == pytest.approx(expected)


def test_empty_target():
    for target in ("  ", "★"):
        with pytest.raises(ValueError, match="OCR target is empty"):
            ocr_score("x", target)
