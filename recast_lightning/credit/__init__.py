"""The method, in pure tensor code: measure when each reward tells good from bad, then spend its budget there.

`estimate_profile` -> `Profile` (curves with error bars) -> `shrunk_gains` -> `sinkhorn_projection` -> `CreditMatrix` (W).
"""

from recast_lightning.credit.compare import Agreement, compare_profiles
from recast_lightning.credit.curves import importance_weights
from recast_lightning.credit.estimate import estimate_profile, profile_cost
from recast_lightning.credit.gains import (
    flat_rows,
    monotone_divergence,
    monotone_gains,
    normalized_gains,
    renyi_divergence,
    shrunk_gains,
)
from recast_lightning.credit.matrix import CreditMatrix
from recast_lightning.credit.profile import Profile
from recast_lightning.credit.schedule import CreditSchedule
from recast_lightning.credit.sinkhorn import sinkhorn_projection
from recast_lightning.credit.stages import Stage

__all__ = [
    "Agreement",
    "CreditMatrix",
    "CreditSchedule",
    "Profile",
    "Stage",
    "compare_profiles",
    "estimate_profile",
    "flat_rows",
    "importance_weights",
    "monotone_divergence",
    "monotone_gains",
    "normalized_gains",
    "profile_cost",
    "renyi_divergence",
    "shrunk_gains",
    "sinkhorn_projection",
]
