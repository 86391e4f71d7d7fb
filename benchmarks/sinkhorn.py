"""Time of the credit projection next to POT's log-domain Sinkhorn at equal margin error (needs the `dev` extra).

OMP_NUM_THREADS=1 python benchmarks/sinkhorn.py
"""

import time

import numpy as np
import ot
import torch

from recast_lightning.credit import normalized_gains
from recast_lightning.credit.sinkhorn import project

TOLERANCE = 1e-10
# name: rewards, levels, sharpness of the gains, smallest budget, temperature
PROBLEMS = {
    "3 x 10": (3, 10, 4, 1.0, 1.0),
    "5 x 10": (5, 10, 4, 1.0, 1.0),
    "5 x 25": (5, 25, 4, 1.0, 1.0),
    "8 x 50": (8, 50, 4, 1.0, 1.0),
    "8 x 50 hard": (8, 50, 200, 1e-6, 0.1),
}


def problem(rewards: int, levels: int, sharpness: int, smallest: float, temperature: float):
    generator = torch.Generator().manual_seed(0)
    gains = torch.rand(rewards, levels, dtype=torch.float64, generator=generator) ** sharpness
    budgets = torch.ones(rewards, dtype=torch.float64)
    budgets[0] = smallest
    columns = torch.full((levels,), 1 / levels, dtype=torch.float64)
    return normalized_gains(gains) / temperature, budgets / budgets.sum(), columns


def pot(kernel, rows, columns):
    plan, log = ot.sinkhorn(
        rows.numpy(),
        columns.numpy(),
        -kernel.numpy(),
        1.0,
        method="sinkhorn_log",
        numItermax=100_000,
        stopThr=TOLERANCE,
        log=True,
    )
    return torch.from_numpy(plan), log["niter"] + 1


def milliseconds(action, repeats: int = 50) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def margin_error(weights, rows, columns) -> float:
    return float(max((weights.sum(1) - rows).abs().max(), (weights.sum(0) - columns).abs().max()))


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'problem':12} {'peak':>5} {'ms':>8} {'POT ms':>8} {'POT/ours':>9} {'its':>5} {'POT its':>8}  margin errors"
    )
    for name, settings in PROBLEMS.items():
        inputs = problem(*settings)
        weights, iterations = project(*inputs, tolerance=TOLERANCE)
        plan, pot_iterations = pot(*inputs)
        ours, theirs = (
            milliseconds(lambda x=inputs: project(*x, tolerance=TOLERANCE)),
            milliseconds(lambda x=inputs: pot(*x)),
        )
        print(
            f"{name:12} {inputs[0].max():5.1f} {ours:8.2f} {theirs:8.2f} {theirs / ours:9.1f} {iterations:5} "
            f"{pot_iterations:8}  {margin_error(weights, *inputs[1:]):.0e} {margin_error(plan, *inputs[1:]):.0e}"
        )


if __name__ == "__main__":
    main()
