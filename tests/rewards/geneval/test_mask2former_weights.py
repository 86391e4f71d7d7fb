import pytest
import torch
from helpers import tiny_mask2former
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from recast_lightning.prompts.geneval_names import COCO_CLASSES
from recast_lightning.rewards.geneval.detection import Hint
from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector
from recast_lightning.rewards.geneval.mask2former_weights import load_openmmlab


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_mask2former.save_all(tmp_path_factory.mktemp("mask2former"))


def test_both_layouts_are_the_same_model(files):
    theirs, ours = (
        load for load in (files.model.state_dict(), load_openmmlab(str(files.root / "openmmlab.pth")).state_dict())
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    hints = [Hint(0.0, frozenset(COCO_CLASSES[:2]))] * 2
    images = torch.rand(2, 3, 80, 120, generator=torch.Generator().manual_seed(0))
    a, b = (files.detector(name).detect(images, hints) for name in ("transformers", "openmmlab.pth"))
    assert a == b
    assert all(len(found) > 20 for found in a)
    assert max(d.score for found in a for d in found) > 0.3
    # The same weights, but each layout is padded as it was trained; these sides are no multiples of 32 when scaled.
    a, b = (files.detector(name).detect(images[..., :110], hints) for name in ("transformers", "openmmlab.pth"))
    assert a != b


def test_merged_patches_keep_mmdets_order(files):
    state, model = files.state, load_openmmlab(str(files.root / "openmmlab.pth"))
    merge = model.model.pixel_level_module.encoder.swin.encoder.layers[1].downsample
    x = torch.randn(2, 16, 6, 4)
    down = "backbone.stages.1.downsample."
    y = F.unfold(x, 2, stride=2).transpose(1, 2)
    y = (
        F.layer_norm(y, (64,), state[f"{down}norm.weight"], state[f"{down}norm.bias"])
        @ state[f"{down}reduction.weight"].T
    )
    torch.testing.assert_close(merge(x.flatten(2).transpose(1, 2), (6, 4)), y, atol=1e-5, rtol=0)


def test_window_attention_is_mmdets(files):
    state, model = files.state, load_openmmlab(str(files.root / "openmmlab.pth"))
    attention = model.model.pixel_level_module.encoder.swin.encoder.layers[1].blocks[0].attention
    name, x, heads = "backbone.stages.1.blocks.0.attn.w_msa.", torch.randn(5, 9, 16), 2
    qkv = F.linear(x, state[f"{name}qkv.weight"], state[f"{name}qkv.bias"])
    q, k, v = qkv.reshape(5, 9, 3, heads, 8).permute(2, 0, 3, 1, 4)
    bias = torch.empty(heads, 9, 9)
    for i in range(9):
        for j in range(9):  # the table's rows count the difference in rows, then in columns, each from -2 to 2
            row = (i // 3 - j // 3 + 2) * 5 + i % 3 - j % 3 + 2
            bias[:, i, j] = state[f"{name}relative_position_bias_table"][row]
    mixed = ((q * 8**-0.5 @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).reshape(5, 9, 16)
    expected = F.linear(mixed, state[f"{name}proj.weight"], state[f"{name}proj.bias"])
    torch.testing.assert_close(attention(x)[0], expected, atol=1e-5, rtol=0)


def test_attention_among_queries_is_mmdets(files):
    state, model = files.state, load_openmmlab(str(files.root / "openmmlab.pth"))
    theirs = nn.MultiheadAttention(32, 4)
    prefix = "panoptic_head.transformer_decoder.layers.1.attentions.1.attn."
    theirs.load_state_dict({key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)})
    x, places = torch.randn(10, 2, 32), torch.randn(10, 2, 32)
    expected = theirs(x + places, x + places, x)[0]
    ours = model.model.transformer_module.decoder.layers[1].self_attn
    torch.testing.assert_close(ours(x, position_embeddings=places)[0], expected, atol=1e-5, rtol=0)


def without(key):
    return lambda state: {k: v for k, v in state.items() if k != key}


def shifted_index(state):
    key = "backbone.stages.2.blocks.0.attn.w_msa.relative_position_index"
    return state | {key: state[key].flip(0)}


NORM = "backbone.stages.0.blocks.1.norm2.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without(NORM),
            r"lacks model\.pixel_level_module\.encoder\.swin\.encoder\.layers\.0\.blocks\.1\.layernorm_after\.b",
        ),
        (without("panoptic_head.cls_embed.bias"), r"lacks class_predictor\.bias"),
        (without("backbone.stages.1.blocks.0.attn.w_msa.qkv.bias"), r"lacks .*k_proj\.bias.*"),
        (without("panoptic_head.query_feat.weight"), r"has no tensor 'panoptic_head\.query_feat\.weight'"),
        (lambda s: s | {"backbone.extra.weight": torch.ones(1)}, r"has the surplus backbone\.extra\.weight"),
        (
            lambda s: s | {"panoptic_head.mask_embed.6.bias": torch.ones(1)},
            r"has the surplus panoptic_head\.mask_embed\.6",
        ),
        (lambda s: s | {NORM: torch.ones(9)}, "has other shapes for .*layernorm_after"),
        (shifted_index, "numbers the relative positions of .* otherwise than Swin"),
        (lambda s: s | {"panoptic_head.loss_cls.class_weight": torch.ones(81)}, None),
    ],
)
def test_an_openmmlab_file_must_be_whole(files, tmp_path, change, message):
    tiny_mask2former.save_openmmlab(tmp_path / "x.pth", change(files.state))
    if message is None:
        load_openmmlab(str(tmp_path / "x.pth"))
        return
    with pytest.raises(ValueError, match=message):
        load_openmmlab(str(tmp_path / "x.pth"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("class_predictor.bias"), r"lacks class_predictor\.bias"),
        (lambda s: s | {"model.extra": torch.ones(1)}, r"has the surplus model\.extra"),
        (lambda s: s | {"class_predictor.bias": torch.ones(5)}, r"has other shapes for class_predictor\.bias"),
    ],
)
def test_a_transformers_folder_must_be_whole(files, tmp_path, change, message):
    (tmp_path / "config.json").write_text((files.root / "transformers/config.json").read_text())
    state = load_file(files.root / "transformers/model.safetensors")
    save_file(change(state), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        Mask2FormerDetector(str(tmp_path), clip=files.clip).load()


def test_a_damaged_or_foreign_transformers_folder_is_one_sentence(files, tmp_path):
    content = (files.root / "transformers/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1000])
    config = (files.root / "transformers/config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="cannot be read as a file of weights, it may be damaged or incomplete"):
        Mask2FormerDetector(str(tmp_path), clip=files.clip).load()
    (tmp_path / "config.json").write_text(config.replace('"model_type": "mask2former"', '"model_type": "maskformer"'))
    with pytest.raises(ValueError, match='of the type "maskformer": Mask2FormerDetector takes the type "mask2former"'):
        Mask2FormerDetector(str(tmp_path), clip=files.clip).load()


def test_other_files_are_refused(files, tmp_path):
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match=r"text\.pth cannot be read"):
        Mask2FormerDetector(str(tmp_path / "text.pth"), clip=files.clip).load()
    panoptic = tiny_mask2former.build(num_labels=133)
    tiny_mask2former.save_openmmlab(tmp_path / "panoptic.pth", tiny_mask2former.to_openmmlab(panoptic))
    with pytest.raises(ValueError, match="tells 133 classes: expected the 80 things of COCO"):
        Mask2FormerDetector(str(tmp_path / "panoptic.pth"), clip=files.clip).load()
