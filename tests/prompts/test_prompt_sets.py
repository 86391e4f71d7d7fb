import json
import random
import re
from collections import Counter

import pytest

from recast_lightning.cli import main
from recast_lightning.cli.prompts import make_set
from recast_lightning.prompts import geneval_set
from recast_lightning.prompts.geneval_names import COCO_CLASSES, COLORS
from recast_lightning.prompts.geneval_set import geneval_families
from recast_lightning.prompts.ocr_set import ocr_families
from recast_lightning.prompts.ocr_words import KINDS
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.readers import read_prompts
from recast_lightning.prompts.sets import Family, compose
from recast_lightning.rewards.geneval.geneval import check_metadata
from recast_lightning.signboard import prompt_set, world

SENTENCES = {
    "single_object": r"a photo of (an? [a-z ]+)",
    "two_object": r"a photo of (an? [a-z ]+) and (an? [a-z ]+)",
    "counting": r"a photo of (two|three|four) [a-z ]+",
    "colors": r"a photo of (an? [a-z ]+)",
    "position": r"a photo of (an? [a-z ]+) (left of|right of|above|below) (an? [a-z ]+)",
    "color_attr": r"a photo of (an? [a-z ]+) and (an? [a-z ]+)",
}


@pytest.mark.parametrize(("kind", "suffix"), [("geneval", "jsonl"), ("ocr", "txt"), ("signboard", "jsonl")])
def test_a_set_reads_back_and_is_decided_by_its_seed(kind, suffix, tmp_path, capsys):
    files = [tmp_path / f"{i}.{suffix}" for i in range(3)]
    for file, seed in zip(files, (5, 5, 6), strict=True):
        main(["prompts", kind, "-n", "200", "--seed", str(seed), "--output", str(file)])
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"200 {kind} prompts")
    prompts = read_prompts(files[0])
    assert prompts == make_set(kind, 200, 5)
    assert len({prompt.text for prompt in prompts}) == 200


def test_without_output_the_set_goes_to_standard_output(capsys):
    main(["prompts", "ocr", "-n", "3"])
    out, err = capsys.readouterr()
    assert out.splitlines() == [prompt.text for prompt in make_set("ocr", 3, 0)]
    assert err == "3 ocr prompts.\n"


def test_geneval_tasks_have_the_published_shares():
    tags = Counter(prompt.metadata["tag"] for prompt in make_set("geneval", 553, 2))
    assert tags == {
        "color_attr": 100,
        "position": 100,
        "two_object": 99,
        "colors": 94,
        "counting": 80,
        "single_object": 80,
    }


def test_geneval_metadata_and_text_agree():
    for prompt in make_set("geneval", 3000, 1):
        meta = prompt.metadata
        check_metadata(meta)
        assert all(item["class"] in COCO_CLASSES and item.get("color", "red") in COLORS for item in meta["include"])
        assert re.fullmatch(SENTENCES[meta["tag"]], prompt.text), prompt.text
        assert all(
            (article == "an") == (word[0] in "aeiou")
            for article, word in re.findall(r"\b(an?) (?!photo)(\w+)", prompt.text)
        )
        for key in ("class", "color"):
            values = [item[key] for item in meta["include"] if key in item]
            assert len(set(values)) == len(values)
        for item in meta["include"]:
            if item["count"] == 1:
                called = geneval_set._CALLED.get(item["class"], item["class"])
                assert " ".join(filter(None, (item.get("color"), called))) in prompt.text
        keys = [set(item) - {"class", "count"} for item in meta["include"]]
        assert (
            keys
            == {
                "single_object": [set()],
                "two_object": [set(), set()],
                "counting": [set()],
                "colors": [{"color"}],
                "position": [set(), {"position"}],
                "color_attr": [{"color"}, {"color"}],
            }[meta["tag"]]
        )
        assert ("exclude" in meta) == (meta["tag"] == "counting")


def test_geneval_examples():
    families = {family.name: family for family in geneval_families()}
    everything = {name: families[name] for name in ("single_object", "counting", "colors")}
    found = {f.make(i).text: f.make(i).metadata for f in everything.values() for i in range(f.size)}
    assert len(found) == 80 + 240 + 790  # no number repeats another's prompt
    assert found["a photo of three computer mice"] == {
        "tag": "counting",
        "include": [{"class": "computer mouse", "count": 3}],
        "exclude": [{"class": "computer mouse", "count": 4}],
    }
    nouns = "people", "benches", "knives", "buses", "wine glasses", "sheep", "toothbrushes", "ties", "pairs of skis"
    assert all(f"a photo of two {noun}" in found for noun in nouns)
    assert {"a photo of an umbrella", "a photo of an orange cup", "a photo of a green pair of scissors"} <= found.keys()
    pairs = [families["two_object"].make(i).text for i in range(families["two_object"].size)]
    assert len(set(pairs)) == 80 * 79
    position = [families["position"].make(i) for i in range(0, families["position"].size, 97)]
    prompt = next(p for p in position if "left of" in p.text)
    reference, subject = (item["class"] for item in prompt.metadata["include"])
    assert prompt.text.index(subject) < prompt.text.index("left of") < prompt.text.rindex(reference)
    assert prompt.metadata["include"][1]["position"] == ["left of", 0]


