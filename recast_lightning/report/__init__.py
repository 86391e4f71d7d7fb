"""What a run did, for a reader with two minutes: pictures, a table and one HTML file, all rebuilt from its folder."""

from recast_lightning.report.changes import Change, changes, summary_table
from recast_lightning.report.figures import (
    gain_curves,
    normalized_gains,
    reward_trajectories,
    save_figure,
    weight_heatmap,
)
from recast_lightning.report.html import write_report

__all__ = [
    "Change",
    "changes",
    "gain_curves",
    "normalized_gains",
    "reward_trajectories",
    "save_figure",
    "summary_table",
    "weight_heatmap",
    "write_report",
]
