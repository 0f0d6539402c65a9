"""Pytest on a virtual card: `pytest --oomdiag-device rtx4090`, or `oomdiag_device = rtx4090` in pytest's configuration.

The session is run once more under `oomdiag run`, so that a test finds a CUDA device where there is none; its report follows the
session's. Tests say what they may allocate by `with oomdiag.budget("2GiB"):`.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any, Iterator

import pytest

_RUNNING = "OOMDIAG_PYTEST"


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("oomdiag")
    group.addoption("--oomdiag-device", metavar="NAME", default=None,
                    help="run the tests on this virtual card (`oomdiag devices` lists them)")
    parser.addini("oomdiag_device", "the virtual card to run the tests on", default="")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # before pytest takes the output streams
def pytest_load_initial_conftests(early_config: Any, parser: Any, args: Any) -> Iterator[None]:
    device = early_config.known_args_namespace.oomdiag_device or early_config.getini("oomdiag_device")
    if device and _RUNNING not in os.environ:
        os._exit(_run_on(device, [str(argument) for argument in early_config.invocation_params.args]))
    yield


def _run_on(device: str, arguments: Any) -> int:
    from . import _command
    folder = tempfile.mkdtemp(prefix="oomdiag-pytest-")
    sys.stdout.flush()
    try:
        return subprocess.call(
            [str(_command()), "run", "--device", device, "--folder", folder, "--no-progress", "--", sys.executable, "-m", "pytest", *arguments],
            env={**os.environ, _RUNNING: device})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header() -> Any:
    return f"oomdiag: on a virtual {os.environ[_RUNNING]}" if _RUNNING in os.environ else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if call.excinfo is not None and call.excinfo.typename == "BudgetExceeded":
        report.longrepr = f"{item.nodeid}: {call.excinfo.value}"  # its lines, and no page of our own frames
