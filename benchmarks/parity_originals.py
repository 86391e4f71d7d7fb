"""Scores by the original packages. benchmarks/parity.py runs this in an environment of theirs.

    python benchmarks/parity_originals.py FOLDER

FOLDER holds the checkpoints of tests/helpers/parity.py, `pictures/` and `cases.json`. Models are built small, by the
packages' own classes; preprocessing, tokenizers and scoring are the packages' own. Prints a JSON object.
"""

import gzip
import importlib.util
import json
import os
import sys
import types
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from torch import nn

FOLDER = Path(sys.argv[1])
STATES = {name: torch.load(FOLDER / f"{name}.pt", weights_only=True)["state_dict"] for name in ("clip", "hpsv2")}
IMAGE_SIZE = json.loads((FOLDER / "clip" / "config.json").read_text())["vision_config"]["image_size"]
CLIP_WIDTH = STATES["clip"]["ln_final.weight"].shape[0]


def bare_package(name):
    """A package without what its __init__ imports: training code, and packages that scoring does not need."""
    spec = importlib.util.find_spec(name)
    module = types.ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = module


def count_layers(state, prefix):
    return len({key.removeprefix(prefix).split(".")[0] for key in state if key.startswith(prefix)})


def transformers_clip(name, divisor):
    """ClipScore and PickScore: transformers' model, image processor and tokenizer."""
    from safetensors.torch import load_file
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

    model = CLIPModel(CLIPConfig.from_pretrained(FOLDER / name)).eval()
    left = model.load_state_dict(load_file(FOLDER / name / "model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    assert all(key.endswith("position_ids") for key in left.missing_keys), left  # ranges, which a newer one leaves out
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=square)
    tokenizer = CLIPTokenizerFast(str(FOLDER / "vocab.json"), str(FOLDER / "merges.txt"))
    processor = CLIPProcessor(images, tokenizer)

    def score(image, prompt):
        inputs = processor([prompt], image, return_tensors="pt", padding=True, truncation=True, max_length=77)
        return model(**inputs).logits_per_image.item() / divisor

    return score


def hpsv2():
    """hpsv2's own function, handed a small model and its vocabulary."""
    os.environ["HPS_ROOT"] = str(FOLDER / "hpsv2-cache")
    sys.modules.setdefault("turtle", types.SimpleNamespace(forward=None))  # a stray import, of tkinter
    merges = FOLDER / "merges.txt.gz"
    merges.write_bytes(gzip.compress((FOLDER / "merges.txt").read_bytes()))
    package = Path(importlib.util.find_spec("hpsv2").submodule_search_locations[0])
    missing = package / "src" / "open_clip" / "bpe_simple_vocab_16e6.txt.gz"  # in the wheel
    if not missing.exists():
        missing.write_bytes(merges.read_bytes())
    from hpsv2 import img_score
    from hpsv2.src.open_clip import tokenizer
    from hpsv2.src.open_clip.model import CLIP
    from hpsv2.src.open_clip.transform import image_transform

    tokenizer._tokenizer = tokenizer.SimpleTokenizer(str(merges))
    state = STATES["hpsv2"]
    heads = {"width": CLIP_WIDTH, "layers": count_layers(state, "transformer.resblocks.")}
    patch = state["visual.conv1.weight"].shape[-1]
    vision = {**heads, "head_width": 64, "patch_size": patch, "image_size": IMAGE_SIZE}
    text = {
        **heads,
        "heads": CLIP_WIDTH // 64,
        "vocab_size": len(state["token_embedding.weight"]),
        "context_length": 77,
    }
    img_score.model_dict["model"] = CLIP(state["text_projection"].shape[1], vision, text, output_dict=True)
    img_score.model_dict["preprocess_val"] = image_transform(IMAGE_SIZE, is_train=False, resize_longest_max=True)
    return lambda image, prompt: float(img_score.score(image, prompt, cp=str(FOLDER / "hpsv2.pt"))[0])


def aesthetic():
    """OpenAI's package for the embedding; LAION's network of linear layers, which dropout only separates."""
    from clip.clip import _transform
    from clip.model import build_model

    model, preprocess = build_model(dict(STATES["clip"])).float(), _transform(IMAGE_SIZE)
    sizes = (model.text_projection.shape[1], 1024, 128, 64, 16, 1)
    linear = [nn.Linear(*pair) for pair in pairwise(sizes)]
    head = nn.Sequential(linear[0], nn.Dropout(), linear[1], nn.Dropout(), linear[2], nn.Dropout(), *linear[3:]).eval()
    state = torch.load(FOLDER / "aesthetic-model.pth", map_location="cpu", weights_only=True)  # LAION saved it on a GPU
    head.load_state_dict({key.removeprefix("layers."): value for key, value in state.items()})

    def score(image, prompt):
        embedding = model.encode_image(preprocess(image)[None]).float()
        return head(embedding / embedding.norm(dim=1, keepdim=True)).item()

    return score


def image_reward():
    """ImageReward's own method, on its own BLIP of small sizes."""
    bare_package("ImageReward")
    from ImageReward.ImageReward import MLP, ImageReward, _transform
    from ImageReward.models.BLIP import blip
    from ImageReward.models.BLIP.med import BertConfig, BertModel
    from ImageReward.models.BLIP.vit import VisionTransformer
    from transformers import BertTokenizer

    state = torch.load(FOLDER / "ImageReward.pt", weights_only=True)
    vision = state["blip.visual_encoder.cls_token"].shape[2]
    text = state["blip.text_encoder.embeddings.LayerNorm.weight"].shape[0]
    config = BertConfig(
        vocab_size=len(state["blip.text_encoder.embeddings.word_embeddings.weight"]),
        hidden_size=text,
        num_hidden_layers=count_layers(state, "blip.text_encoder.encoder.layer."),
        num_attention_heads=text // 64,
        intermediate_size=4 * text,
        max_position_embeddings=len(state["blip.text_encoder.embeddings.position_embeddings.weight"]),
        encoder_width=vision,
        add_cross_attention=True,
    )
    model = ImageReward.__new__(ImageReward)
    nn.Module.__init__(model)
    model.device, model.preprocess, model.mlp = "cpu", _transform(IMAGE_SIZE), MLP(text)
    model.mean, model.std = 0.16717362830052426, 1.0333394966054072
    model.blip = nn.Module()
    model.blip.visual_encoder = VisionTransformer(
        img_size=IMAGE_SIZE,
        patch_size=state["blip.visual_encoder.patch_embed.proj.weight"].shape[-1],
        embed_dim=vision,
        depth=count_layers(state, "blip.visual_encoder.blocks."),
        num_heads=vision // 64,
    )
    model.blip.text_encoder = BertModel(config, add_pooling_layer=False)
    for name in ("vision_proj", "text_proj"):
        width, inner = state[f"blip.{name}.weight"].shape
        setattr(model.blip, name, nn.Linear(inner, width))
    found = BertTokenizer.from_pretrained
    BertTokenizer.from_pretrained = lambda name: found(FOLDER / "bert")
    model.blip.tokenizer = blip.init_tokenizer()
    model.load_state_dict(state)
    model.eval()
    return lambda image, prompt: model.score(prompt, image)


SCORERS = {
    "clip_score": (lambda: transformers_clip("clip", 100), "transformers"),
    "pickscore": (lambda: transformers_clip("pickscore", 26), "transformers"),
    "hpsv2": (hpsv2, "hpsv2"),
    "aesthetic": (aesthetic, "clip-anytorch"),
    "image_reward": (image_reward, "image-reward"),
}


@torch.no_grad()
def main():
    cases = json.loads((FOLDER / "cases.json").read_text())
    pictures = [Image.open(file).copy() for file in sorted((FOLDER / "pictures").iterdir())]
    scores = {}
    for name, (make, package) in SCORERS.items():
        score = make()
        scores[name] = {
            "package": f"{package} {version(package)}",
            "scores": [score(pictures[i], prompt) for i, prompt in cases],
        }
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
