"""UnifiedReward: a vision-language model that grades pictures in words, on an OpenAI-compatible server."""

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards.base import check_choice
from recast_lightning.rewards.preprocessing import Picture
from recast_lightning.rewards.remote.client import check_url, excerpt
from recast_lightning.rewards.remote.reward import RemoteReward, Verdict, failed, png_base64

ReplyFormat = Literal["three_scores", "final_score"]
_LABELS: dict[ReplyFormat, tuple[str, ...]] = {
    "three_scores": ("Alignment Score", "Coherence Score", "Style Score"),
    "final_score": ("Final Score",),
}
_TEMPLATES: dict[ReplyFormat, str] = {
    "three_scores": (
        "This picture was generated from the following text.\nText: {prompt}\n\n"
        "Grade it on three scales from 1 (worst) to 5 (best), with two decimals: how well it matches the text; how "
        "plausible and free of defects it is; how good it looks. Reply with exactly three lines:\n"
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
    ),
    "final_score": (
        "This picture was generated from the following text.\nText: {prompt}\n\n"
        "Judge how well it matches the text and how good it is as a picture, and end your reply with a line of the "
        "form\nFinal Score: X\nwhere X is a number from 1 (worst) to 5 (best)."
    ),
}
# Neither a part of a longer number or word ("10", "4,5", "1e1", "4%"), nor the start of a range that the model repeats
# ("1-5"), nor on another scale ("4/10").
_NUMBER = r"(\d+(?:\.\d+)?)(?![\w%])(?![.,]\d)(?![ \t]*[-–][ \t]*\d)(?!\s*(?:/|out of)(?!\s*5\b))"


