"""Shows plans, profiles and timelines; functions of values that at most write the file they are asked for."""

from lightning_hetpipe.report.gantt import draw_gantt, save_gantt
from lightning_hetpipe.report.table import (
    comparison_table,
    largest_table,
    measured_table,
    plan_table,
    profile_table,
    show,
)

__all__ = [
    "comparison_table",
    "draw_gantt",
    "largest_table",
    "measured_table",
    "plan_table",
    "profile_table",
    "save_gantt",
    "show",
]
