"""The documentation's links lead somewhere, its tables match the code, and its example scores."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from recast_lightning.callbacks import (
    CollapseGuard,
    ImageWriter,
    RenyiProfilerCallback,
    RolloutCheckpoint,
    RunReport,
)
from recast_lightning.credit import Stage
from recast_lightning.objective import Advantages, NFTLoss, OldPolicySchedule
from recast_lightning.policy import Policy
from recast_lightning.prompts import Prompt
from recast_lightning.rollout import RolloutOptions, ScoringOptions
from recast_lightning.training import PromptDataModule, RecastModule
from recast_lightning.training.optimizer import OptimizerOptions

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.is_file()
]
CONFIGURATION = ROOT / "docs/configuration.md"
GROUPS = (NFTLoss, Advantages, RolloutOptions, ScoringOptions, OptimizerOptions, OldPolicySchedule)
TABLED = (RecastModule, *GROUPS, Policy, PromptDataModule, Stage, RenyiProfilerCallback, CollapseGuard, RunReport,
          RolloutCheckpoint, ImageWriter)  # fmt: skip
PROSE = 120  # characters a line, outside tables and code


def blocks(page: Path, language: str, holding: str) -> str:
    """The code block of a page that holds a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    (block,) = [block for block in found if holding in block]
    return block


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_there():
    assert {"design.md", "configuration.md", "rewards.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_of_prose_are_short(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    long = [line for line in text.splitlines() if len(line) > PROSE and not line.startswith(("|", "    ", "!["))]
    assert not long, f"{page.name}: {long[0]!r} has {len(long[0])} characters"


@pytest.mark.parametrize("cls", TABLED, ids=lambda c: c.__name__)
def test_every_option_is_in_its_table_with_its_default(cls):
    text = CONFIGURATION.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^###? [^\n]*`{cls.__name__}`.*?(?=^##|\Z)", text, re.M | re.S)
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.M))
    parameters = {name: p for name, p in inspect.signature(cls).parameters.items() if name != "self"}
    assert list(rows) == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty:
            assert rows[name] == "required", name
        elif isinstance(parameter.default, GROUPS):
            assert rows[name] == f"`{type(parameter.default).__name__}`"
        else:
            value = yaml.safe_load(rows[name].strip("`"))
            value = float(value) if isinstance(parameter.default, float) else value
            assert value == parameter.default, f"{name}: the page says {rows[name]}, the code {parameter.default!r}"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The page's own reward, saved as the page says."""
    (tmp_path / "my_rewards.py").write_text(blocks(CONFIGURATION, "python", "class JpegSize"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    yield importlib.import_module("my_rewards")
    sys.modules.pop("my_rewards", None)


def test_the_example_reward_scores(example):
    flat, noise = torch.full((3, 64, 64), 0.5), torch.rand(3, 64, 64)
    images = torch.stack([flat, noise, torch.full_like(flat, torch.nan)])
    reward = example.JpegSize()
    scores = reward(images, [Prompt("a sign")] * 3)
    low, high = reward.score_range
    assert low <= scores[1] < scores[0] <= high
    assert scores[2].isnan()
    assert reward.failed == 1
    assert example.JpegSize(quality=10)(images[1:2], [Prompt("a sign")]) > scores[1]
    with pytest.raises(ValueError, match="quality is 0"):
        example.JpegSize(quality=0)
