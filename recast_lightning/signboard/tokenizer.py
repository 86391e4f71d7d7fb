"""The CLIP tokenizer of Signboard: whole words for the sentences, single letters for the quoted word."""

from __future__ import annotations

from transformers import CLIPTokenizer

from recast_lightning.signboard.world import COLORS, LETTERS, NUMBERS, SHAPES

MAX_TOKENS = 22
_WORDS = (
    *NUMBERS, *COLORS, *SHAPES, *(s + "s" for s in SHAPES),
    "sign", "with", "left", "right", "of", "and", "above", "below", "the", "text",
)  # fmt: skip


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _merges() -> list[tuple[str, str]]:
    """BPE merges that build each sentence word outwards from a letter that no sign uses.

    A merge therefore never applies inside a quoted word, whatever its letters.
    """
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        symbols = [*word[:-1], word[-1] + "</w>"]
        for pair in merges:
            symbols = _merge(symbols, pair)
        while len(symbols) > 1:
            core = next(i for i, s in enumerate(symbols) if set(s.removesuffix("</w>").upper()) - set(LETTERS))
            left = min(core, len(symbols) - 2)
            merges.append((symbols[left], symbols[left + 1]))
            symbols = _merge(symbols, merges[-1])
    return merges


def build_tokenizer() -> CLIPTokenizer:
    """A `CLIPTokenizer` of about 200 tokens and 22 positions."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
    merges = _merges()
    tokens = [*letters, *(c + "</w>" for c in letters), *(a + b for a, b in merges)]
    vocab = {
        token: i for i, token in enumerate(["<|unk|>", "<|startoftext|>", "<|endoftext|>", *dict.fromkeys(tokens)])
    }
    return CLIPTokenizer(vocab=vocab, merges=merges, unk_token="<|unk|>", model_max_length=MAX_TOKENS)
