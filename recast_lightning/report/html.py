"""`write_report`: a run folder as one HTML file that needs nothing else, pictures and all."""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.report.changes import Change, changes, number, reward_names, value_of
from recast_lightning.report.figures import gain_curves, normalized_gains, reward_trajectories, weight_heatmap
from recast_lightning.report.record import RunRecord, StageRecord, read_run

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
        _paragraph(summary(record)),
        _changes_table(record),
        _trajectories(record),
        *map(_stage, record.stages),
        _pictures(record),
        _diagnostics(record),
        _config(record),
        _absent([*record.absent, *record.unmeasured]),
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


def summary(record: RunRecord) -> str:
    """The run in a paragraph: its length, and what rose and what fell."""
    names = record.stage_names
    text = f"{_count(record.num_rollouts, 'rollout')} in {_count(len(names), 'stage')}"
    text += f" ({', '.join(names)}). " if names else ". "
    if not record.evaluations:
        return text + "No evaluation was recorded, so nothing can be said about the rewards."
    first, last = record.evaluations[0], record.evaluations[-1]
    text += f"On {_count(last.get('count', 0), 'held-out prompt')}"
    moved = changes(record.evaluations)
    if not moved:
        values = (f"{name} {number(value_of(last, 'metrics', name))}" for name in reward_names([last]))
        return text + f", the only evaluation ({_after(last['rollout'])}) gave " + ", ".join(values) + "."
    text += f", from {_after(first['rollout'])} to {_after(last['rollout'])}: "
    text += "; ".join(
        f"{c.reward} {c.verb}, {number(c.base)} → {number(c.final)} ({number(c.delta, '+')})" for c in moved
    )
    return f"{text}. {_verdict(moved)}"


def _verdict(moved: Sequence[Change]) -> str:
    def tally(verb: str) -> str:
        found = [change for change in moved if change.verb == verb]
        clear = sum(change.clear for change in found)
        return f"{len(found)} {verb}" + (f" ({clear} by more than two standard errors)" if found else "")

    return f"Of {_count(len(moved), 'reward')}, {tally('rose')} and {tally('fell')}."


def _changes_table(record: RunRecord) -> str:
    moved = changes(record.evaluations)
    if not moved:
        return ""
    credits = {stage.name: _shares(stage.credit) for stage in record.stages if stage.credit}
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
    return _table(["reward", "first" if first["rollout"] else "base", "final", "change", *shares], rows) + _paragraph(
        text, "note"
    )


def _trajectories(record: RunRecord) -> str:
    if len(record.evaluations) < 2:
        return ""
    figure = reward_trajectories(record.evaluations, record.stage_starts)
    text = "Each on its own scale. Dotted lines mark where a stage starts, the thin horizontal one the base."
    return "<h2>Rewards over the run</h2>" + _inline(figure, "Reward trajectories") + _paragraph(text, "note")


def _stage(stage: StageRecord) -> str:
    profile, credit = stage.profile, stage.credit
    parts = [f"<h2>Stage {stage.number}: {escape(stage.name)}</h2>"]
    if credit is not None and credit.method == "static":
        parts.append(
            _paragraph("Static credit: every reward counts the same at all noise levels; nothing is measured.")
        )
    elif credit is not None:
        parts.append(_paragraph(_peaks(credit)))
    if profile is not None:
        parts += [
            "<h3>How well each reward tells good from bad, by noise level</h3>",
            _inline(gain_curves(profile), "Discriminability gains"),
            _paragraph(_measurement(profile), "note"),
            _mean_rewards(profile),
        ]
    if credit is not None and credit.method != "static":
        parts += [
            "<h3>Shape of the gains, after shrinkage</h3>",
            _inline(normalized_gains(credit), "Normalised gains"),
        ]
    if credit is not None:
        rows, columns = credit.residuals
        text = (
            f"Method {credit.method}, temperature {credit.temperature:g}. Numbers are T·W, what multiplies a reward at "
            "a level: a row's mean is the budget share, a column's sum stands below it. "
            f"Largest error of a budget: {rows:.1e}; of a level's total (1/T): {columns:.1e}."
        )
        heat_map = _inline(weight_heatmap(credit), "Weights by reward and noise level")
        parts += ["<h3>Weights</h3>", heat_map, _paragraph(text, "note")]
    if profile is None and credit is None:
        parts.append(_paragraph("Neither profile nor weights of this stage can be read.", "absent"))
    return "\n".join(parts)


