"""Where CI is set, a test that was skipped has failed: a green run must not hide a part that could not be tried.

Loaded by scripts/test.sh with `-p no_skips`. Allowed are data beside the checkout that is not there, and Ray and OpenVINO, which are
large and of use to one option each.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

ALLOWED = ("shared/data", "tidegate[ray]", "tidegate[openvino]")


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and not any(one in reason for one in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"In continuous integration a skip is a failure. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report
