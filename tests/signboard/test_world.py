import itertools
import random

import pytest
import torch

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import OCR, GenEval, SignboardDetector
from recast_lightning.signboard.tokenizer import MAX_TOKENS, build_tokenizer
from recast_lightning.signboard.world import (
    LETTERS,
    SPLITS,
    draw_tensor,
    make_prompts,
    misdescribe,
    parse,
    scenes,
    split_of,
)


def some(count, split="train", seed=0):
    return list(itertools.islice(scenes(seed, split), count))


def test_splits_never_share_a_prompt_whatever_the_seed():
    texts = {split: {s.text for seed in (0, 1) for s in some(300, split, seed)} for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not texts[a] & texts[b]
    assert all(split_of(text) == split for split, group in texts.items() for text in group)


def test_prompts_are_distinct_and_follow_from_the_seed():
    prompts = make_prompts(500, 3, "train")
    assert len({p.text for p in prompts}) == 500
    assert [p.text for p in make_prompts(5, 3, "train")] == [p.text for p in prompts[:5]]


def test_every_tag_of_the_world_appears():
    assert {s.tag for s in some(100)} == {"colors", "counting", "color_attr", "position"}


def test_parse_is_the_inverse_of_the_sentence():
    for scene in some(300):
        assert parse(scene.prompt()) == scene


@pytest.mark.parametrize("text", ["a dog", 'a sign with two red dogs above the text "AB"', 'a sign "AB"', ""])
def test_other_sentences_are_not_drawn(text):
    with pytest.raises(ValueError, match="not a Signboard prompt"):
        parse(Prompt(text))


def test_a_position_scene_names_its_reference_first():
    scene = next(s for s in some(100) if s.tag == "position")
    reference, subject = scene.prompt().metadata["include"]
    assert subject["position"] == [scene.relation, 0]
    assert (subject["class"], reference["class"]) == (scene.groups[0].shape, scene.groups[1].shape)


def test_drawings_depend_on_their_seed_only():
    scene = some(1)[0]
    assert torch.equal(draw_tensor(scene, 1), draw_tensor(scene, 1))
    assert not torch.equal(draw_tensor(scene, 1), draw_tensor(scene, 2))


def test_the_tokenizer_keeps_every_quoted_letter_apart_and_fits_every_sentence():
    tokenizer = build_tokenizer()
    for word in map("".join, itertools.product(LETTERS, repeat=3)):
        tokens = tokenizer.tokenize(f'"{word}"')
        assert [t.removesuffix("</w>").upper() for t in tokens] == ['"', *word, '"']
    for scene in some(2000):
        ids = tokenizer(scene.text).input_ids
        assert len(ids) <= MAX_TOKENS
        assert tokenizer.unk_token_id not in ids


def test_whole_words_are_one_token():
    tokens = build_tokenizer().tokenize("a sign with three green squares right of a yellow star below the text")
    assert len(tokens) == 14


def test_careless_captions_keep_the_layout_and_change_some_words():
    rng = random.Random(0)
    originals = some(400)
    careless = [misdescribe(s, rng, letters=0.65, colors=0.3, shapes=0.2) for s in originals]
    for a, b in zip(originals, careless, strict=True):
        assert (a.relation, a.shapes_above, len(a.word)) == (b.relation, b.shapes_above, len(b.word))
        assert [g.count for g in a.groups] == [g.count for g in b.groups]
    letters = [(x, y) for a, b in zip(originals, careless, strict=True) for x, y in zip(a.word, b.word, strict=True)]
    kept = sum(x == y for x, y in letters) / len(letters)
    assert kept == pytest.approx(0.35 + 0.65 / len(LETTERS), abs=0.05)


def test_the_rewards_agree_that_the_renderer_draws_what_the_prompt_says():
    drawn = some(60, "test")
    images = torch.stack([draw_tensor(s, 0) for s in drawn])
    prompts = [s.prompt() for s in drawn]
    geneval = GenEval(detector=SignboardDetector(), mode="strict")(images, prompts)
    ocr = OCR(detect=False)(images, prompts)
    assert geneval.mean() > 0.97
    assert ocr.mean() > 0.93
    swapped = prompts[1:] + prompts[:1]
    assert GenEval(detector=SignboardDetector(), mode="strict")(images, swapped).mean() < 0.2
    assert OCR(detect=False)(images, swapped).mean() < 0.5
