import json
import logging
import math
import shutil

import pytest
import torch
from helpers import tiny_qwen2vl as tiny
from safetensors.torch import load_file, save_file

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.hpsv3.hpsv3 import HPSv3

CAPTIONS = ["a red cat", "two dogs, maybe { or } three, on a hill\nin the rain", "x y"]
PROMPTS = [Prompt(caption) for caption in CAPTIONS]
SIZES = {(64, 64): (448, 448), (60, 40): (560, 392), (90, 160): (336, 616)}  # as given, as the model sees them


@pytest.fixture(scope="module")
def tiny_hpsv3(tmp_path_factory):
    """The folder of a tiny HPSv3, and the reference with the same weights."""
    folder = tmp_path_factory.mktemp("hpsv3")
    return folder, tiny.save_hpsv3(folder)


def make(folder, model=None, **options):
    options = {"base": str(folder / "base"), "template": str(folder / "template.txt"), "dtype": "float32", **options}
    return HPSv3(str(model or folder), **options)


@pytest.fixture(scope="module")
def reward(tiny_hpsv3):
    return make(tiny_hpsv3[0], batch_size=2)


@pytest.fixture(scope="module")
def sequential(tiny_hpsv3):
    """Pictures, three a size, with the reference's mu and sigma [size, 3, 2] of each with its caption."""
    pictures = {size: draw(3, *size) for size in SIZES}
    reference = tiny_hpsv3[1]
    rows = [
        [reference.mu_sigma(image, text, SIZES[size]) for image, text in zip(images, CAPTIONS, strict=True)]
        for size, images in pictures.items()
    ]
    return pictures, torch.stack([torch.stack(row) for row in rows])


def draw(count, height, width):
    """Blots, not noise: scaling must leave something to see. uint8 [count, 3, height, width]."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(height))
    return (torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear") * 255).round().byte()


def to_pil(image):
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).numpy())


def test_scores_are_mu_of_an_independent_forward(reward, sequential):
    pictures, expected = sequential
    for images, row in zip(pictures.values(), expected, strict=True):
        torch.testing.assert_close(reward(images, PROMPTS), row[:, 0], atol=1e-5, rtol=1e-5)
    assert expected[..., 0].std(1).min() > 0.01  # captions and pictures matter
    assert (expected[..., 0] - expected[..., 1]).abs().min() > 0.1  # and mu is not sigma


@pytest.mark.parametrize("size", SIZES)
def test_tokens_patches_and_grid(reward, size):
    image, (height, width) = draw(1, *size)[0], SIZES[size]
    grid = [1, height // 14, width // 14]
    for caption in CAPTIONS:
        sample = reward.load().encode(to_pil(image), caption)
        whole = tiny.full_ids(caption, math.prod(grid) // 4)
        assert sample.ids.tolist() == whole[: whole.index(tiny.IDS["<|Reward|>"]) + 1]
        assert sample.grid.tolist() == [grid]
        torch.testing.assert_close(sample.patches, tiny.patchify(image, height, width), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("given", "grid"), [((512, 512), (32, 32)), ((768, 512), (38, 26)), ((576, 1024), (24, 42))])
def test_grids_of_common_sizes(reward, given, grid):
    """Known from Qwen2-VL's own preprocessing at 256 * 28 * 28 pixels."""
    assert reward.load().encode(to_pil(draw(1, *given)[0]), "x").grid.tolist() == [[1, *grid]]


def test_hidden_states_and_head(reward, tiny_hpsv3):
    network, reference = reward.load(), tiny_hpsv3[1]
    image = draw(1, 60, 40)[0]
    hidden = network.read([network.encode(to_pil(image), CAPTIONS[1])])
    torch.testing.assert_close(hidden[0], reference.hidden(image, CAPTIONS[1], (560, 392)), atol=1e-5, rtol=1e-5)
    weights = reference.state_dict()
    x = hidden[0]
    for i in (0, 3, 5):
        x = weights[f"rm_head.{i}.weight"] @ x + weights[f"rm_head.{i}.bias"]
        x = x.clamp(min=0) if i < 5 else x
    torch.testing.assert_close(network.head(hidden)[0], x, atol=1e-5, rtol=1e-5)


