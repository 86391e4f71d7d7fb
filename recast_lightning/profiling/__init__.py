"""A profile of the policy, measured in a run."""

from recast_lightning.profiling.measure import ProfileOptions, Profiler

__all__ = ["ProfileOptions", "Profiler"]
