"""The CLIP backbone that several rewards share: loading each model once, preprocessing, embedding."""

import copy
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast_lightning.paths import reading, resolve
from recast_lightning.rewards.base import DType
from recast_lightning.rewards.checkpoints import check_fit, check_model_type, whole
from recast_lightning.rewards.preprocessing import MEAN, STD, shortest_side_crop_to_even

if TYPE_CHECKING:
    from transformers import CLIPModel

_log = logging.getLogger(__name__)

_MEMO_SIZE = 4096
_CPU = torch.device("cpu")
_shared: "WeakValueDictionary[tuple[Hashable, torch.device], nn.Module]" = WeakValueDictionary()


class ClipBackbone:
    """A frozen CLIP model with its tokeniser, giving unit-length embeddings; :func:`shared_clip` makes one.

    Not an ``nn.Module`` on purpose: a reward model that holds one does not register its weights.

    Args:
        model: The loaded model; its configuration decides image size and token limit.
        key: What the model is shared by.
        tokenizer: A transformers tokenizer that ends each text with its EOS token.
        mean: Channel means of the training images, in [0, 1].
        std: Channel standard deviations, likewise.
        fit: How images are brought to the model's square size.
        batch_size: The number of images or texts a forward pass.
    """

    def __init__(
        self,
        model: "CLIPModel",
        tokenizer: Any,
        *,
        key: Hashable,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        fit: Callable[[Tensor, int], Tensor] = shortest_side_crop_to_even,
        batch_size: int = 64,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.key = key
        self.tokenizer = tokenizer
        self.fit = fit
        self.batch_size = batch_size
        self.image_size: int = model.config.vision_config.image_size
        self.token_limit: int = model.config.text_config.max_position_embeddings
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]
        self._memo: dict[str, Tensor] = {}
        self._warned = False

    def to(self, device: torch.device) -> "ClipBackbone":
        """Use the model on another device, where it is shared likewise; free if it is there already."""
        if self.model.device != device:
            self.model = _share(self.key, device, lambda: _copy_to(self.model, device))
            self._memo.clear()
        return self

    def logit_scale(self) -> Tensor:
        """The learned temperature exp(logit_scale), about 100 for the published models."""
        scale: Tensor = self.model.logit_scale.float().exp()
        return scale

    def cosine(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """Cosine similarity [B] of images [B, 3, H, W] in [0, 1] and their texts; differentiable in the images."""
        return (self.embed_images(images) * self.embed_texts(texts)).sum(1)

    def embed_images(self, images: Tensor) -> Tensor:
        """Unit-length embeddings [B, D], float32, of images [B, 3, H, W] in [0, 1]."""
        images = images.to(self.model.device)
        chunks = [self._embed_image_chunk(chunk) for chunk in torch.split(images, self.batch_size)]
        return F.normalize(torch.cat(chunks), dim=1)

    def _embed_image_chunk(self, images: Tensor) -> Tensor:
        pixels = (self.fit(images, self.image_size) - self._mean.to(images)) / self._std.to(images)
        features: Tensor = self.model.get_image_features(pixel_values=pixels.to(self.model.dtype)).pooler_output
        return features.float()

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit-length embeddings [B, D], float32; the latest few thousand texts are remembered."""
        new = [text for text in dict.fromkeys(texts) if text not in self._memo]
        found = {text: self._memo[text] for text in texts if text in self._memo}
        # Embeddings made in inference mode would break a later backward pass through the image side.
        with torch.inference_mode(False), torch.no_grad():
            for text in new:  # one by one: an embedding must not depend, in its last bit, on what was read beside it
                found[text] = self._embed_text_chunk([text])[0]
        self._memo.update(found)
        while len(self._memo) > _MEMO_SIZE:
            del self._memo[next(iter(self._memo))]
        return torch.stack([found[text] for text in texts])

    def _embed_text_chunk(self, texts: list[str]) -> Tensor:
        lengths = [len(ids) for ids in self.tokenizer(texts, verbose=False)["input_ids"]]
        if max(lengths) > self.token_limit and not self._warned:
            self._warned = True
            longest = texts[lengths.index(max(lengths))]
            _log.warning(
                "CLIP reads only the first %d tokens of %r, which has %d (said once)",
                self.token_limit,
                longest,
                max(lengths),
            )
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.token_limit, return_tensors="pt"
        )
        if not (tokens["input_ids"] == self.tokenizer.eos_token_id).any(1).all():
            raise ValueError("The tokenizer ends texts without an EOS token, and CLIP reads its text embedding there.")
        features: Tensor = self.model.get_text_features(**tokens.to(self.model.device)).pooler_output
        return F.normalize(features.float(), dim=1)


def shared_clip(
    model: str,
    processor: str | None = None,
    dtype: DType = "float32",
    batch_size: int = 64,
    *,
    device: torch.device = _CPU,
    fit: Callable[[Tensor, int], Tensor] = shortest_side_crop_to_even,
    read: "Callable[[str, torch.dtype, str], CLIPModel] | None" = None,
    user: str = "clip",
) -> ClipBackbone:
    """A backbone on weights that are in memory once, whoever asks for them, and only while someone holds them.

    Weights are the same if path (for local files also their sizes and times), dtype and device are.

    Args:
        model: ``signboard:<name>``, a local path, or a hub id.
        processor: Where tokenizer and image statistics come from, likewise. None: the same as `model`.
        dtype: Precision of the model.
        batch_size: Images a forward pass.
        device: Where the model is to be.
        fit: How images are brought to the model's square size.
        read: Reads the model from path and type, for the user named. None: a transformers CLIPModel.
        user: Who asks, for messages.

    Raises:
        ValueError: If there is no model or tokenizer, or the weights do not fit.
    """
    from transformers import AutoTokenizer

    path = resolve(model, f"{user} model")
    processor = path if processor is None else resolve(processor, f"{user} processor")
    with reading(f"{user} found no tokenizer", processor):
        tokenizer = AutoTokenizer.from_pretrained(processor)
    mean, std = read_image_statistics(processor)
    key = (path, _stamp(path), dtype)
    clip = _share(key, device, lambda: (read or read_clip)(path, getattr(torch, dtype), user).to(device))
    known = clip.config.text_config.vocab_size
    if len(tokenizer) != known or tokenizer.eos_token_id is None:
        raise ValueError(
            f"{path} knows {known} tokens, and the tokenizer of {processor} has {len(tokenizer)}: "
            "name the one that the model was trained with as `processor`."
        )
    return ClipBackbone(clip, tokenizer, key=key, mean=mean, std=std, fit=fit, batch_size=batch_size)


def _share(key: Hashable, device: torch.device, make: Callable[[], Any]) -> Any:
    """The model in use under `key` on `device`, or a new one."""
    place = key, torch.empty(0, device=device).device  # "cuda" is "cuda:0"
    model = _shared.get(place)
    if model is None:
        with torch.inference_mode(False):  # weights made in inference mode could never pass gradients on
            model = _shared[place] = make()
    return model


def _copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """A frozen copy of a model on another device, without a second one on its own."""
    moved: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(device), False) for p in model.parameters()}
    moved.update((id(buffer), buffer.to(device)) for buffer in model.buffers())
    return copy.deepcopy(model, moved)


def _stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files at a local path; nothing for a hub id."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)] * Path(path).is_file()
    return tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)


def read_clip(path: str, dtype: torch.dtype, user: str) -> "CLIPModel":
    """Read a transformers CLIPModel, strictly.

    Raises:
        ValueError: If there is none, or its tensors are not those of its configuration.
    """
    from transformers import CLIPModel

    check_model_type(path, "clip", user)
    with whole(path), reading(f"{user} found no CLIP model", path):
        model, info = CLIPModel.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, weights_only=True
        )
    check_fit(
        path,
        "the CLIP model that its config.json describes",
        missing=info["missing_keys"],
        surplus=(key for key in info["unexpected_keys"] if not key.endswith("embeddings.position_ids")),  # a range
        misshapen=(key for key, *_ in info["mismatched_keys"]),
    )
    return model


def read_image_statistics(path: str) -> tuple[Sequence[float], Sequence[float]]:
    """Read channel mean and standard deviation from a processor folder or hub id; CLIP's own where it has none.

    The size comes from the model: CLIP takes no other.
    """
    from transformers.utils import cached_file

    for name in ("preprocessor_config.json", "processor_config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            try:
                config = json.loads(Path(file).read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{file} is no JSON: {error}.") from error
            config = config.get("image_processor", config)
            return config.get("image_mean", MEAN), config.get("image_std", STD)
    return MEAN, STD
