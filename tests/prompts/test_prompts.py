import json

import pytest

from recast_lightning.prompts.prompt import Prompt, find_ocr_target
from recast_lightning.prompts.readers import read_prompts


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('A sign that says "Hello World" and "Bye"', "Hello World"),
        ('words glued to"STOP"quotes', "STOP"),
        ("A “Café” with ‘menu’", "Café"),
        ('A “curly” and a "straight" sign', "straight"),
        ("A storefront with 'Google Research' written on it.", "Google Research"),
        ("A sign that says ‘Don’t Panic’!", "Don’t Panic"),
        ("A sign that says 'Don't Panic'!", "Don't Panic"),
        ('A 5\'10" man with a 12" record labelled "Blue"', "Blue"),
        ('The number plate "B 42" on a car', "B 42"),
        ('  a "  padded  " target', "padded"),
        ("A ‘single’ and a “curly” sign", "curly"),
        ('A "Hello” and a "Bye"', "Bye"),  # quotes that do not fit enclose nothing
        ('A 6 " pipe with "Flow"', "Flow"),
        ('A 12"x18" poster, 3½" thick, of "Art"', "Art"),
        ('A 2024 "Spring" poster', "Spring"),
        ('A sign "24" above a door', "24"),
        ("A sign that says \"Don't Panic\" in the '90s", "Don't Panic"),
        ("‘Tis the dogs’ park’s sign: ‘Open Late’", "Open Late"),
        ("The Beatles' album 'Abbey Road'", "Abbey Road"),
        ("Ein Schild „Bäckerei“ hier", "Bäckerei"),
        ("Un panneau «\xa0Boulangerie\xa0»", "Boulangerie"),
        ("看板「営業中」", "営業中"),
        ('Знак "Привет"', "Привет"),
    ],
)
def test_target_is_the_first_quoted_span(text, target):
    assert find_ocr_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "A bird's eye view of the dogs' park",
        "The strings' vibration is stopped when the keys' dampers fall",
        "The boys’ club and the girl’s house",
        "A man of 5'10\" and a woman of 5'8\"",
        'a lonely " quote',
        "rock 'n' roll",
        "the '80s and the '90s",
        "the '80s and the dogs' park",
        "'Tis the season of the dogs' park",
        "’Twas the girls’ house, and ‘twas theirs’",
        "get 'em all, the dogs' toys",
        "5' 10\" tall and 5′8″ wide",
        "a “ lonely curly quote",
        "no quotes at all",
    ],
)
def test_apostrophes_and_inch_marks_are_no_quotes(text):
    assert find_ocr_target(text) is None


@pytest.mark.parametrize("text", ['a sign "" here', 'a sign "  " here', "a sign “” here", "« »", 'a "" and "OPEN"'])
def test_empty_target_is_an_error(text):
    with pytest.raises(ValueError, match=r"quoted text in the prompt .* is empty"):
        find_ocr_target(text)


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_text_file(tmp_path):
    file = write(tmp_path / "p.txt", "\ufeff one \r\n\r\n  twö\u2028still two\n\nthree")
    assert [p.text for p in read_prompts(file)] == ["one", "twö\u2028still two", "three"]
    assert read_prompts(file)[0] == Prompt("one", {})


def test_jsonl_keeps_every_other_key(tmp_path):
    item = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [], "note": 7}
    file = write(tmp_path / "p.jsonl", json.dumps({**item, "prompt": " two cups "}) + "\n\n")
    assert read_prompts(file) == [Prompt("two cups", item)]


def test_ocr_targets_are_decided_on_reading(tmp_path):
    file = write(tmp_path / "p.txt", 'a sign "A B"\n')
    assert read_prompts(file)[0].ocr_target is None
    assert read_prompts(file, ocr=True)[0].ocr_target == "A B"

    lines = [{"prompt": 'a sign "A"', "ocr": " B ", "k": 1}, {"prompt": 'a sign "A"'}]
    file = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)))
    first, second = read_prompts(file, ocr=True)
    assert (first.metadata, second.metadata) == ({"ocr": "B", "k": 1}, {"ocr": "A"})


def test_lines_without_target_are_listed(tmp_path):
    file = write(tmp_path / "p.txt", 'x\n"ok"\n\n""\n' + "y\n" * 5)
    with pytest.raises(
        ValueError,
        match=r"p\.txt: 7 of 8 prompts have no text for OCR to look for: nothing is quoted "
        r"\(line 1, 5, 6, 7, 8 and 1 more\), the quotes are empty \(line 4\)\. Quote it",
    ):
        read_prompts(file, ocr=True)
    file = write(tmp_path / "p.jsonl", '{"prompt": "x \\"y\\"", "ocr": ""}')
    with pytest.raises(ValueError, match=r'1 of 1 prompts .*: the key "ocr" holds no text \(line 1\)\. Quote'):
        read_prompts(file, ocr=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }', r"p\.jsonl, line 2: not valid JSON"),
        ("p.jsonl", '\n["prompt"]', r"p\.jsonl, line 2: expected a JSON object with the text"),
        ("p.jsonl", '{"text": "a"}', r'line 1: expected a JSON object .* key "prompt"'),
        ("p.jsonl", '{"prompt": "  "}', "line 1: expected a JSON object"),
        ("p.jsonl", '{"prompt": "a \\ud83d dog"}', r"line 1: \\ud83d is half of a character"),
        ("p.jsonl", '{"prompt": "a", "ocr": "\\udc80"}', r"line 1: \\udc80 is half of a character"),
        ("p.txt", " \n\n", r"p\.txt holds no prompts"),
        ("p.csv", "a", r"p\.csv must be a \.txt file .* or a \.jsonl file"),
    ],
)
def test_malformed_files(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path / name, text))


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match=r"none\.txt does not exist"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 0\)"):
        read_prompts(tmp_path / "latin.txt")


def test_prompts_are_hashable():
    assert len({Prompt("a", {"ocr": "b"}), Prompt("a", {"ocr": "b"}), Prompt("c")}) == 2
