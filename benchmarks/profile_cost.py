"""What a profile of Signboard costs, and what each way to make it cheaper buys, against the published estimator.

    python benchmarks/profile_cost.py FOLDER

FOLDER keeps the scores of every completion, so that a killed run goes on; the whole takes about 1.5 hours on one thread.

The baseline is the paper's cost: the sampler's own grid, t calls from level t, noise of its own for every level (but our
posterior sampler, so that it is right). "Calls for equal error" are calls x variance of the gains, over those of the
baseline: at 1/6, a sixth of the calls gives gains of the same standard error.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from recast_lightning.credit.completions import Completions, Keeper
from recast_lightning.credit.curves import bootstrap_weights, estimate_curve, interpolate
from recast_lightning.credit.plan import make_plan
from recast_lightning.policy import Policy
from recast_lightning.proposals.renderer import RendererProposals
from recast_lightning.rewards import OCR, ClipScore, GenEval, HPSv2, PickScore, SignboardDetector
from recast_lightning.signboard.world import make_prompts

REWARDS = {
    "clip": ClipScore(model="signboard:clip"),
    "hpsv2": HPSv2(model="signboard:hpsv2"),
    "pickscore": PickScore(model="signboard:pickscore", processor="signboard:pickscore"),
    "ocr": OCR(detect=False),
    "geneval": GenEval(detector=SignboardDetector()),
}
REFERENCE, SMALL, LARGER = range(1280), range(1280, 1408), range(1280, 1792)


class Study:
    """Scores of completions of the embedded base with T levels, kept in a folder."""

    def __init__(self, folder: Path, num_levels: int) -> None:
        self.folder, self.num_levels = folder, num_levels
        self.policy = Policy(num_steps=num_levels)
        self.policy.load()
        self.prompts = make_prompts(4000, seed=0, split="train")

    def scores(self, name: str, prompts: range, plan_of: Callable, *, seed: int = 0, sigmas=None):
        """Scores [R, N, J] of a plan's completions by level, and the plan."""
        policy, rows = self.policy, [self.prompts[i] for i in prompts]
        plan = plan_of(policy.sigmas if sigmas is None else sigmas)
        images = RendererProposals().images(rows, policy.height, policy.width)
        latents = torch.cat([policy.encode(chunk) for chunk in images.split(64)])
        conditions = policy.encode_prompts([p.text for p in rows])

        def score(x0, index):
            pictures, own = policy.decode(x0), [rows[i] for i in index.tolist()]
            return torch.stack([model.positive(model(pictures, own)).double() for model in REWARDS.values()])

        work = Completions(
            lambda x, sigma, index: policy(x, sigma, conditions[index]), latents, torch.arange(len(rows)), plan, score,
            len(REWARDS), seed=seed, fresh=True, batch_size=64,
        )  # fmt: skip
        file = self.folder / f"T{self.num_levels}-{name}.pt"
        if not file.is_file():
            keep = Keeper(self.folder / f"T{self.num_levels}-{name}-part", {"prompts": str(prompts)})
            with torch.no_grad():
                torch.save(work.run(lambda calls: None, keep=keep), file)
            keep.delete()
        return work.by_level(torch.load(file, weights_only=True)), plan

    def naive(self, prompts: range):
        """Completions on the sampler's own grid with noise of its own for each level: scores by level, calls a proposal."""
        levels, calls = [], 0
        for t in range(1, self.num_levels + 1):
            (clean, noisy), plan = self.scores(
                f"naive-{t}", prompts, lambda s, t=t: make_plan(s, levels=[t], steps="grid"), seed=t,
                sigmas=self.policy.sigmas[: t + 1],
            )  # fmt: skip
            levels = [*(levels or [clean]), noisy]
            calls += plan.cost
        return levels, list(range(1, self.num_levels + 1)), calls

    def packed(self, name: str, prompts: range, **options):
        """Our completions: scores by level, measured levels, calls a proposal."""
        by_level, plan = self.scores(name, prompts, lambda s: make_plan(s, **options))
        return by_level, plan.levels, plan.cost

    def curves(self, levels, measured):
        """Divergence of each reward [R, T + 1], and the standard errors of its gains [R, T]."""
        prompts = torch.arange(levels[0].shape[1])
        weights = bootstrap_weights(prompts, 400, 0)
        found = [
            estimate_curve(name, [s[row] for s in levels], prompts, weights, order=2, importance=False)
            for row, name in enumerate(REWARDS)
        ]
        divergence = interpolate(torch.stack([c.divergence for c in found]), measured, self.num_levels)
        replicates = interpolate(torch.stack([c.replicates for c in found]), measured, self.num_levels)
        return divergence, replicates.diff(dim=2).std(1)


def correlations(divergence, reference):
    """Pearson's, of the gains of each reward."""
    gains = torch.stack([divergence, reference]).diff(dim=2)
    gains = gains - gains.mean(2, keepdim=True)
    return (gains[0] * gains[1]).sum(1) / (gains[0].norm(dim=1) * gains[1].norm(dim=1))


def main(folder: Path, num_levels: int, variants: dict[str, dict]) -> None:
    study = Study(folder, num_levels)
    reference, _ = study.curves(*study.packed("reference", REFERENCE, steps=10)[:2])
    levels, measured, naive_calls = study.naive(SMALL)
    naive, naive_error = study.curves(levels, measured)
    table = Table(title=f"T = {num_levels}: {len(SMALL)} prompts; Pearson with a profile of {len(REFERENCE)}")
    for title in (
        "variant",
        "calls a prompt",
        *[f"{name} r" for name in REWARDS],
        "variance / naive",
        "calls for equal error",
    ):
        table.add_column(title, justify="left" if title == "variant" else "right")

    def add(name, calls, divergence, error, prompts=SMALL):
        variance = (error.square().mean(1) / naive_error.square().mean(1)).mean() * len(prompts) / len(SMALL)
        cells = [f"{r:.3f}" for r in correlations(divergence, reference)]
        cost = float(variance * calls / naive_calls)
        table.add_row(name, str(calls), *cells, f"{variance:.3f}", f"{cost:.3f} = 1/{1 / cost:.1f}")

    add("naive: own grid, own noise", naive_calls, naive, naive_error)
    for name, options in variants.items():
        prompts = LARGER if "512" in name else SMALL
        levels, measured, calls = study.packed(name, prompts, **options)
        add(name, calls, *study.curves(levels, measured), prompts)
    Console(width=150).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    VARIANTS = {
        10: {
            "common noise": {"steps": "grid"}, "placed steps": {"steps": "auto"}, "steps 5": {"steps": 5},
            "steps 4": {"steps": 4}, "levels 6": {"levels": 6}, "levels 6, steps 5": {"levels": 6, "steps": 5},
            "antithetic": {"rollouts": 2}, "levels 6, allocated": {"levels": 6, "rollouts": [1, 1, 2, 2, 2, 1]},
            "levels 6, 512 prompts": {"levels": 6},
        },
        25: {
            "common noise": {"steps": "grid"}, "placed steps": {"steps": "auto"}, "steps 8": {"steps": 8},
            "steps 5": {"steps": 5}, "levels 8": {"levels": 8}, "levels 8, steps 8": {"levels": 8, "steps": 8},
            "levels 8, steps 5": {"levels": 8, "steps": 5}, "levels 8, steps 8, 512 prompts": {"levels": 8, "steps": 8},
        },
    }  # fmt: skip
    for levels in [int(t) for t in sys.argv[2:]] or VARIANTS:
        main(place, levels, VARIANTS[levels])