def test_positions_count_tokens_and_are_not_those_of_qwen(reward, monkeypatch):
    """The independent forward turns by token index. Had it no effect, the agreement above would not show it."""
    network = reward.load()
    samples = [network.encode(to_pil(draw(1, *size)[0]), text) for size, text in zip(SIZES, CAPTIONS, strict=True)]
    seen = []
    hook = network.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    plain = network.rate(samples)
    hook.remove()
    longest = max(len(sample.ids) for sample in samples)
    assert torch.equal(seen[0], torch.arange(longest).expand(3, 3, longest))

    sample = samples[1]
    ids = sample.ids[None]
    theirs, _ = network.model.get_rope_index(ids, (ids == tiny.IDS["<|image_pad|>"]).int(), sample.grid)
    assert theirs.max() < len(sample.ids) - 100
    original = network.model.forward
    monkeypatch.setattr(network.model, "forward", lambda **inputs: original(**{**inputs, "position_ids": theirs}))
    assert (network.rate([sample])[0] - plain[1]).abs() > 1e-3


def test_a_batch_of_different_sizes_and_lengths_equals_one_by_one(reward):
    network = reward.load()
    samples = [network.encode(to_pil(draw(1, *size)[0]), text) for size, text in zip(SIZES, CAPTIONS, strict=True)]
    assert len({len(sample.ids) for sample in samples}) == len({len(sample.patches) for sample in samples}) == 3
    alone = torch.cat([network.rate([sample]) for sample in samples])
    torch.testing.assert_close(network.rate(samples), alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(network.rate(samples[::-1]).flip(0), alone, atol=1e-5, rtol=1e-5)
    assert alone.diff().abs().min() > 1e-3


def test_neither_batch_size_nor_order_nor_type_matters(tiny_hpsv3, reward, sequential):
    images = sequential[0][60, 40]
    expected = sequential[1][1, :, 0]
    for scores in (
        make(tiny_hpsv3[0], batch_size=1)(images, PROMPTS),
        make(tiny_hpsv3[0])(images, PROMPTS),
        reward(images.flip(0), PROMPTS[::-1]).flip(0),
        reward(images.float() / 255, PROMPTS),
        reward(images.double() / 255, PROMPTS),
    ):
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    for offset in (-0.3, 0.3):  # pixels are rounded to bytes, not cut off
        shifted = (images.float() + offset).clamp(0, 255) / 255
        assert torch.equal(reward(shifted, PROMPTS), reward(images, PROMPTS))


def test_what_cannot_be_scored_is_nan_and_spares_its_neighbours(reward, sequential, caplog):
    images, expected = sequential[0][64, 64], sequential[1][0, :, 0]
    room = tiny.CONTEXT - len(reward.load().encode(to_pil(images[1]), "").ids)
    fits = reward(images[1:2], [Prompt("a" * room)])
    assert fits.isfinite().all()
    for text, reason in [
        ("a" * (room + 1), f"has {tiny.CONTEXT + 1} tokens, and the model reads {tiny.CONTEXT}"),
        ("a <|image_pad|> b", "holds a control token"),
        ("<|Reward|>", "holds a control token"),
    ]:
        reward._reported.clear()
        with caplog.at_level(logging.WARNING):
            scores = reward(images, [PROMPTS[0], Prompt(text), PROMPTS[2]])
        assert reason in caplog.records[-1].getMessage()
        assert scores.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(scores[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=1e-5)
    assert reward(images[:2], [Prompt("<|im_end|>")] * 2).isnan().all()
    with pytest.raises(ValueError, match=r"Images have 1 x 201 pixels: hpsv3 takes sides up to 200 : 1"):
        reward(torch.zeros(1, 3, 1, 201), PROMPTS[:1])
    assert reward(torch.zeros(1, 3, 1, 200), PROMPTS[:1]).shape == (1,)


def test_both_layouts_load_and_nothing_is_left_random(tiny_hpsv3, reward, sequential, tmp_path):
    folder, _ = tiny_hpsv3
    state = load_file(folder / "HPSv3.safetensors")
    new = {}
    for key, value in state.items():
        old, _, rest = key.partition(".")
        new[{"visual": "model.visual.", "model": "model.language_model."}.get(old, f"{old}.") + rest] = value
    assert new.keys().isdisjoint(key for key in state if key.startswith(("visual.", "model.layers.")))
    save_file(new, tmp_path / "new.safetensors")
    images = sequential[0][64, 64]
    scores = make(folder, tmp_path / "new.safetensors")(images, PROMPTS)
    torch.testing.assert_close(scores, sequential[1][0, :, 0], atol=1e-5, rtol=1e-5)
    network = reward.load()
    tensors = [*network.model.parameters(), *network.model.buffers(), *network.head.parameters()]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "it lacks language_model.layers.1.mlp.up_proj.weight"),
        (lambda s: s.pop("rm_head.3.bias"), "it lacks rm_head.3.bias"),
        (lambda s: s.pop("model.embed_tokens.weight"), "it lacks language_model.embed_tokens.weight"),
        (lambda s: s.update(stray=torch.zeros(1)), "it has the surplus stray"),
        (lambda s: s.update({"rm_head.7.bias": torch.zeros(1)}), "it has the surplus rm_head.7.bias"),
        (lambda s: s.update({"rm_head.5.bias": torch.zeros(3)}), "it has other shapes for rm_head.5.bias"),
        (
            lambda s: s.update({"model.visual.blocks.0.norm1.bias": torch.zeros(32)}),
            "holds tensors twice, under the names of transformers 4 and 5",
        ),
        (
            lambda s: s.update({"model.embed_tokens.weight": torch.zeros(tiny.ROWS - 1, tiny.WIDTH)}),
            rf"embeds {tiny.ROWS - 1} tokens and the tokenizer of .* has {tiny.ROWS} with <\|Reward\|>",
        ),
    ],
)
def test_files_load_strictly(tiny_hpsv3, tmp_path, change, message):
    state = load_file(tiny_hpsv3[0] / "HPSv3.safetensors")
    change(state)
    save_file(state, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=rf"broken\.safetensors .*{message}"):
        make(tiny_hpsv3[0], tmp_path / "broken.safetensors").load()


