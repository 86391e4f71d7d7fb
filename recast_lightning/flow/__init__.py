"""Flow matching in pure tensor code: noising, solvers from noise to data, and steps of a posterior sampler."""

from recast_lightning.flow.noising import Velocity, check_grid, noise_to, velocity_to_x0
from recast_lightning.flow.ode import Solver, sample_ode
from recast_lightning.flow.posterior import Posterior, Step, posterior_grid, posterior_steps

__all__ = [
    "Posterior",
    "Solver",
    "Step",
    "Velocity",
    "check_grid",
    "noise_to",
    "posterior_grid",
    "posterior_steps",
    "sample_ode",
    "velocity_to_x0",
]
