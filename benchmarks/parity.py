"""Rewards against the original packages, on small random checkpoints; prints the table of docs/rewards.md.

    PYTHONPATH=tests python benchmarks/parity.py ENVIRONMENT [--head FILE] [--golden] [--base PYTHON]

ENVIRONMENT is a folder for a virtual environment with the original packages (about 6 GB, for torch's libraries). It is
made if it is not there, with the interpreter PYTHON (3.10 or 3.11). FILE is LAION's published head of the aesthetic
predictor (sac+logos+ava1-l14-linearMSE.pth, in their repository); without it the head is random.

`--golden` prints the scores that tests/rewards/test_golden.py compares with.
"""

import argparse
import gzip
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from helpers import parity

from recast_lightning.prompts import Prompt

PACKAGES = [
    *("torch==2.14.1", "torchvision==0.29.1", "transformers==4.27.4", "safetensors==0.8.0", "setuptools<81"),
    *("clip-anytorch==2.6.0", "ftfy==6.3.1", "regex", "clint==0.5.1", "pandas", "einops", "requests"),
]
WITHOUT_DEPENDENCIES = ["hpsv2==1.2.0", "image-reward==1.5", "timm==0.6.13", "fairscale==0.4.13"]
SIZES = [
    *((side, side) for side in (64, 200, 224, 225, 256, 320, 512, 768, 1024)),
    *((480, 640), (640, 480), (300, 227), (227, 300), (512, 768), (768, 1024), (1024, 576), (231, 1000), (999, 333)),
]
MORE_PROMPTS = [
    "",
    "x",
    "two dogs, one of them asleep; 3 cats (black)",
    "It's the artist's best: rock'n'roll, I'll say, they've won, we'd go, you're in",
    "«Ça va?» — naïve café, ångström, ΟΔΟΣ, İstanbul",
    "a sign that says ‘OPEN’ and “closed” … 24/7",
    "donâ€™t, cafÃ© and â€œquotesâ€\x9d",
    "&lt;b&gt;bold&lt;/b&gt; &quot;quoted&quot; &amp;amp; more&nbsp;space",
    "ﬂuﬃest ﬁsh, №5, ½ cup, x²",
    "日本語の看板, 한국어 간판, вывеска",
    "emoji 😀🎨 and a flag 🇯🇵",
    "  leading, trailing   and \t inner\nspace  ",
    "e\u0301 against \u00e9, a\u200bb zero width, soft\u00adhyphen",
    "1234567890 3.14159 #hashtag @name a_b-c/d\\e",
    "ALL CAPITALS IN A NEON SIGN",
    "🂡 “” ’ ‘ — –",
    "masterpiece, best quality, 8k, highly detailed, cinematic light, trending on artstation, by greg rutkowski",
    " ".join(["a very long prompt about a red cat on the street"] * 12),
    "(word:1.3), [word], {word} <lora:x:0.8>",
    'text that reads "Hello, World!"',
    "a" * 300,
]


def environment(folder: Path, base: str) -> Path:
    """The interpreter of the environment with the original packages."""
    python = folder.absolute() / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([base, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", *PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "install", "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
        (folder / ".installed").touch()
    return python


def clip_merges(python: Path) -> list[tuple[str, str]]:
    """CLIP's merges, from the file that OpenAI's package carries."""
    code = "import importlib.util as u; print(u.find_spec('clip').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    text = gzip.decompress((Path(package) / "bpe_simple_vocab_16e6.txt.gz").read_bytes()).decode()
    return [tuple(line.split()) for line in text.split("\n")[1 : 49152 - 256 - 2 + 1]]


def ours(folder: Path, cases: list[tuple[int, str]], pictures: list, differentiable: bool) -> dict[str, torch.Tensor]:
    """Scores of all cases by our rewards."""
    rewards = parity.rewards(folder, differentiable)
    return {
        name: torch.cat([reward([pictures[i]], [Prompt(prompt)]) for i, prompt in cases])
        for name, reward in rewards.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--base", default=sys.executable)
    given = parser.parse_args()
    python = environment(given.environment, given.base)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.golden:
            sizes, cases = parity.PICTURES, list(enumerate(parity.PROMPTS))
            parity.save(folder)
        else:
            sizes, cases = SIZES, list(itertools.product(range(len(SIZES)), parity.PROMPTS + MORE_PROMPTS))
            parity.save(folder, clip_merges(python), 768, image=224, patch=28, head=given.head)
        pictures = [parity.picture(*size, seed) for seed, size in enumerate(sizes)]
        (folder / "pictures").mkdir()
        for i, picture in enumerate(pictures):
            picture.save(folder / "pictures" / f"{i:02}.png")
        (folder / "cases.json").write_text(json.dumps(cases))
        script = Path(__file__).with_name("parity_originals.py")
        done = subprocess.run([python, "-W", "ignore", script, folder], check=True, stdout=subprocess.PIPE, text=True)
        theirs = json.loads(done.stdout.splitlines()[-1])
        exact, tensors = (ours(folder, cases, pictures, differentiable) for differentiable in (False, True))

    print(f"{len(pictures)} pictures x {len(set(prompt for _, prompt in cases))} prompts, {len(cases)} cases")
    print("| reward | original | spread of scores | largest difference | with `differentiable: true` |")
    print("|---|---|---|---|---|")
    for name, found in theirs.items():
        expected = torch.tensor(found["scores"], dtype=torch.float64)
        differences = [(scores[name] - expected).abs().max() for scores in (exact, tensors)]
        print(
            f"| {name} | {found['package']} | {expected.std():.2g} |", " | ".join(f"{d:.1e}" for d in differences), "|"
        )
    if given.golden:
        print(json.dumps({name: [round(score, 7) for score in found["scores"]] for name, found in theirs.items()}))


if __name__ == "__main__":
    main()
