"""`fedveil report`: one self-contained HTML page of one or several runs."""

from fedveil.experiment.report.report import write_report

__all__ = ["write_report"]
