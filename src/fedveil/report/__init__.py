"""Reports: pages made from run folders alone, complete in one file, for reading offline."""

from fedveil.report.compare import Comparison, ComparisonRow, Spread, compare
from fedveil.report.page import write_report
from fedveil.report.plan import write_plan
from fedveil.report.run_data import RunData, load_run

__all__ = [
    "Comparison",
    "ComparisonRow",
    "RunData",
    "Spread",
    "compare",
    "load_run",
    "write_plan",
    "write_report",
]