def _peaks(credit: CreditMatrix) -> str:
    """In words: where the gain of each reward peaks."""
    sentences = []
    for name, row in zip(credit.rewards, credit.normalized, strict=True):
        if (row == 1).all():
            sentences.append(f"{name} is flattened: its gain is indistinguishable from flat.")
            continue
        t = int(row.argmax()) + 1
        sigma = "" if credit.sigmas is None else f", σ = {float(credit.sigmas[t]):.2f}"
        sentences.append(
            f"{name} gains most at level {t} of {len(row)} (t = {t}{sigma}), {row[t - 1]:.1f} times its mean."
        )
    return " ".join(sentences)


def _measurement(profile: Profile) -> str:
    """In words: how the profile was measured."""
    failed = [f"{name} {count}" for name, count in profile.failed.items() if count]
    return (
        f"Left is clean (t = 1), right is pure noise (t = {len(profile.sigmas) - 1}). "
        f"{_count(profile.num_proposals, 'proposal')} with {_count(profile.rollouts, 'rollout')} each and level, "
        f"{profile.network_calls} network calls; Rényi order {profile.order:g}, posterior {profile.posterior}. "
        f"Proposals left out for a failed score: {', '.join(failed) or 'none'}."
    )


def _mean_rewards(profile: Profile) -> str:
    rows = [
        [name, number(float(means[0])), number(float(means[-1]))]
        for name, means in zip(profile.rewards, profile.mean_rewards, strict=True)
    ]
    last = len(profile.sigmas) - 1
    heading = ["mean reward", "of the proposals (t = 0)", f"from pure noise (t = {last}): the policy's own"]
    return _table(heading, rows)


def _pictures(record: RunRecord) -> str:
    folders = list(record.images.items())
    if not folders or not record.prompts:
        return ""
    shown = folders[:1] + folders[1:][-1:]
    pairs = []
    for index, prompt in enumerate(record.prompts[:_MAX_PROMPTS]):
        pictures = "".join(
            f"<span>{_picture(folder / f'{index:03d}.png')}{_after(rollout)}</span>" for rollout, folder in shown
        )
        pairs.append(f'<figure class="pair"><div>{pictures}</div><figcaption>{escape(prompt)}</figcaption></figure>')
    alone = "" if len(shown) == 2 else _paragraph("Pictures were kept only once, so there is no after.", "absent")
    return f'<h2>Before and after</h2>{alone}<div class="grid">{"".join(pairs)}</div>'


def _picture(path: Path) -> str:
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, SyntaxError):  # missing, or cut off in the middle of a write
        return '<em class="absent">no picture</em>'
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return _image(buffer, "", "small" if picture.width < 128 else "")


def _diagnostics(record: RunRecord) -> str:
    if not record.rollouts:
        return ""
    first, last = record.rollouts[0]["metrics"], record.rollouts[-1]["metrics"]
    rows = [[name, _loose(first.get(name)), _loose(last[name])] for name in sorted(last)]
    heading = ["metric", f"rollout {record.rollouts[0]['rollout']}", f"rollout {record.rollouts[-1]['rollout']}"]
    return f"<h2>Details</h2><details><summary>Training diagnostics</summary>{_table(heading, rows)}</details>"


def _config(record: RunRecord) -> str:
    if not record.config:
        return ""
    return f"<details><summary>config.yaml</summary><pre>{escape(record.config)}</pre></details>"


def _absent(absent: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in absent)
    return f'<h2>Not in this report</h2><ul class="absent">{items}</ul>' if items else ""


def _inline(figure: Figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170)
    return _image(buffer, alt, "figure")


def _image(png: io.BytesIO, alt: str, css: str) -> str:
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img class="{css}" alt="{alt}" src="data:image/png;base64,{data}">'


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in heading)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _paragraph(text: str, css: str = "") -> str:
    return f'<p class="{css}">{escape(text)}</p>' if css else f"<p>{escape(text)}</p>"


def _shares(credit: CreditMatrix) -> dict[str, float]:
    return dict(zip(credit.rewards, credit.weights.sum(1).tolist(), strict=True))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _after(rollouts: int) -> str:
    return "base policy" if rollouts == 0 else f"after {_count(rollouts, 'rollout')}"


def _loose(value: Any) -> str:
    """Any logged value."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else "–" if value is None else str(value)
