"""Bias and noise of a profile where the truth is known: posterior samplers, nested orders, placements of the steps.

OMP_NUM_THREADS=1 PYTHONPATH=tests python benchmarks/posterior.py

A pair "a/b" is the largest error of D over the levels / of a gain, in nats. Gaussian columns are exact: they are computed
without sampling. Those of mixtures are sampled: "+-" is the largest standard error of D.
"""

import math
import time
from dataclasses import replace

import torch
from helpers.closed_forms import (
    F64,
    Membership,
    affine_divergence,
    affine_posterior,
    bump,
    exact_divergence,
    gaussian,
    grid,
    mixture,
    sobol,
    solved_divergence,
    worst,
)

from recast_lightning.credit import estimate_profile
from recast_lightning.credit.curves import bootstrap_weights, estimate_curve
from recast_lightning.credit.plan import make_plan
from recast_lightning.flow.posterior import Step, posterior_grid, posterior_steps

WIDE = bump(2.0 / 8**0.5, 8.0**0.5, 8)
# name: policy, reward, order
GAUSSIANS = {
    "near, 2": (gaussian(0.0, 1.0), bump(2.0, 1.0), 2),
    "sharp, 1": (gaussian(0.0, 1.0), bump(1.5, 0.5), 1),
    "sharp, 1.5": (gaussian(0.0, 1.0), bump(1.5, 0.5), 1.5),
    "var 1/20, 2": (gaussian(0.0, 0.05), bump(2 * 0.05**0.5, 0.05), 2),
    "var 1/4, 2": (gaussian(0.0, 0.25), bump(1.0, 0.25), 2),
    "var 4, 2": (gaussian(0.0, 4.0), bump(4.0, 4.0), 2),
    "8-d, 2": (gaussian(0.0, 1.0, 8), WIDE, 2),
    "64-d, 2": (gaussian(0.0, 1.0, 64), bump(0.25, 8.0, 64), 2),
}
TWO = mixture([0.5, 0.5], [-1.0, 1.0], [0.1, 0.1])
THREE = mixture([0.5, 0.3, 0.2], [-1.2, 0.2, 1.3], [0.1, 0.05, 0.2])
FOUR = mixture([0.6, 0.4], [[-0.5] * 4, [0.5] * 4], [0.3, 0.3])
MIXTURES = {
    "2 modes, bump": (TWO, bump(1.0, 0.3)),
    "3 modes, mode": (THREE, Membership(THREE, 2)),
    "4-d, bump": (FOUR, bump(0.6, 2.0, 4)),
}
SAMPLERS = [
    ("ode", "grid"),
    ("sde1", "grid"),
    ("sde2", "grid"),
    ("sde2", "auto"),
    *(("sde2", n) for n in (4, 6, 8, 12, 16)),
]
PROPOSALS = 2048


def grids_of(sigmas, steps):
    plan = make_plan(sigmas, steps=steps)
    return [[0.0, *row[:n].flip(0).tolist()] for row, n in zip(plan.sigmas, plan.calls, strict=True)]


def pair(errors):
    return f"{errors[0]:.3f}/{errors[1]:.3f}"


def sampled(policy, reward, sigmas, method, steps):
    """Errors of a measured profile, its largest standard error, and those of D and gains times sqrt(proposals)."""
    dim = policy.means.shape[1]
    proposals = reward.positive(policy).sample(sobol(PROPOSALS, 1 + dim, seed=1))
    profile = estimate_profile(
        policy.velocity, proposals, {"r": reward}, sigmas, rollouts=2, posterior=method, steps=steps,
        generator=torch.Generator().manual_seed(0), batch_size=4096,
    )  # fmt: skip
    errors = worst(profile.divergence[0], exact_divergence(policy, reward, sigmas, 2))
    root = (2 * PROPOSALS) ** 0.5  # of completions a level
    return (
        errors,
        float(profile.stderr.max()),
        root * float(profile.stderr.max()),
        root * float(profile.gains_stderr.max()),
    )