class UnifiedReward(RemoteReward):
    """Grades of UnifiedReward-2 (Wang et al. 2025), in [1, 5], from a server that speaks OpenAI's chat protocol.

    Each picture is one request at temperature 0. Refusals, replies that broke off, and replies without the expected grades
    score NaN.

    The default template is our own short wording in the published *format*. The models were trained on a published
    wording, so scores under ours are not comparable with published ones: save that wording in a file and name the file
    as `template`. It is sent as it stands, so a line ``<image>``, which servers of LLaVA models want, belongs in it.

    Args:
        base_url: The server's address up to the version, for example ``http://127.0.0.1:8080/v1``.
        model: The name under which the server knows the model. Sizes differ in their grades.
        reply: ``three_scores`` averages alignment, coherence and style, the format of version 2.0. ``final_score``
            takes the one number of the older format, which DiffusionNFT uses.
        template: A UTF-8 text file with ``{prompt}`` where the prompt belongs. None: our own.
        api_key_env: The name of the environment variable that holds the server's key, if it wants one. The key itself
            is never stored or logged.
        enable_thinking: Passed to the chat template of models that can think first; these need False. None: not sent.
        max_tokens: The longest reply.
        timeout: Seconds that the server may stay silent, and that the body of its reply may take in all.
        retries: How often a request is repeated after a connection error, a time-out, 429 or 5xx.
        backoff: Seconds before the first repetition, doubled for each further one.
        concurrency: Requests at once.
    """

    name = "unified_reward"
    score_range = (1.0, 5.0)
    licence = "MIT"

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        reply: ReplyFormat = "three_scores",
        template: str | None = None,
        api_key_env: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int = 1024,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 0.5,
        concurrency: int = 8,
    ) -> None:
        super().__init__(timeout=timeout, retries=retries, backoff=backoff, batch_size=1, concurrency=concurrency)
        if not model:
            raise ValueError("model is empty: give the name under which the server knows the model.")
        check_choice("reply", reply, get_args(ReplyFormat))
        check_ranges({"max_tokens": max_tokens}, {"max_tokens": "[1, inf)"})
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.reply = reply
        self.template = template
        self.api_key_env = api_key_env
        self.enable_thinking = enable_thinking
        self.max_tokens = max_tokens
        # A fact of the class elsewhere, but here it is a choice.
        self.version = f"{model}, {reply}, {template or 'our own template'}"

    def validate(self) -> None:
        """Check address, template and key, without touching the network.

        Raises:
            ValueError: If one is missing or malformed.
        """
        check_url(self.base_url, "base_url of unified_reward")
        if "?" in self.base_url:
            raise ValueError(
                f"The base_url of unified_reward is {self.base_url!r}: expected an address without a query."
            )
        self._read_template()
        self._key()

    def check(self) -> None:
        """Ask the server whether it has the model.

        Raises:
            ValueError: If it cannot be reached or has not.
        """
        self.validate()
        address = f"{self.base_url}/models"
        listed = self._get(address, self._key())
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [entry.get("id") for entry in entries or [] if isinstance(entry, dict)]
        if self.model not in names:
            known = excerpt(", ".join(map(str, names))) or "none"
            raise ValueError(f"unified_reward: {address} has no model {self.model!r}; it lists {known}.")

    def _load(self) -> str:
        return self._read_template()

    def _read_template(self) -> str:
        if self.template is None:
            return _TEMPLATES[self.reply]
        try:
            text = Path(self.template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"The template {self.template} cannot be read as UTF-8 text: {error}.") from error
        if "{prompt}" not in text:
            raise ValueError(f"The template {self.template} has no {{prompt}}: mark where the prompt belongs.")
        return text

    def _key(self) -> str:
        if self.api_key_env is None:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"The environment variable {self.api_key_env} holds no key: set it to the server's key.")
        return key

    def _ask(self, pictures: Sequence[Picture], prompts: Sequence[Prompt], stop: threading.Event) -> Sequence[Verdict]:
        (picture,), (prompt,) = pictures, prompts
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_base64(picture)}"}},
            {"type": "text", "text": self.load().replace("{prompt}", prompt.text)},
        ]
        payload: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        if self.enable_thinking is not None:
            payload["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        reply = self.client.ask(f"{self.base_url}/chat/completions", payload, key=self._key(), stop=stop)
        return [self._read(reply)]

    def _read(self, reply: Any) -> Verdict:
        """The verdict in a chat completion."""
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content"), message.get("refusal")
        except (AttributeError, IndexError, KeyError, TypeError):
            return failed("the reply is no chat completion")
        if refusal or finish == "content_filter":
            return failed("the model refused")
        if error := choice.get("error"):
            return failed(f"the server gave an error: {excerpt(str(error))}")
        if finish == "length":  # a thought without an end, or a number: "4" of "4.5"
            return failed(f"the reply broke off at {self.max_tokens} tokens")
        if not isinstance(text, str):
            return failed("the reply holds no text")
        score = parse_scores(text, self.reply)
        if score is not None:
            return Verdict(score)
        return failed(f"the reply lacks a grade of 1 to 5 ({', '.join(_LABELS[self.reply])})")


def parse_scores(text: str, reply: ReplyFormat) -> float | None:
    """The mean of the grades in a model's reply; of each, the first mention with a number counts.

    What a model thought before ``</think>`` is skipped, and so are asterisks of Markdown.

    Returns:
        A number in [1, 5]; None if a grade is missing or outside, or the thought has no end.

    Examples:
        >>> parse_scores("Matches well. Final Score: 4.5", "final_score")
        4.5
        >>> parse_scores("Final Score: 10", "final_score") is None
        True
    """
    text = re.split("</think>", text, flags=re.IGNORECASE)[-1].replace("*", "")
    if re.search("<think>", text, re.IGNORECASE):
        return None
    grades = []
    for label in _LABELS[reply]:
        match = re.search(rf"{label}\s*(?:\([^)\n]*\))?\s*:\s*{_NUMBER}", text, re.IGNORECASE)
        if match is None or not 1 <= float(match.group(1)) <= 5:
            return None
        grades.append(float(match.group(1)))
    return fmean(grades)
