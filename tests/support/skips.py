"""Where FEDVEIL_RUN_ALL is set, as CI sets it, a test that skips has failed: nothing is left out unnoticed."""

from __future__ import annotations

import os

import pytest

VARIABLE = "FEDVEIL_RUN_ALL"
MAY_SKIP = (
    "needs a GPU",
    "needs peft",
    "needs polars",
    "needs torchvision",
    "needs timm",
    "needs transformers",
    "needs pyarrow",
    "needs jax",
    "needs keras",
    "FEDVEIL_PAPERS",
    "unprivileged user namespaces",
    "rounds in another way",
)
"""What a CI machine need not have."""


def refused(report: pytest.TestReport) -> pytest.TestReport:
    """The report of a test, failed if the test skipped for a reason that CI must not have."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(VARIABLE):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(words in reason for words in MAY_SKIP):
            report.outcome, report.longrepr = "failed", f"{reason} ({VARIABLE} is set, so this is a failure)"
    return report
