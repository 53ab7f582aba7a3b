"""Shows plans, profiles and timelines; pure functions of values, except for the files they are asked to write."""

from lightning_hetpipe.report.gantt import save_gantt
from lightning_hetpipe.report.table import comparison_table, measured_table, plan_table, profile_table

__all__ = ["comparison_table", "measured_table", "plan_table", "profile_table", "save_gantt"]
