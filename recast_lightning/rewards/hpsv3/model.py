"""The network of HPSv3: Qwen2-VL, read at a special token by a small head."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recast_lightning.paths import reading
from recast_lightning.rewards.checkpoints import check_fit, check_model_type, whole

if TYPE_CHECKING:
    from PIL.Image import Image

REWARD_TOKEN = "<|Reward|>"
MAX_ASPECT = 200  # Qwen2-VL's own limit
_PIXELS = 256 * 28 * 28  # every image is brought close to this area


class Sample(NamedTuple):
    """One image with its caption as the network reads them.

    Attributes:
        ids: Token ids [L], ending with the reward token.
        patches: Normalised pixels [h w, 3 · 2 · 14 · 14], merge block by merge block; a still image fills two frames.
        grid: Patches in time, height and width [1, 3].
    """

    ids: Tensor
    patches: Tensor
    grid: Tensor


class HPSv3Network:
    """Qwen2-VL without its language head, the reward head, and their preprocessing.

    Not an ``nn.Module`` on purpose: a reward model that holds one does not register its weights.

    Args:
        model: A transformers Qwen2VLModel.
        head: Maps hidden states to (mu, sigma).
        tokenizer: That of the base model, with the reward token added.
        image_processor: That of the base model.
        template: The text of the user's turn: a format string with the field ``text_prompt`` and then the reward token.
    """

    def __init__(self, model: Any, head: nn.Module, tokenizer: Any, image_processor: Any, template: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = head.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.template = template
        self.token_limit: int = model.config.text_config.max_position_embeddings
        self._image_token: int = model.config.image_token_id
        self._reward_token: int = tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        self._control_tokens = frozenset(tokenizer.added_tokens_decoder)

    def to(self, device: torch.device) -> "HPSv3Network":
        """Move the network; free if it is there already."""
        if self.model.device != device:
            self.model.to(device)
            self.head.to(device)
        return self

    def encode(self, image: "Image", caption: str) -> Sample:
        """Turn an RGB image and its caption into tokens and patches.

        What would follow the reward token is left out: attention is causal, so nothing there can reach the score.

        Raises:
            ValueError: If the caption holds a control token or is too long.
        """
        if not self._control_tokens.isdisjoint(self.tokenizer(caption, verbose=False)["input_ids"]):
            raise ValueError("the prompt holds a control token of Qwen2-VL")
        size = {"shortest_edge": _PIXELS, "longest_edge": _PIXELS}
        pixels = self.image_processor(images=[image], size=size, return_tensors="pt")
        grid: Tensor = pixels["image_grid_thw"]
        content = [{"type": "image"}, {"type": "text", "text": self.template.format(text_prompt=caption)}]
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[: ids.index(self._reward_token) + 1]
        place = ids.index(self._image_token)
        merged = int(grid.prod()) // self.image_processor.merge_size**2
        ids[place : place + 1] = [self._image_token] * merged
        if len(ids) > self.token_limit:
            raise ValueError(f"with its image the prompt has {len(ids)} tokens, and the model reads {self.token_limit}")
        return Sample(torch.tensor(ids), pixels["pixel_values"], grid)

    def rate(self, samples: Sequence[Sample]) -> Tensor:
        """Score samples in one forward pass; returns mu [B], float32."""
        return self.head(self.read(samples).float())[:, 0]

    def read(self, samples: Sequence[Sample]) -> Tensor:
        """Hidden states [B, D] at the reward tokens.

        Positions count tokens on all three axes, as when HPSv3 was trained; they are not Qwen2-VL's two-dimensional
        ones (transformers' get_rope_index).
        """
        device = self.model.device
        lengths = torch.tensor([len(sample.ids) for sample in samples])
        ids = pad_sequence([sample.ids for sample in samples], batch_first=True)
        positions = torch.arange(ids.shape[1])
        hidden: Tensor = self.model(
            input_ids=ids.to(device),
            attention_mask=(positions < lengths[:, None]).long().to(device),
            position_ids=positions.expand(3, *ids.shape).to(device),
            pixel_values=torch.cat([sample.patches for sample in samples]).to(device),
            image_grid_thw=torch.cat([sample.grid for sample in samples]).to(device),
            use_cache=False,
        ).last_hidden_state
        return hidden[torch.arange(len(samples)), lengths - 1]


def load_network(file: str, base: str, template: str, dtype: torch.dtype) -> HPSv3Network:
    """Read the published weights strictly, but for the language head, which scores do not need.

    Args:
        file: A .safetensors file with the names of Qwen2-VL in transformers 4 or 5, and the head as ``rm_head``.
        base: Folder or hub id with configuration, tokenizer and image processor of the base model.
        template: See :class:`HPSv3Network`.
        dtype: Precision of Qwen2-VL; the reward head is float32.

    Raises:
        ValueError: If something is missing, or the tensors are not those of such a model.
    """
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import Qwen2VLModel

    config, tokenizer, image_processor = _load_base(base)
    with whole(file), safe_open(file, framework="pt") as source:
        keys = [key for key in source.keys() if key != "lm_head.weight"]  # noqa: SIM118
        names = {_rename(key): key for key in keys}
        if len(names) < len(keys):
            raise ValueError(f"{file} is no HPSv3: it holds tensors twice, under the names of transformers 4 and 5.")
        shapes = {name: tuple(source.get_slice(key).get_shape()) for name, key in names.items()}
        rows = shapes.get("language_model.embed_tokens.weight", (len(tokenizer),))[0]
        if rows not in (len(tokenizer), config.text_config.vocab_size):
            raise ValueError(
                f"{file} embeds {rows} tokens and the tokenizer of {base} has {len(tokenizer)} with {REWARD_TOKEN}: "
                "name the model that it was trained from as `base`."
            )
        config.text_config.vocab_size = rows
        with init_empty_weights(include_buffers=False):  # rotary frequencies are buffers that no file holds
            model, head = Qwen2VLModel(config), _build_head(config.text_config.hidden_size)
        expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        expected |= {f"rm_head.{name}": tuple(value.shape) for name, value in head.state_dict().items()}
        check_fit(
            file,
            f"HPSv3 with the base {base}",
            missing=expected.keys() - shapes.keys(),
            surplus=shapes.keys() - expected.keys(),
            misshapen=(name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]),
        )
        tensors = {name: source.get_tensor(key) for name, key in names.items()}
    heads = {name.removeprefix("rm_head."): tensors.pop(name).float() for name in names if name.startswith("rm_head.")}
    head.load_state_dict(heads, assign=True)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    return HPSv3Network(model, head, tokenizer, image_processor, template)


def _load_base(base: str) -> tuple[Any, Any, Any]:
    """Configuration, tokenizer (with the reward token) and image processor."""
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil

    check_model_type(base, "qwen2_vl", "HPSv3")
    with reading("HPSv3 found no configuration, tokenizer or image processor", base):
        config = Qwen2VLConfig.from_pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(base)
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(base)
    if "<|image_pad|>" not in (tokenizer.chat_template or ""):
        raise ValueError(
            f"The tokenizer of {base} has no chat template with images: expected a Qwen2-VL Instruct model."
        )
    tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
    return config, tokenizer, image_processor


def _build_head(width: int) -> nn.Sequential:
    dropout = nn.Identity()  # is active in training only, but counts in the names of the layers
    return nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), dropout, nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))


def _rename(key: str) -> str:
    """A name of Qwen2VLForConditionalGeneration, of transformers 4 or 5, as Qwen2VLModel has it."""
    key = re.sub(r"^model\.(visual|language_model)\.", r"\1.", key)
    return re.sub(r"^model\.(embed_tokens|layers|norm)\.", r"language_model.\1.", key)