def test_rows_of_the_unresized_vocabulary_are_fine(tiny_hpsv3, sequential, tmp_path):
    state = load_file(tiny_hpsv3[0] / "HPSv3.safetensors")
    key = "model.embed_tokens.weight"
    state[key] = torch.cat([state[key], torch.full((5, tiny.WIDTH), torch.nan)])
    save_file(state, tmp_path / "wide.safetensors")
    scores = make(tiny_hpsv3[0], tmp_path / "wide.safetensors")(sequential[0][64, 64], PROMPTS)
    torch.testing.assert_close(scores, sequential[1][0, :, 0], atol=1e-5, rtol=1e-5)


def test_damaged_files_and_bases_are_one_sentence(tiny_hpsv3, tmp_path, monkeypatch):
    folder, _ = tiny_hpsv3
    (tmp_path / "cut.safetensors").write_bytes((folder / "HPSv3.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.safetensors cannot be read as a file of weights, it may be damaged"):
        make(folder, tmp_path / "cut.safetensors").load()
    base = shutil.copytree(folder / "base", tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="has no chat template with images: expected a Qwen2-VL Instruct model"):
        make(folder, base=str(base)).load()
    (base / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match='holds a model of the type "bert": HPSv3 takes the type "qwen2_vl"'):
        make(folder, base=str(base)).load()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True, raising=False)
    with pytest.raises(ValueError, match=r'hpsv3 found no file "HPSv3\.safetensors" in "nobody/nothing-here"'):
        make(folder, "nobody/nothing-here").load()
    with pytest.raises(ValueError, match='HPSv3 found no model of the type "qwen2_vl" in "nobody/nothing-he'):
        make(folder, base="nobody/nothing-here").load()


