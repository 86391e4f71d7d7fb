"""The section of a stage in the report: what was measured, the W that came of it, and what the stage changed."""

import math
from collections.abc import Sequence
from html import escape

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.report.changes import number
from recast_lightning.report.credit_figures import demand, gain_curves, normalized_gains, weight_heatmap
from recast_lightning.report.figures import divergence_change
from recast_lightning.report.markup import counted, inline, paragraph, table
from recast_lightning.report.record import StageRecord


def stage_section(stage: StageRecord) -> str:
    """The section of one stage, as HTML."""
    parts = [f"<h2>Stage {stage.number}: {escape(stage.name)}</h2>"]
    if stage.credit is not None and stage.credit.method == "static":
        text = "Static credit: every reward counts the same at all noise levels; nothing is measured for it."
        parts.append(paragraph(text))
    elif stage.credit is not None:
        parts.append(paragraph(_peak_sentences(stage.credit)))
    if stage.profile is None and stage.credit is None:
        parts.append(paragraph("Neither profile nor weights of this stage can be read.", "absent"))
    parts += _profile_section(stage.profile, stage.credit)
    parts += _credit_section(stage.profile, stage.credit)
    for rollouts, (profile, credit) in stage.refreshes.items():
        parts += _refresh_section(rollouts, profile, credit)
    parts += _left_to_learn(stage)
    return "\n".join(part for part in parts if part)


def _peak_sentences(credit: CreditMatrix) -> str:
    """Says where the gain of each reward peaks."""
    sentences = []
    for name, row in zip(credit.rewards, credit.normalized, strict=True):
        if (row == 1).all():
            sentences.append(f"{name} has a flat row.")
            continue
        t = int(row.argmax()) + 1
        sigma = "" if credit.sigmas is None else f", σ = {float(credit.sigmas[t]):.2f}"
        sentences.append(
            f"{name} gains most at level {t} of {len(row)} (t = {t}{sigma}), {row[t - 1]:.1f} times its mean."
        )
    return " ".join(sentences)


def _profile_section(profile: Profile | None, credit: CreditMatrix | None) -> list[str]:
    """Gains by noise level and how they were measured; nothing without a profile."""
    if profile is None:
        return []
    return [
        "<h3>How well each reward tells good from bad, by noise level</h3>",
        inline(gain_curves(profile), "Discriminability gains"),
        paragraph(f"{_measurement_sentence(profile)} {_flat_sentence(profile, credit)}", "note"),
        _proposals_table(profile),
    ]


def _measurement_sentence(profile: Profile) -> str:
    """Says how the profile was measured."""
    last, levels = len(profile.sigmas) - 1, profile.levels
    every = len(levels) == last
    where = f"all {last} levels" if every else f"levels {_listed(levels)} of {last} (the others are interpolated)"
    same = len(set(profile.rollouts)) == 1
    completions = counted(profile.rollouts[0], "completion") if same else f"{_listed(profile.rollouts)} completions"
    steps = {"auto": "as many steps as the sampler's grid pays for", "grid": "the sampler's own steps"}.get(
        str(profile.steps), f"{profile.steps} steps from pure noise"
    )
    return (
        f"Measured on {counted(profile.num_prompts, 'prompt')}, {counted(profile.num_proposals, 'proposal')}: "
        f"{completions} each from {where}, in {steps}, {profile.network_calls} network calls in all; "
        f"posterior {profile.posterior}, Rényi order {profile.order:g}."
    )


def _flat_sentence(profile: Profile, credit: CreditMatrix | None) -> str:
    """Says which rewards have gains that cannot be told from flat, and how W treats these rewards."""
    flat = profile.flat
    if not flat:
        return "The gains of every reward can be told from flat."
    text = f"Cannot be told from flat: {', '.join(flat)}"
    if credit is None or credit.method == "static":
        return text + "."
    room = " where the other rewards leave room" if credit.method == "recast" else ""
    rows = dict(zip(credit.rewards, (credit.normalized == 1).all(1).tolist(), strict=True))
    even = [name for name in flat if rows.get(name)]
    kept = [name for name in flat if rows.get(name) is False]
    if even:
        text += f" (weighted as static{room}{'' if even == flat else ': ' + ', '.join(even)})"
    return text + (f". Taken as measured all the same: {', '.join(kept)}." if kept else ".")


