"""Lightning callbacks of recast_lightning."""

from .collapse_guard import CollapseGuard
from .image_writer import ImageWriter
from .progress import RecastProgressBar
from .renyi_profiler import RenyiProfilerCallback
from .rollout_checkpoint import RolloutCheckpoint
from .run_report import RunReport

__all__ = [
    "CollapseGuard",
    "ImageWriter",
    "RecastProgressBar",
    "RenyiProfilerCallback",
    "RolloutCheckpoint",
    "RunReport",
]