def test_bfloat16_is_close_and_keeps_a_float32_head(tiny_hpsv3, reward, sequential):
    half = HPSv3(str(tiny_hpsv3[0]), base=str(tiny_hpsv3[0] / "base"), template=str(tiny_hpsv3[0] / "template.txt"))
    network = half.load()
    assert network.model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in network.head.parameters()} == {torch.float32}
    scores = half(sequential[0][64, 64], PROMPTS)
    assert scores.dtype == torch.float32
    spread = sequential[1][..., 0].abs().mean()
    torch.testing.assert_close(scores, sequential[1][0, :, 0], atol=0.1 * spread.item(), rtol=0)


def test_a_missing_template_is_found_before_anything_is_loaded(tiny_hpsv3, monkeypatch, tmp_path):
    folder, _ = tiny_hpsv3
    monkeypatch.setattr("recast_lightning.rewards.hpsv3.hpsv3.load_network", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("recast_lightning.rewards.hpsv3.hpsv3.fetch", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ValueError, match=r"needs the instruction .*give that as `template`, or install the package"):
        make(folder, template=None)(torch.zeros(1, 3, 8, 8), PROMPTS[:1])
    with pytest.raises(ValueError, match=r"The hpsv3 template /no/such does not exist: expected a text file"):
        make(folder, template="/no/such").load()
    with pytest.raises(ValueError, match="hpsv3 model path '[.]/none' does not exist"):
        make(folder, "./none").validate()
    with pytest.raises(ValueError, match=r"base is no HPSv3: it has no HPSv3\.safetensors"):
        make(folder, folder / "base").validate()
    with pytest.raises(ValueError, match=r"template\.txt is no HPSv3: expected a \.safetensors file"):
        make(folder, folder / "template.txt").validate()
    for name in ("tokenizer.json", "preprocessor_config.json", "config.json"):
        base = shutil.copytree(folder / "base", tmp_path / name)
        (base / name).unlink()
        (base / "tokenizer_config.json").unlink()
        missing = "tokenizer.json or tokenizer_config.json" if name == "tokenizer.json" else name
        with pytest.raises(ValueError, match=f"is no Qwen2-VL: it has no {missing}"):
            make(folder, base=str(base)).validate()
    make(folder, "owner/name", base="owner/name").validate()  # may exist on the hub: no network here


def test_signs_and_options(tiny_hpsv3):
    folder, _ = tiny_hpsv3
    assert HPSv3.score_range == (-math.inf, math.inf)
    assert not HPSv3.differentiable
    with pytest.raises(ValueError, match="hpsv3 can score below 0"):
        make(folder).check_positive()
    for positive_map in ("floor", "exp", "sigmoid"):
        make(folder, positive_map=positive_map).check_positive()
    with pytest.raises(ValueError, match='positive_map is "abs"'):
        make(folder, positive_map="abs")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        make(folder, batch_size=0)
    with pytest.raises(ValueError, match='dtype is "float16": expected one of bfloat16, float32'):
        make(folder, dtype="float16")


def test_the_helper_writes_the_published_layout(tiny_hpsv3):
    folder, _ = tiny_hpsv3
    config = json.loads((folder / "base" / "config.json").read_text())
    keys = load_file(folder / "HPSv3.safetensors").keys()
    assert "text_config" not in config
    assert {key.partition(".")[0] for key in keys} == {"visual", "model", "lm_head", "rm_head"}
    assert {key for key in keys if key.startswith("rm_head")} == {
        f"rm_head.{i}.{kind}" for i in (0, 3, 5) for kind in ("weight", "bias")
    }
