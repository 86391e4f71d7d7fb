"""What a run did, for a reader with two minutes: pictures, a table and one HTML file, all rebuilt from its folder."""

from recast_lightning.report.changes import Change, changes, summary_table
from recast_lightning.report.credit_figures import demand, gain_curves, normalized_gains, weight_heatmap
from recast_lightning.report.figures import divergence_change, reward_trajectories
from recast_lightning.report.html import write_report
from recast_lightning.report.style import save_figure

__all__ = [
    "Change",
    "changes",
    "demand",
    "divergence_change",
    "gain_curves",
    "normalized_gains",
    "reward_trajectories",
    "save_figure",
    "summary_table",
    "weight_heatmap",
    "write_report",
]
