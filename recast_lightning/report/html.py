"""Writes a run folder as one HTML file that holds everything it shows, pictures too; every section is a function here."""

import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from recast_lightning.credit import CreditMatrix
from recast_lightning.report.changes import Change, changes, number, reward_names, value_of
from recast_lightning.report.figures import reward_trajectories
from recast_lightning.report.markup import counted, img, inline, moment, paragraph, table
from recast_lightning.report.record import RunRecord, read_run
from recast_lightning.report.stage import stage_section

_MAX_PROMPTS = 16
_THUMBNAIL = 256  # pixels; larger pictures are made this small
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 860px; margin: 0 auto;
  padding: 1rem 1.2rem 4rem; }
h1 { font-size: 1.6rem; margin-bottom: .4rem } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem;
  border-top: 1px solid #ddd; padding-top: 1rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; vertical-align: top }
th:first-child, td:first-child { text-align: left } th { font-weight: 600 }
.note { color: #555; font-size: .88rem } .absent { color: #7a4b00; font-size: .9rem }
.scroll { overflow-x: auto } .figure { display: block; width: 100%; height: auto; margin: .4rem 0 }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(276px, 1fr)); gap: 1rem }
.pair { margin: 0 } .pair div { display: flex; gap: 8px } .pair figcaption { font-size: .82rem; line-height: 1.3 }
.pair span { width: 128px; font-size: .72rem; color: #555 } .pair img { width: 128px; display: block }
.small { image-rendering: pixelated }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem } summary { cursor: pointer }
"""


def write_report(run: str | Path) -> Path:
    """Writes ``run``/report.html from what the folder holds; it can be rebuilt at any time.

    Args:
        run: Folder of a `recast fit`, finished or not.

    Returns:
        Path of the file.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    run = Path(run)
    record = read_run(run)
    parts = [
        f"<h1>ReCAST run {escape(record.name)}</h1>",
        paragraph(summary_text(record)),
        _changes_table(record),
        _trajectories_section(record),
        *map(stage_section, record.stages),
        _pictures_section(record),
        _diagnostics_section(record),
        _config_section(record),
        _absent_section([*record.absent, *record.unmeasured]),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(record.name)}: ReCAST report</title><style>{_CSS}</style></head>\n<body>\n"
    )
    path = run / "report.html"
    path.write_text(page + "\n".join(part for part in parts if part) + "\n</body></html>\n", encoding="utf-8")
    return path


def summary_text(record: RunRecord) -> str:
    """The run in a paragraph: how long it was, which rewards rose and which fell."""
    names = record.stage_names
    text = f"{counted(record.num_rollouts, 'rollout')} in {counted(len(names), 'stage')}"
    text += f" ({', '.join(names)}). " if names else ". "
    if not record.evaluations:
        return text + "No evaluation was recorded, so nothing can be said about the rewards."
    first, last = record.evaluations[0], record.evaluations[-1]
    text += f"On {counted(last.get('count', 0), 'held-out prompt')}"
    moved = changes(record.evaluations)
    if not moved:
        values = (f"{name} {number(value_of(last, 'metrics', name))}" for name in reward_names([last]))
        return text + f", the only evaluation ({moment(last['rollout'])}) gave " + ", ".join(values) + "."
    text += f", from {moment(first['rollout'])} to {moment(last['rollout'])}: "
    text += "; ".join(
        f"{c.reward} {c.verb}, {number(c.base)} → {number(c.final)} ({number(c.delta, '+')})" for c in moved
    )
    return f"{text}. {_tally_sentence(moved)}"


def _tally_sentence(moved: Sequence[Change]) -> str:
    """How many rewards rose and fell, and how many of these clearly."""

    def tally(verb: str) -> str:
        found = [change for change in moved if change.verb == verb]
        clear = sum(change.clear for change in found)
        return f"{len(found)} {verb}" + (f" ({clear} by more than two standard errors)" if found else "")

    return f"Of {counted(len(moved), 'reward')}, {tally('rose')} and {tally('fell')}."


