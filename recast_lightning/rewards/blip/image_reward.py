"""ImageReward: people's preference for an image given its prompt (Xu et al. 2023, arXiv 2304.05977)."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast_lightning.paths import reading, resolve
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import DType, PositiveMap, RewardModel, check_options, require_package
from recast_lightning.rewards.blip.model import BlipScorer, load_blip_scorer
from recast_lightning.rewards.checkpoints import check_file, fetch
from recast_lightning.rewards.preprocessing import MEAN, STD, shortest_side_crop_to_even

_log = logging.getLogger(__name__)

_TOKEN_LIMIT = 35
_SCORE_MEAN, _SCORE_STD = 0.16717362830052426, 1.0333394966054072  # of the published model on its training images


class ImageReward(RewardModel):
    """ImageReward v1.0: BLIP reads the prompt while it looks at the image; mostly in -2...2, mean 0 on its own data.

    Args:
        model: The published weights: a local file, a folder that holds `filename`, or a hub id.
        filename: The file to take from a folder or hub repository.
        tokenizer: A local folder with BERT's tokenizer, or a hub id.
        dtype: Precision of the two encoders; the head computes in float32.
        batch_size: Images a forward pass.
        differentiable: Whether gradients pass to the images; scores are then not exactly the published ones.
        positive_map: Needed for a profile, see :meth:`RewardModel.positive`.
    """

    name = "image_reward"
    score_range = (-math.inf, math.inf)
    version = "ImageReward-v1.0"
    licence = "Apache-2.0"

    def __init__(
        self,
        model: str = "THUDM/ImageReward",
        *,
        filename: str = "ImageReward.pt",
        tokenizer: str = "google-bert/bert-base-uncased",
        dtype: DType = "float32",
        batch_size: int = 64,
        differentiable: bool = False,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(positive_map)
        check_options(dtype, batch_size, differentiable)
        self.model = model
        self.filename = filename
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.batch_size = batch_size
        self.differentiable = differentiable
        self._warned = False

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against their prompts; returns [B]."""
        model, tokenizer = self.load()
        with torch.inference_mode(False):  # weights moved in inference mode could never pass gradients on
            model.to(self._device)
        tokens, mask = self._tokenize(tokenizer, [prompt.text for prompt in prompts])
        mean, std = (torch.tensor(values, device=self._device)[:, None, None] for values in (MEAN, STD))
        scores = []
        for i in range(0, len(images), self.batch_size):
            part = slice(i, i + self.batch_size)
            square = shortest_side_crop_to_even(
                images[part].to(self._device), model.image_size, exact=not self.differentiable
            )
            scores.append(model((square - mean) / std, tokens[part], mask[part]))
        return (torch.cat(scores) - _SCORE_MEAN) / _SCORE_STD

    def _tokenize(self, tokenizer: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Tokens and mask, [B, 35] each, on the reward's device."""
        tokens = tokenizer(
            texts, padding="max_length", truncation=True, max_length=_TOKEN_LIMIT, return_tensors="pt"
        ).to(self._device)
        if not self._warned:
            lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
            if max(lengths) > _TOKEN_LIMIT:
                self._warned = True
                _log.warning(
                    "ImageReward reads only the first %d tokens of %r, which has %d (said once)",
                    _TOKEN_LIMIT,
                    texts[lengths.index(max(lengths))],
                    max(lengths),
                )
        return tokens["input_ids"], tokens["attention_mask"]

    def validate(self) -> None:
        """Check, without loading anything, that paths and packages are there.

        Raises:
            ValueError: If one is missing.
        """
        require_package("transformers", type(self).__name__)
        check_file(self.model, self.filename, f"{self.name} model")
        resolve(self.tokenizer, f"{self.name} tokenizer")

    def _load(self) -> tuple[BlipScorer, Any]:
        from transformers import AutoTokenizer

        words = resolve(self.tokenizer, f"{self.name} tokenizer")
        with reading(f"{self.name} found no tokenizer", words):
            tokenizer = AutoTokenizer.from_pretrained(words)
        tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)  # BLIP's; their embeddings are in the file
        path = fetch(resolve(self.model, f"{self.name} model"), self.filename, self.name)
        model = load_blip_scorer(path, getattr(torch, self.dtype))
        if len(tokenizer) != model.vocabulary:
            raise ValueError(
                f"{path} knows {model.vocabulary} tokens, and {words} with [DEC] and [ENC] has "
                f"{len(tokenizer)}: name the tokenizer that the model was trained with."
            )
        return model, tokenizer