def samplers(sigmas) -> None:
    print("Samplers, T = 10. Last columns: standard errors of D and of a gain, times sqrt(completions) (near, 2)")
    print(f"{'':11} {'calls':>5} " + " ".join(f"{name:>13}" for name in GAUSSIANS))
    for method, steps in SAMPLERS:
        grids = grids_of(sigmas, steps)
        cells = []
        for policy, reward, order in GAUSSIANS.values():
            exact = exact_divergence(policy, reward, sigmas, order)
            cells.append(pair(worst(solved_divergence(policy, reward, sigmas, order, grids, method), exact)))
        print(f"{method:5}{steps!s:>6} {sum(map(len, grids)) - len(grids):5} " + " ".join(f"{c:>13}" for c in cells))
    print(f"\n{'':11} {'calls':>5} " + " ".join(f"{name:>17}" for name in MIXTURES) + f" {'s.e. D':>7} {'gain':>6}")
    for method, steps in SAMPLERS[:6]:
        cells = []
        for policy, reward in MIXTURES.values():
            errors, stderr, *_ = sampled(policy, reward, sigmas, method, steps)
            cells.append(f"{pair(errors)}+-{stderr:.3f}")
        *_, noise, gain_noise = sampled(*GAUSSIANS["near, 2"][:2], sigmas, method, steps)
        calls = make_plan(sigmas, steps=steps).cost
        print(
            f"{method:5}{steps!s:>6} {calls:5} "
            + " ".join(f"{c:>17}" for c in cells)
            + f" {noise:7.2f} {gain_noise:6.2f}"
        )


def schedules() -> None:
    print("\nsde2, auto, on other schedules")
    print(f"{'T shift':11} {'calls':>5} " + " ".join(f"{name:>13}" for name in GAUSSIANS))
    for num_levels, shift in [(10, 1.0), (10, 3.0), (16, 1.0), (16, 3.0), (25, 1.0), (25, 3.0)]:
        sigmas = grid(num_levels, shift)
        grids = grids_of(sigmas, "auto")
        cells = [
            pair(worst(solved_divergence(p, r, sigmas, k, grids, "sde2"), exact_divergence(p, r, sigmas, k)))
            for p, r, k in GAUSSIANS.values()
        ]
        calls = sum(map(len, grids)) - num_levels
        print(f"{num_levels:3} {shift:7.0f} {calls:5} " + " ".join(f"{c:>13}" for c in cells))


def nested(sigmas) -> None:
    """Completions of a Gaussian are Gaussian: drawn from their own law, to see the nested bias alone."""
    policy, reward, _ = GAUSSIANS["sharp, 1"]
    num, replicates = 1 << 14, 100
    grids = grids_of(sigmas, "auto")
    x0 = reward.positive(policy)
    solved = {order: solved_divergence(policy, reward, sigmas, order, grids, "sde2") for order in (1, 1.5)}
    start = sobol(num, 2, seed=2)
    print(
        "\nNested orders (sharp): error of D/gain that J completions add, before and after the jackknife; s.e. x "
        "sqrt(proposals)"
    )
    print(f"{'J':>3} {'order':>5} {'raw':>12} {'jackknifed':>12} {'taken off':>9} {'s.e. D':>7}")
    for count in (2, 4, 8, 16, 32):
        generator = torch.Generator().manual_seed(count)
        scores = [reward(x0.sample(start)).unsqueeze(1)]
        for sigma, levels in zip(sigmas[1:].tolist(), grids, strict=True):
            gain, offset, variance = affine_posterior(policy, posterior_steps(levels))
            centers = gain * x0.noised(sigma).sample(start) + offset
            z = torch.randn(num, count, dtype=F64, generator=generator)
            scores.append(reward((centers + variance.sqrt() * z).reshape(-1, 1)).view(num, count))
        prompts = torch.arange(num)
        weights = bootstrap_weights(prompts, replicates, 0)
        for order in (1, 1.5):
            curve = estimate_curve("r", scores, prompts, weights, order=order, importance=False)
            raw = curve.divergence + curve.nested_bias
            noise = float(curve.replicates.std(0).max()) * num**0.5
            cells = [pair(worst(value, solved[order])) for value in (raw, curve.divergence)]
            print(
                f"{count:3} {order:5} {cells[0]:>12} {cells[1]:>12} {curve.nested_bias.abs().max():9.3f} {noise:7.2f}"
            )


