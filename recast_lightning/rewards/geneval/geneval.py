"""GenEval: does the image show the objects that the prompt names, in number, colour and place (Ghosh et al. 2023)?"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import PositiveMap, RewardModel, check_choice
from recast_lightning.rewards.geneval.detection import Box, Detection, Detector, Failure, Found, Hint

Mode = Literal["partial", "strict", "exact", "official", "upstream_partial"]
_POSITION_THRESHOLD = 0.1
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
_RELATIONS = ("left of", "right of", "above", "below")
_KEYS = {"include": ("class", "count", "color", "position"), "exclude": ("class", "count")}
_MOST_PER_CLASS = 16


class GenEval(RewardModel):
    """Compositional correctness: what a detector finds, compared with the prompt's metadata by :func:`geneval_score`.

    Args:
        detector: Finds objects and, where prompts ask for it, their colours.
        mode: ``partial`` gives credit for each fact of the prompt that holds, in [0, 1]. ``strict`` is 1 if number,
            colours and places of all that ``include`` names are exactly right; like the published reward server, it does
            not look at ``exclude``. ``exact`` is 1 if, besides, nothing is there that ``exclude`` names. ``official`` is
            GenEval's own benchmark, which tolerates surplus objects. ``upstream_partial`` is the rule of the training
            reward of DiffusionNFT and Flow-GRPO, which falls below 0 for surplus objects; the rule alone, for their
            detector got red and blue swapped.
        threshold: Objects must be more certain than this. None: the detector's choice.
        counting_threshold: The same for prompts with the tag ``counting``.
        positive_map: What makes a profile of ``upstream_partial`` possible, see :meth:`RewardModel.positive`.
    """

    name = "geneval"
    needs = ("include",)

    def __init__(
        self,
        detector: Detector,
        *,
        mode: Mode = "partial",
        threshold: float | None = None,
        counting_threshold: float | None = None,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(positive_map)
        check_choice("mode", mode, get_args(Mode))
        self.detector = detector
        self.version, self.licence = detector.version, detector.licence
        self.mode = mode
        if mode == "upstream_partial":
            self.score_range = (-math.inf, 1.0)
        self.threshold = detector.threshold if threshold is None else threshold
        self.counting_threshold = detector.counting_threshold if counting_threshold is None else counting_threshold

    def validate(self) -> None:
        """Check, without loading anything, that what the detector needs is there.

        Raises:
            ValueError: If something is missing.
        """
        self.detector.validate()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has metadata in GenEval's schema.

        Raises:
            ValueError: Naming the first prompt that does not.
        """
        super().check_prompts(prompts)
        for prompt in prompts:
            try:
                check_metadata(prompt.metadata)
                self._check_known(prompt.metadata)
            except ValueError as error:
                raise ValueError(f"The metadata of the prompt {prompt.text!r} is not GenEval's: {error}") from error

    def _check_known(self, metadata: dict[str, Any]) -> None:
        """Raises ValueError if the detector can never find what is asked for."""
        asked, most, who = sum(item["count"] for item in metadata["include"]), self.detector.most, type(self.detector)
        if most and asked > most:
            raise ValueError(f"it asks for {asked} objects, and {who.__name__} finds at most {most}.")
        items = [(f"{key}[{i}]", item) for key in _KEYS for i, item in enumerate(metadata.get(key, []))]
        for where, item in items:
            for key, known in (("class", self.detector.classes), ("color", self.detector.colors)):
                if known and key in item and item[key] not in known:
                    raise ValueError(
                        f"{where} has the {key} {item[key]!r}, which {who.__name__} does not know: "
                        f"expected one of {', '.join(known)}."
                    )

    def _load(self) -> bool:
        self.detector.load(self._device)
        return True

    def offload(self) -> None:
        """Bring the detector's weights back to the CPU at once."""
        super().offload()
        self.detector.load(self._device)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]) against the metadata of their prompts.

        Returns:
            [B]; NaN where the detector failed.
        """
        self.load()
        hints = [self._hint(prompt.metadata) for prompt in prompts]
        found = self.detector.detect(images.to(self._device), hints)
        scores = [self._score(*each) for each in zip(found, hints, prompts, strict=True)]
        return torch.tensor(scores)

    def _hint(self, metadata: dict[str, Any]) -> Hint:
        threshold = self.counting_threshold if metadata.get("tag") == "counting" else self.threshold
        return Hint(threshold, frozenset(item["class"] for item in metadata["include"] if "color" in item))

    def _score(self, found: Found, hint: Hint, prompt: Prompt) -> float:
        if isinstance(found, Failure):
            self._report(found.reason)
            return math.nan
        if not all(map(math.isfinite, itertools.chain.from_iterable((d.score, *d.box) for d in found))):
            self._report("the detector gave a certainty or a box that is NaN or infinite")
            return math.nan
        certain = [detection for detection in found if detection.score > hint.threshold]
        return geneval_score(certain, prompt.metadata, self.mode)


def geneval_score(detections: Sequence[Detection], metadata: dict[str, Any], mode: Mode = "partial") -> float:
    """Score the objects that were found in one image against what was asked for.

    With `partial`, every fact asked for counts alike: the number of each class, with credit ``max(0, 1 - |n - found| /
    n)``; its colour, with the same credit for the objects that have it, if the number is right; its place, 0 or 1, if
    number and colour are right. A fact that depends on another that fails scores 0.

    Args:
        detections: Objects above the threshold of certainty.
        metadata: GenEval's schema: ``include`` and optionally ``exclude``.
        mode: See :class:`GenEval`.

    Returns:
        A number in [0, 1]; below 0 is possible with `upstream_partial`.
    """
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        same = objects.setdefault(detection.label, [])
        if len(same) < _MOST_PER_CLASS:
            same.append(detection)
    if mode == "upstream_partial":
        return _upstream_partial(objects, metadata["include"])

    credits: list[float] = []
    groups: list[list[Detection] | None] = []  # the objects of each include item whose facts all hold
    for item in metadata["include"]:
        found = objects.get(item["class"], [])
        if mode == "official":
            found = found[: item["count"]]
        facts = [_share(len(found), item["count"])]
        if "color" in item:
            colored = sum(detection.color == item["color"] for detection in found)
            facts.append(_share(colored, item["count"]) if facts[-1] == 1 else 0.0)
        if "position" in item:
            relation, reference = item["position"]
            others = groups[reference]
            facts.append(float(min(facts) == 1 and others is not None and _all_related(found, others, relation)))
        groups.append(found if min(facts) == 1 else None)
        credits += facts

    if mode == "partial":
        return sum(credits) / len(credits)
    surplus = mode in ("exact", "official") and any(
        len(objects.get(item["class"], [])) >= item["count"] for item in metadata.get("exclude", [])
    )
    return float(min(credits) == 1 and not surplus)


def _share(found: int, wanted: int) -> float:
    return max(0.0, 1 - abs(wanted - found) / wanted)


def _upstream_partial(objects: dict[str, list[Detection]], include: Sequence[dict[str, Any]]) -> float:
    """Flow-GRPO's and DiffusionNFT's reward with its quirks: no lower bound; a wrong relation adds 0 and then 1."""
    credits: list[float] = []
    groups: list[list[Detection] | None] = []
    for item in include:
        found, wanted = objects.get(item["class"], []), item["count"]
        credits.append(1 - abs(wanted - len(found)) / wanted)
        matched = len(found) == wanted
        if not matched and ("color" in item or "position" in item):
            credits.append(0.0)
        if matched and "color" in item:
            colored = sum(detection.color == item["color"] for detection in found)
            credits.append(1 - abs(wanted - colored) / wanted)
            matched = colored == wanted
        if matched and "position" in item:
            relation, reference = item["position"]
            others = groups[reference]
            if others is None:
                credits.append(0.0)
                matched = False
            else:
                matched = _all_related(found, others, relation)
                credits += [1.0] if matched else [0.0, 1.0]
        groups.append(found if matched else None)
    return sum(credits) / len(credits)


def _all_related(subjects: Sequence[Detection], others: Sequence[Detection], relation: str) -> bool:
    return all(relation in relative_position(a.box, b.box) for a in subjects for b in others)


def relative_position(a: Box, b: Box) -> set[str]:
    """Where box `a` lies, seen from box `b`: any of "left of", "right of", "above", "below" (y points down).

    The offset of the centres loses a tenth of the summed sizes on each axis; what remains, divided by the length of the
    full offset, must exceed a half.
    """
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    size = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    shrunk = [math.copysign(max(abs(o) - _POSITION_THRESHOLD * s, 0), o) for o, s in zip(offset, size, strict=True)]
    if max(map(abs, shrunk)) < 1e-3:
        return set()
    dx, dy = (s / math.hypot(*offset) for s in shrunk)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, true in holds.items() if true}


def check_metadata(metadata: dict[str, Any]) -> None:
    """Check that metadata follows GenEval's schema: ``tag``, ``include`` and ``exclude``; other keys are free.

    Raises:
        ValueError: If it does not.
    """
    if metadata.get("tag", TAGS[0]) not in TAGS:
        raise ValueError(f"its tag is {metadata['tag']!r}: expected one of {', '.join(TAGS)}.")
    for key in ("include", "exclude"):
        items = metadata.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{key} is {items!r}: expected a list of objects.")
        for i, item in enumerate(items):
            if unknown := next((name for name in item if name not in _KEYS[key]), None):
                raise ValueError(f"{key}[{i}] has the key {unknown!r}: expected {', '.join(_KEYS[key])}.")
            if not isinstance(item.get("class"), str) or type(item.get("count")) is not int or item["count"] < 1:
                raise ValueError(f'{key}[{i}] is {item}: expected a "class" and a "count" of at least 1.')
            if item["count"] + (key == "include") > _MOST_PER_CLASS:  # of those included, one too many must be seen
                raise ValueError(
                    f"{key}[{i}] has the count {item['count']}, and GenEval looks at {_MOST_PER_CLASS} objects of a class: "
                    f"ask for at most {_MOST_PER_CLASS - 1}."
                )
            if not isinstance(item.get("color", ""), str):
                raise ValueError(f"{key}[{i}] has the color {item['color']!r}: expected a name.")
            if "position" in item and not _is_position(item["position"], i):
                raise ValueError(
                    f"{key}[{i}] has the position {item['position']}: expected one of {', '.join(_RELATIONS)} "
                    "and the index of an earlier item."
                )


def _is_position(position: Any, index: int) -> bool:
    if not isinstance(position, (list, tuple)) or len(position) != 2:
        return False
    relation, reference = position
    return relation in _RELATIONS and type(reference) is int and 0 <= reference < index