def test_the_classes_are_geneval_s():
    assert len(set(COCO_CLASSES)) == 80
    assert (COCO_CLASSES[0], COCO_CLASSES[9], COCO_CLASSES[64:68], COCO_CLASSES[79]) == (
        "person",
        "traffic light",
        ("computer mouse", "tv remote", "computer keyboard", "cell phone"),
        "toothbrush",
    )


def test_ocr_prompts_quote_one_text_of_varied_length(tmp_path):
    prompts = make_set("ocr", 2000, 3)
    file = tmp_path / "ocr.txt"
    file.write_text("\n".join(prompt.text for prompt in prompts))
    lengths = []
    for prompt in read_prompts(file, ocr=True):
        assert prompt.text.count('"') == 2
        assert prompt.ocr_target == prompt.text.split('"')[1]
        lengths.append(len(prompt.ocr_target.replace(" ", "")))
    assert 11 < sum(lengths) / len(lengths) < 18
    assert min(lengths) <= 3
    assert max(lengths) >= 24
    assert len({prompt.text.split('"')[1] for prompt in prompts}) > 900


def test_ocr_scenes_and_texts_are_distinct():
    scenes = [scene for scenes, _ in KINDS.values() for scene in scenes]
    assert len(set(scenes)) == len(scenes)
    assert all(scene.count("{}") == 1 and '"' not in scene for scene in scenes)
    for _, texts in KINDS.values():
        assert len(set(texts)) == len(texts)
        assert all(text == " ".join(text.split()) and '"' not in text and "{" not in text for text in texts)
    assert len({f.make(f.size - 1).text for f in ocr_families()} | {f.make(0).text for f in ocr_families()}) == 14


def test_signboard_prompts_are_of_the_training_split(monkeypatch):
    monkeypatch.setattr(world, "WORDS", ("NO",))
    prompts = make_set("signboard", 300, 4)
    assert all(world.split_of(prompt.text) == "train" and world.parse(prompt).prompt() == prompt for prompt in prompts)
    known = set(prompt_set._all_scenes())
    assert len(known) == 2 * (24 * 3 + 12 * 30 * 3 * 3)
    assert {world.parse(prompt) for prompt in prompts} <= known
    most = sum(world.split_of(scene.text) == "train" for scene in known)
    for count in (0, 200000):
        with pytest.raises(ValueError, match=f"-n is {count}: expected 1 to {most}, "):
            make_set("signboard", count, 0)


def numbers(name, weight, size):
    return Family(name, weight, size, lambda number: Prompt(f"{name}{number}"))


@pytest.mark.parametrize(
    ("count", "shares"),
    [(10, [5, 3, 2]), (11, [6, 3, 2]), (12, [7, 3, 2]), (40, [25, 13, 2]), (62, [40, 20, 2]), (1, [1, 0, 0])],
)
def test_shares_follow_weights_until_a_family_is_used_up(count, shares):
    families = [numbers("a", 2, 40), numbers("b", 1, 20), numbers("c", 1, 2)]
    prompts = compose(families, count, random.Random(0))
    assert len(set(prompts)) == count
    assert [sum(prompt.text.startswith(name) for prompt in prompts) for name in "abc"] == shares


@pytest.mark.parametrize("count", [0, 63])
def test_impossible_sizes_are_refused(count):
    families = [numbers("a", 2, 40), numbers("b", 1, 20), numbers("c", 1, 2)]
    with pytest.raises(ValueError, match=f"-n is {count}: expected 1 to 62, for there are 62 different prompts"):
        compose(families, count, random.Random(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["geneval", "-n", "-1"],
            "-n is -1: expected 1 to 587290, for there are 587290 different prompts of this kind.",
        ),
        (["geneval", "-n", "5", "--output", "x.txt"], "The output x.txt must be a .jsonl file."),
        (["ocr", "-n", "5", "--output", "/none/x.txt"], "The folder /none does not exist."),
        (["ocr"], "n is missing"),
        (["poems", "-n", "5"], "invalid choice: 'poems'"),
    ],
)
def test_errors_are_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["prompts", *arguments])
    out, err = capsys.readouterr()
    assert error.value.code == 2
    assert out == ""
    assert err.startswith("recast: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_used_up_tasks_are_named(capsys):
    main(["prompts", "geneval", "-n", "1000"])
    out, err = capsys.readouterr()
    assert "80 single_object; there are no more of single_object." in err
    assert list(json.loads(out.splitlines()[0]))[:2] == ["tag", "include"]
    assert all(line.endswith('"}') and '"prompt": "a photo of ' in line for line in out.splitlines())