def _angle(sigma):
    return math.atan2(sigma, 1 - sigma)


def _from_angle(angle):
    return math.sin(angle) / (math.sin(angle) + math.cos(angle))


# name: variable and its inverse; even steps in it
PLACEMENTS = {
    "sigma": (lambda s: s, lambda u: u),
    "log-SNR": (lambda s: math.log(min(s, 0.98) / (1 - min(s, 0.98))), lambda u: 1 / (1 + math.exp(-u))),
    "angle": (_angle, _from_angle),
    "sqrt(angle)": (lambda s: _angle(s) ** 0.5, lambda u: _from_angle(u**2)),
    "angle^(2/3)": (lambda s: _angle(s) ** (2 / 3), lambda u: _from_angle(u**1.5)),
}


def placed(levels, variable):
    """As many calls, between the same ends, even in another variable (log-SNR: from 0.98 if from pure noise)."""
    if len(levels) < 4:
        return levels
    to, back = PLACEMENTS[variable]
    low, high, n = to(levels[1]), to(levels[-1]), len(levels) - 2
    return [0.0, levels[1], *(back(low + (high - low) * k / n) for k in range(1, n)), levels[-1]]


def _log_snr(sigma):
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


def reslope(steps: list[Step], share) -> list[Step]:
    """The slope taken in angle^(2/3) by a share, and in log-SNR by the rest."""
    result = list(steps)
    for k in range(1, len(steps) - 1):
        slopes = []
        for clock in (lambda s: _angle(s) ** (2 / 3), _log_snr):
            before, here, there = (clock(step.sigma) for step in steps[k - 1 : k + 2])
            slopes.append(0.5 * (there - here) / (here - before))
        result[k] = replace(steps[k], slope=share * slopes[0] + (1 - share) * slopes[1])
    return result


def placements() -> None:
    variants = [(f"even in {name}", name, 0.5) for name in PLACEMENTS]
    variants += [("  slope in log-SNR", "angle^(2/3)", 0.0), ("  slope in angle", "angle^(2/3)", 1.0)]
    for num_levels, shift in [(10, 1.0), (10, 3.0), (25, 1.0)]:
        sigmas = grid(num_levels, shift)
        steps = max(map(len, grids_of(sigmas, "auto"))) - 1
        print(f"\nPlacements at equal cost: T = {num_levels}, shift {shift:.0f}; the last of the five is ours")
        print(f"{'':19} " + " ".join(f"{name:>13}" for name in GAUSSIANS))
        for name, variable, share in variants:
            cells = []
            for policy, reward, order in GAUSSIANS.values():
                curve = [float(exact_divergence(policy, reward, sigmas[:1], order))]
                for sigma in sigmas[1:].tolist():
                    steps_down = reslope(posterior_steps(placed(posterior_grid(sigma, steps), variable)), share)
                    curve.append(affine_divergence(policy, reward, sigma, order, *affine_posterior(policy, steps_down)))
                cells.append(
                    pair(worst(torch.tensor(curve, dtype=F64), exact_divergence(policy, reward, sigmas, order)))
                )
            print(f"{name:19} " + " ".join(f"{c:>13}" for c in cells))


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    samplers(grid(10))
    schedules()
    nested(grid(10))
    placements()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