def _proposals_table(profile: Profile) -> str:
    """Mean rewards of proposals and policy, failed scores and effective samples; one row a reward."""
    weighted = bool(profile.effective_samples)
    heading = ["mean reward", "of the proposals" + (", weighted" if weighted else ""), "of the policy", "failed scores"]
    if weighted:
        heading.append(f"effective samples a prompt (of {profile.num_proposals / profile.num_prompts:.3g})")
    rows = []
    for name, (good, own) in profile.proposal_quality.items():
        cells = [name, number(good), number(own), str(profile.failed.get(name, 0))]
        rows.append(cells + ([number(profile.effective_samples.get(name, math.nan))] if weighted else []))
    poor = [name for name, (good, own) in profile.proposal_quality.items() if good <= own]
    text = f"The proposals are no better than the policy's own pictures for {', '.join(poor)}." if poor else ""
    return table(heading, rows) + (paragraph(text, "note") if text else "")


def _credit_section(profile: Profile | None, credit: CreditMatrix | None) -> list[str]:
    """Shape of the gains, demand on each level, and W; nothing without a W."""
    if credit is None:
        return []
    parts = []
    if credit.method != "static":
        parts += [
            "<h3>Shape of the gains, after shrinkage</h3>",
            inline(normalized_gains(credit), "Normalised gains"),
        ]
    if profile is not None and set(credit.rewards) <= set(profile.rewards):
        parts += [
            "<h3>Demand on each level</h3>",
            inline(demand(profile, credit), "Aggregate demand"),
            paragraph("Level 1, in grey, also holds the gap between generator and policy.", "note"),
        ]
    return [*parts, "<h3>Weights</h3>", _weights_figure(credit)]


def _weights_figure(credit: CreditMatrix, *, explained: bool = True) -> str:
    """W as a picture with the errors of its margins; ``explained`` adds how to read it, which once a stage is enough."""
    rows, columns = credit.residuals
    text = ""
    if explained:
        text = (
            "Numbers are T·W, what multiplies a reward at a level, bold above static: a row's mean is the budget share, "
            "a column's sum stands below it; ± is a standard error. "
        )
    text += (
        f"Method {credit.method}, temperature {credit.temperature:g}. Largest error of a budget: {rows:.1e}; of a level's "
        f"total (1/T): {columns:.1e}; {counted(credit.iterations, 'iteration')}."
    )
    return inline(weight_heatmap(credit), "Weights by reward and noise level") + paragraph(text, "note")


def _left_to_learn(stage: StageRecord) -> list[str]:
    """D_0 - D_T of each reward before and after the stage; nothing if neither was measured."""
    before, after = stage.profile, stage.after
    if before is None and after is None:
        return []
    parts = ["<h3>What the stage left to learn</h3>"]
    if before is not None and after is not None and set(before.rewards) & set(after.rewards):
        parts.append(inline(divergence_change(before, after), "D before and after"))
    names = list(dict.fromkeys([*(before.rewards if before else []), *(after.rewards if after else [])]))
    rows = [[name, _total_cell(before, name), _total_cell(after, name)] for name in names]
    text = "D₀ − D at pure noise, in nats ± 1 s.e.: how far the policy is from what the reward asks for."
    return [*parts, table(["D₀ − D_T (nats)", "before", "after"], rows), paragraph(text, "note")]


def _total_cell(profile: Profile | None, name: str) -> str:
    """D_0 - D_T of a reward in nats, with its standard error if that is known."""
    if profile is None or name not in profile.rewards:
        return "not measured"
    value, error = (float(part[profile.rewards.index(name)]) for part in profile.totals)
    return f"{number(value)} ± {number(error)}" if math.isfinite(error) else number(value)


def _refresh_section(rollouts: int, profile: Profile | None, credit: CreditMatrix | None) -> list[str]:
    """What was measured anew within the stage, after so many rollouts of the run, and the W made of it."""
    parts = [f"<h3>Measured again before rollout {rollouts + 1}</h3>"]
    if profile is not None:
        totals = "; ".join(f"{name} {_total_cell(profile, name)}" for name in profile.rewards)
        parts.append(paragraph(f"D₀ − D_T in nats: {totals}. {_flat_sentence(profile, credit)}", "note"))
    if credit is None:
        return [*parts, paragraph("Its weights are missing.", "absent")]
    return [*parts, _weights_figure(credit, explained=False)]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