def _changes_table(record: RunRecord) -> str:
    """Every reward before and after, with its weight in each stage; empty without two evaluations."""
    moved = changes(record.evaluations)
    if not moved:
        return ""
    credits = {stage.name: _budget_shares(stage.credit) for stage in record.stages if stage.credit}
    shares = [f"weight in {name}" for name in credits]
    rows = [
        [c.reward, number(c.base), number(c.final), f"{number(c.delta, '+')} ± {number(c.stderr)}"]
        + [number(share.get(c.reward, 0.0)) for share in credits.values()]
        for c in moved
    ]
    text = (
        "± is the standard error of the change over prompts, each compared with itself where scores were kept. "
        "Weights are budget shares."
    )
    first, last = record.evaluations[0], record.evaluations[-1]
    for label, evaluation in (("base", first), ("final", last)):
        failed = [f"{name} {count}" for name, count in evaluation.get("failed", {}).items() if count]
        if failed:
            text += f" Prompts without a score in {label}: {', '.join(failed)}."
    if first.get("count") != last.get("count"):
        text += f" The base was evaluated on {first.get('count')} prompts, the final policy on {last.get('count')}."
    return table(["reward", "first" if first["rollout"] else "base", "final", "change", *shares], rows) + paragraph(
        text, "note"
    )


def _trajectories_section(record: RunRecord) -> str:
    """Every reward over the run; empty without two evaluations."""
    if len(record.evaluations) < 2:
        return ""
    figure = reward_trajectories(record.evaluations, record.stage_starts)
    text = "Each on its own scale. Dotted lines mark where a stage starts, the thin horizontal one the base."
    return "<h2>Rewards over the run</h2>" + inline(figure, "Reward trajectories") + paragraph(text, "note")


def _pictures_section(record: RunRecord) -> str:
    """The first and the last picture of each prompt side by side; empty if none was kept."""
    folders = list(record.images.items())
    if not folders or not record.prompts:
        return ""
    shown = folders[:1] + folders[1:][-1:]
    pairs = []
    for index, prompt in enumerate(record.prompts[:_MAX_PROMPTS]):
        pictures = "".join(
            f"<span>{_picture(folder / f'{index:03d}.png')}{moment(rollout)}</span>" for rollout, folder in shown
        )
        pairs.append(f'<figure class="pair"><div>{pictures}</div><figcaption>{escape(prompt)}</figcaption></figure>')
    alone = "" if len(shown) == 2 else paragraph("Pictures were kept only once, so there is no after.", "absent")
    return f'<h2>Before and after</h2>{alone}<div class="grid">{"".join(pairs)}</div>'


def _picture(path: Path) -> str:
    """A picture of at most `_THUMBNAIL` pixels, or a word that there is none."""
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError):  # missing, or cut off in the middle of a write
        return '<em class="absent">no picture</em>'
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return img(buffer, "", "small" if picture.width < 128 else "")


def _diagnostics_section(record: RunRecord) -> str:
    """All logged values of the first and the last rollout, folded."""
    if not record.rollouts:
        return ""
    first, last = record.rollouts[0]["metrics"], record.rollouts[-1]["metrics"]
    rows = [[name, _logged(first.get(name)), _logged(last[name])] for name in sorted(last)]
    heading = ["metric", f"rollout {record.rollouts[0]['rollout']}", f"rollout {record.rollouts[-1]['rollout']}"]
    return f"<h2>Details</h2><details><summary>Training diagnostics</summary>{table(heading, rows)}</details>"


def _config_section(record: RunRecord) -> str:
    """The configuration, folded."""
    if not record.config:
        return ""
    return f"<details><summary>config.yaml</summary><pre>{escape(record.config)}</pre></details>"


def _absent_section(absent: Iterable[str]) -> str:
    """What is missing or damaged, a sentence each; empty if nothing is."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in absent)
    return f'<h2>Not in this report</h2><ul class="absent">{items}</ul>' if items else ""


def _budget_shares(credit: CreditMatrix) -> dict[str, float]:
    """Each reward's share of the budget: the row sums of W."""
    return dict(zip(credit.rewards, credit.weights.sum(1).tolist(), strict=True))


def _logged(value: Any) -> str:
    """A logged value of any kind, to read."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else "–" if value is None else str(value)
