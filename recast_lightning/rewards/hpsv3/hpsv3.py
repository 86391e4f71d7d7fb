"""HPSv3: a vision-language model trained to rate images as people prefer them (Ma et al. 2025, arXiv 2508.03789)."""

import ast
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Literal

import torch
from torch import Tensor

from recast_lightning.paths import resolve
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import PositiveMap, RewardModel, check_options, require_package
from recast_lightning.rewards.checkpoints import fetch
from recast_lightning.rewards.hpsv3.model import MAX_ASPECT, REWARD_TOKEN, HPSv3Network, Sample, load_network
from recast_lightning.rewards.preprocessing import as_pictures

_FILE = "HPSv3.safetensors"
_FIELD = "text_prompt"
_BASE_FILES = (
    ("config.json",),
    ("tokenizer.json", "tokenizer_config.json"),
    ("preprocessor_config.json", "processor_config.json"),
)
_PACKAGE_FILE = "dataset/data_collator_qwen.py"
_PACKAGE_NAMES = ("INSTRUCTION", "prompt_with_special_token")


class HPSv3(RewardModel):
    """Human preference: the mean mu of the rating that HPSv3 predicts; good pictures have 8...13, without any bound.

    Qwen2-VL-7B reads the image, brought near 448 x 448 pixels with its proportions kept, and an instruction that holds
    the prompt. A small head turns the hidden state at a last, special token into mu and sigma; sigma is not used. The
    weights take 15.5 GB in bfloat16, and one image costs about 13 TFLOP.

    Scores mean something with the instruction of the training only. This library does not ship it.

    Args:
        model: A hub id, a local folder with ``HPSv3.safetensors``, or a local .safetensors file.
        base: Hub id or local folder with configuration, tokenizer and image processor of Qwen2-VL-7B-Instruct. Its
            weights are not needed.
        template: A text file with the user's turn as HPSv3 was trained on it: a format string with ``{text_prompt}``
            where the prompt belongs, and after it ``<|Reward|>``. None: it is taken from the package hpsv3.
        dtype: Precision of Qwen2-VL; the head computes in float32.
        batch_size: Images a forward pass.
        positive_map: What makes scores weights of a positive policy.
    """

    name = "hpsv3"
    score_range = (-math.inf, math.inf)
    version = "HPSv3"
    licence = "not verified (its code: MIT; its base model: Apache-2.0)"

    def __init__(
        self,
        model: str = "MizzenAI/HPSv3",
        *,
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        template: str | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        batch_size: int = 8,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(positive_map)
        check_options(dtype, batch_size, known=("bfloat16", "float32"))
        self.model = model
        self.base = base
        self.template = template
        self.dtype = dtype
        self.batch_size = batch_size

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against their prompts; returns [B].

        NaN stands for a prompt that holds control tokens of Qwen2-VL, or more tokens than it reads.

        Raises:
            ValueError: If one side of the images is more than 200 times the other.
        """
        from PIL import Image

        height, width = images.shape[-2:]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(f"Images have {height} x {width} pixels: {self.name} takes sides up to {MAX_ASPECT} : 1.")
        network: HPSv3Network = self.load().to(self._device)
        scores = torch.full((len(images),), torch.nan)
        for chunk in torch.arange(len(images)).split(self.batch_size):
            samples: dict[int, Sample] = {}
            for i, picture in zip(chunk.tolist(), as_pictures(images[chunk.to(images.device)]), strict=True):
                try:
                    samples[i] = network.encode(Image.fromarray(picture), prompts[i].text)
                except ValueError as error:
                    self._report(str(error))
            if samples:
                with torch.no_grad():
                    scores[list(samples)] = network.rate(list(samples.values())).cpu()
        return scores

    def validate(self) -> None:
        """Check, without loading anything, that template, paths and packages are there.

        Raises:
            ValueError: If one is missing, or the template lacks the prompt or the reward token.
        """
        read_template(self.template)
        require_package("transformers", type(self).__name__)
        path = Path(resolve(self.model, f"{self.name} model"))
        if path.is_dir() and not (path / _FILE).is_file():
            raise ValueError(f"{path} is no HPSv3: it has no {_FILE}.")
        if path.is_file() and path.suffix != ".safetensors":
            raise ValueError(f"{path} is no HPSv3: expected a .safetensors file, or a folder with {_FILE}.")
        folder = Path(resolve(self.base, f"{self.name} base"))
        for names in _BASE_FILES if folder.exists() else ():
            if not any((folder / name).is_file() for name in names):
                raise ValueError(f"{folder} is no Qwen2-VL: it has no {' or '.join(names)}.")

    def _load(self) -> HPSv3Network:
        file = fetch(resolve(self.model, f"{self.name} model"), _FILE, self.name)
        return load_network(file, self.base, read_template(self.template), getattr(torch, self.dtype))


def read_template(path: str | None) -> str:
    """Read the text of the user's turn from a file, or from the source of the package hpsv3, which is not imported.

    Raises:
        ValueError: If there is none, or it does not hold ``{text_prompt}`` and, after it, one reward token.
    """
    if path is None:
        path, text = _read_package_template()
    else:
        if not Path(path).is_file():
            raise ValueError(f"The hpsv3 template {path} does not exist: expected a text file.")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"The hpsv3 template {path} is not text in UTF-8.") from error
    try:
        fields = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise ValueError(
            f"The hpsv3 template {path} is no format string ({error}): double its plain braces."
        ) from error
    if fields != {_FIELD}:
        names = ", ".join(sorted(fields)) or "none"
        raise ValueError(f"The hpsv3 template {path} has the fields {names}: expected {{{_FIELD}}} alone.")
    if text.count(REWARD_TOKEN) != 1 or text.index(REWARD_TOKEN) < text.rindex(f"{{{_FIELD}"):
        raise ValueError(f"The hpsv3 template {path} needs {REWARD_TOKEN} once, after {{{_FIELD}}}.")
    if "<|" in text.replace(REWARD_TOKEN, ""):
        raise ValueError(
            f"The hpsv3 template {path} holds more than the user's words: leave out chat and image tokens."
        )
    return text


def _read_package_template() -> tuple[str, str]:
    """Path and text; the package cannot simply be imported, since it pulls in training code and torchvision."""
    spec = importlib.util.find_spec("hpsv3")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "HPSv3 needs the instruction that it was trained with: write it to a text file and give that as `template`, "
            "or install the package hpsv3."
        )
    file = Path(spec.submodule_search_locations[0]) / _PACKAGE_FILE
    constants: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            constants |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    if not constants.keys() >= set(_PACKAGE_NAMES):
        raise ValueError(f"{file} does not define {' and '.join(_PACKAGE_NAMES)} as texts: give a `template`.")
    return str(file), "".join(constants[name] for name in _PACKAGE_NAMES)
