"""How far noise in a profile bends the credit matrix W, for three ways to shrink noisy gains; in simulation.

    python benchmarks/shrinkage.py [--repeats 24] [--prompts 0.7] [--levels 0.3] [--correlation 0.8]

Rewards m[n, t] of n prompts have the mean exp(D_t) for a known curve D, times a factor of each prompt, common to all
levels, and one of each level, an AR(1) process over levels; both are log-normal. Gains and their covariance (delta
method) are estimated from them, W from four rewards of equal budgets. Printed is the total variation distance to the W
of the true curves, 0.5 sum |W - W*|, in percent; then the same for each kind of row, as a share of its budget, and how
often a row is exactly flat. The rules:

    none    gains made monotone, over their mean: `shrinkage: none`, the paper
    stein   positive-part James-Stein on monotone gains, 1 - mean se^2 / var: what this package did first
    auto    `shrunk_gains`
"""

import argparse
from collections import defaultdict

import torch
from torch import Tensor

from recast_lightning.credit import (
    monotone_gains,
    normalized_gains,
    renyi_divergence,
    shrunk_gains,
    sinkhorn_projection,
)

MIXTURES = [
    ("peaked", "weak", "flat", "dead"),
    ("early", "late", "flat", "weak"),
    ("sharp", "ramp", "flat", "dead"),
    ("spike", "early", "flat", "weak"),
]
SAMPLES = (16, 64, 256, 1024)
LEVELS = (10, 25)


def true_gains(kind: str, num_levels: int) -> Tensor:
    """Gains dD of a kind of reward, [T]; totals in nats."""
    t = (torch.arange(num_levels, dtype=torch.float64) + 0.5) / num_levels

    def bump(centre: float, width: float) -> Tensor:
        return (-0.5 * ((t - centre) / width).square()).exp()

    def box(width: float) -> Tensor:
        return ((t > 0.3) & (t < 0.3 + width)).double()

    shape, total = {
        "dead": (torch.zeros_like(t), 0.0),
        "flat": (torch.ones_like(t), 0.5),
        "peaked": (bump(0.5, 0.15), 0.7),
        "early": (bump(0.25, 0.15), 0.7),
        "late": (bump(0.75, 0.15), 0.7),
        "sharp": (box(0.2), 1.0),
        "spike": (box(0.1) + 0.25 * box(0.1).mean(), 0.8),  # a level or two hold 0.64 nats of it
        "ramp": (t, 0.3),
        "weak": (0.5 + bump(0.4, 0.2), 0.02),
    }[kind]
    return total * shape / shape.sum().clamp(min=1e-12)


def measured(gains: Tensor, num_samples: int, options: argparse.Namespace, generator: torch.Generator) -> list[Tensor]:
    """Gains [R, T] and covariance [R, T, T] as measured on ``num_samples`` prompts."""
    num_rewards, num_levels = gains.shape
    curve = torch.nn.functional.pad(gains.flip(1).cumsum(1).flip(1), (0, 1)).unsqueeze(1)
    prompt = torch.randn(num_rewards, num_samples, 1, dtype=torch.float64, generator=generator)
    level = torch.randn(num_rewards, num_samples, num_levels + 1, dtype=torch.float64, generator=generator)
    for k in range(1, num_levels + 1):
        new = (1 - options.correlation**2) ** 0.5 * level[..., k]
        level[..., k] = options.correlation * level[..., k - 1] + new
    log_m = curve.repeat(1, num_samples, 1)
    for normal, variation in ((prompt, options.prompts), (level, options.levels)):
        variance = torch.tensor(1 + variation**2).double().log()
        log_m += variance.sqrt() * normal - variance / 2
    m = log_m.exp()
    influence = -(m / m.mean(1, keepdim=True)).diff(dim=2)  # its mean is 0
    covariance = influence.mT @ influence / (num_samples * (num_samples - 1))
    return [-renyi_divergence(m.mT, 2.0).diff(dim=1), covariance]


def none(gains: Tensor, covariance: Tensor) -> Tensor:
    return normalized_gains(monotone_gains(gains))


def stein(gains: Tensor, covariance: Tensor) -> Tensor:
    gains = monotone_gains(gains)
    noise = covariance.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    keep = (1 - noise / gains.var(1, correction=0, keepdim=True)).nan_to_num(0.0).clamp(min=0)
    return torch.where(keep > 0, 1 + keep * (normalized_gains(gains) - 1), 1.0)


RULES = {"none": none, "stein": stein, "auto": shrunk_gains}


def credit(normalized: Tensor) -> Tensor:
    """W of equal budgets, [R, T]."""
    num_rewards, num_levels = normalized.shape
    rows, columns = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (num_rewards, num_levels))
    return sinkhorn_projection(normalized, rows, columns, tolerance=1e-4)


def table(title: str, rows: dict[str, dict[tuple[int, str], list[float]]], rules: list[str]) -> None:
    """Prints means in percent; the last group of columns is the mean over sample sizes."""
    print(f"\n{title:31}" + "".join(f"{f'n = {n}':^{7 * len(rules)}}" for n in (*SAMPLES, "all")))
    print(" " * 31 + "".join(f"{rule:>7}" for _ in range(len(SAMPLES) + 1) for rule in rules))
    for name, cells in rows.items():
        means = {key: 100 * sum(values) / len(values) for key, values in cells.items()}
        overall = [sum(means[n, rule] for n in SAMPLES) / len(SAMPLES) for rule in rules]
        line = [means[n, rule] for n in SAMPLES for rule in rules] + overall
        print(f"{name:31}" + "".join(f"{cell:7.1f}" for cell in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--prompts", type=float, default=0.7, help="coefficient of variation between prompts")
    parser.add_argument("--levels", type=float, default=0.3, help="the same between levels of a prompt")
    parser.add_argument("--correlation", type=float, default=0.8, help="between neighbouring levels")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    overall, kinds, flat = (defaultdict(lambda: defaultdict(list)) for _ in range(3))
    for num_levels in LEVELS:
        for mixture in MIXTURES:
            gains = torch.stack([true_gains(kind, num_levels) for kind in mixture])
            flat_kinds = torch.tensor([kind in ("flat", "dead") for kind in mixture])
            truth = normalized_gains(gains)
            truth[flat_kinds] = 1.0  # without rounding errors
            ideal = credit(truth)
            for n in SAMPLES * options.repeats:
                noisy = measured(gains, n, options, generator)
                for rule, shrink in RULES.items():
                    normalized = shrink(*noisy)
                    errors = 0.5 * (credit(normalized) - ideal).abs().sum(1)
                    for name in (f"T = {num_levels}, {' '.join(mixture)}", "mean"):
                        overall[name][n, rule].append(float(errors.sum()))
                    for kind, error, row in zip(mixture, errors, normalized, strict=True):
                        kinds[f"T = {num_levels}, {kind}"][n, rule].append(float(error) * len(mixture))
                        flat[f"T = {num_levels}, {kind}"][n, rule].append(float((row == 1).all()))
    overall["mean"] = overall.pop("mean")  # last
    table("distance of W from truth, %", overall, list(RULES))
    table("distance of a row, %", kinds, list(RULES))
    table("rows that come out flat, %", flat, ["stein", "auto"])


if __name__ == "__main__":
    main()
