"""Files that are not what they should be end in one sentence, and loading copies nothing."""

import shutil
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from helpers import tiny_blip, tiny_clip
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import ClipScore, HPSv2
from recast_lightning.rewards.checkpoints import load_strictly, read_tensors

TENSORS = {"weight": torch.ones(100, 3), "bias": torch.zeros(100)}
DAMAGED = r"cannot be read as a file of weights, it may be damaged or incomplete: [^\n]+\.$"


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder with model and processor, and the state dict in open_clip's layout."""
    folder = tmp_path_factory.mktemp("clip")
    return folder, dict(tiny_clip.save_transformers(folder, quick_gelu=False).state_dict())


def save(file, legacy=False):
    if file.suffix == ".safetensors":
        save_file(TENSORS, file)
    else:
        torch.save(TENSORS, file, _use_new_zipfile_serialization=not legacy)


@pytest.mark.parametrize(("suffix", "legacy"), [(".safetensors", False), (".pt", False), (".bin", True)])
def test_damaged_files_are_one_sentence(tmp_path, suffix, legacy):
    file = tmp_path / f"file{suffix}"
    save(file, legacy)
    assert read_tensors(str(file)).keys() == TENSORS.keys()
    content = file.read_bytes()
    for damaged in (b"", content[:5], content[: len(content) // 2], content[:-5], b"no weights at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"file{suffix} {DAMAGED}"):
            read_tensors(str(file))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", [ClipScore, HPSv2])
def test_damaged_folders_are_one_sentence(clip, tmp_path, name, kind):
    folder = shutil.copytree(clip[0], tmp_path / "cut")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / name, {"format": "pt"}) if name.endswith("safetensors") else torch.save(
        weights, folder / name
    )
    kind(str(folder)).load()
    (folder / name).write_bytes((folder / name).read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"cut {DAMAGED}"):
        kind(str(folder)).load()


def test_numbers_of_numpy_are_read_and_other_objects_named(tmp_path):
    numbers = {"loss": np.float64(0.5), "epoch": np.int64(3), "done": np.bool_(True)}
    for legacy in (True, False):
        torch.save(
            {"state_dict": TENSORS, "meta": numbers}, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy
        )
        assert read_tensors(str(tmp_path / "a.pth")).keys() == TENSORS.keys()
        torch.save(
            {**TENSORS, "meta": PurePosixPath("x")}, tmp_path / "b.pth", _use_new_zipfile_serialization=not legacy
        )
        with pytest.raises(ValueError, match=r"b\.pth holds a pathlib\.PurePosixPath and is not read, since .*\.$"):
            read_tensors(str(tmp_path / "b.pth"))


def test_nothing_is_copied():
    model = nn.Linear(3, 100)
    load_strictly(model, TENSORS, "file", "a layer")
    assert model.weight.data_ptr() == TENSORS["weight"].data_ptr()


def test_another_type_of_model_is_named(clip, tmp_path):
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'holds a model of the type "bert": clip_score takes the type "clip"\.$'):
        ClipScore(str(tmp_path), processor=str(clip[0])).load()


def test_a_foreign_tokenizer_is_refused(clip, tmp_path):
    tiny_blip.save_tokenizer(tmp_path)
    for processor, tokens in ((str(tmp_path), 13), ("signboard:clip", 176)):
        with pytest.raises(ValueError, match=rf"knows 88 tokens, and the tokenizer of .* has {tokens}: name the one"):
            ClipScore(str(clip[0]), processor=processor).load()


def test_hpsv2_takes_the_published_file_wherever_it_lies(clip, tmp_path):
    folder, state = clip
    expected = HPSv2(str(folder))(torch.zeros(1, 3, 32, 32), [Prompt("a")])
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "open_clip_pytorch_model.bin", tmp_path / "folder" / "HPS_v2.1_compressed.pt"):
        torch.save({"state_dict": {key: value.half() for key, value in state.items()}}, path)
        reward = HPSv2(str(path if path.suffix == ".bin" else path.parent), processor=str(folder))
        reward.validate()
        torch.testing.assert_close(reward(torch.zeros(1, 3, 32, 32), [Prompt("a")]), expected, atol=1e-2, rtol=0)
        assert reward.load().model.dtype == torch.float32


def openai_names(state):
    return {**state, "input_resolution": torch.tensor(32)}


def openai_widths(state):
    return {**state, "visual.ln_post.weight": torch.ones(768), "text_projection": torch.ones(128, 512)}


@pytest.mark.parametrize("change", [openai_names, openai_widths])
def test_hpsv2_refuses_openais_clip(clip, tmp_path, change):
    torch.save(change(clip[1]), tmp_path / "openai.pt")
    with pytest.raises(
        ValueError, match=r"openai\.pt has the sizes or names of OpenAI's CLIP, which .* quick GELU: .*\.$"
    ):
        HPSv2(str(tmp_path / "openai.pt"), processor=str(clip[0])).load()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("ln_final.weight", (), "is no open_clip ViT checkpoint: a tensor has too few dimensions"),
        (
            "transformer.resblocks.0.attn.in_proj_weight",
            (2, 128),
            "does not fit a CLIP model of its own sizes: it lacks",
        ),
    ],
)
def test_hpsv2_names_other_shapes(clip, tmp_path, name, shape, message):
    torch.save({**clip[1], name: torch.ones(shape)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=rf"other\.pt {message}"):
        HPSv2(str(tmp_path / "other.pt"), processor=str(clip[0])).load()
