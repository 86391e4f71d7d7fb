import pytest

from recast_lightning.rewards.hpsv3.hpsv3 import read_template


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate it: <|Reward|>", r"has the fields none: expected {text_prompt} alone"),
        ("{text_prompt} {style} <|Reward|>", r"has the fields style, text_prompt: expected {text_prompt} alone"),
        ("{text_prompt", "is no format string .*: double its plain braces"),
        ("{text_prompt} rate it", r"needs <\|Reward\|> once, after {text_prompt}"),
        ("<|Reward|> {text_prompt}", r"needs <\|Reward\|> once, after {text_prompt}"),
        ("{text_prompt} <|Reward|> <|Reward|>", r"needs <\|Reward\|> once"),
        ("<|im_start|>user {text_prompt} <|Reward|>", "holds more than the user's words: leave out chat and image tok"),
    ],
)
def test_templates_are_checked(tmp_path, text, message):
    path = tmp_path / "template.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_template(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_template(str(path))


def test_templates_keep_their_characters(tmp_path):
    text = "\n „{text_prompt}“ – {{so}}\n<|Reward|>\n\n"
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "template.txt").write_text(text, encoding=encoding)
        assert read_template(str(tmp_path / "template.txt")) == text


def test_the_template_of_an_installed_package_is_read_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "hpsv3"
    (package / "dataset").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    source = package / "dataset" / "data_collator_qwen.py"
    source.write_text(
        'import nothing_like_it\nINSTRUCTION = """\nRate {text_prompt}\n"""\n'
        'other = "no"\nprompt_with_special_token = "It is <|Reward|>\\n"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert read_template(None) == "\nRate {text_prompt}\nIt is <|Reward|>\n"
    source.write_text("INSTRUCTION = make()")
    with pytest.raises(ValueError, match="does not define INSTRUCTION and prompt_with_special_token as texts: give a"):
        read_template(None)
    source.unlink()
    with pytest.raises(ValueError, match="does not define INSTRUCTION"):
        read_template(None)
