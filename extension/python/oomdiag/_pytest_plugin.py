"""Pytest on a virtual GPU: `pytest --oomdiag-device rtx4090`, or `oomdiag_device = rtx4090` in pytest's configuration.

The session is run once more under `oomdiag run`, so that a test finds a CUDA device where there is none; its report follows the
session's. Tests say what they may allocate by `with oomdiag.budget("2GiB"):`.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterator

import pytest

_RUNNING = "OOMDIAG_PYTEST"
_FOLDER = "oomdiag-pytest-"


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("oomdiag")
    group.addoption("--oomdiag-device", metavar="NAME", default=None,
                    help="run the tests on this virtual GPU (`oomdiag devices` lists them)")
    parser.addini("oomdiag_device", "the virtual GPU to run the tests on", default="")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # before pytest takes the output streams
def pytest_load_initial_conftests(early_config: Any, parser: Any, args: Any) -> Iterator[None]:
    device = early_config.known_args_namespace.oomdiag_device or early_config.getini("oomdiag_device")
    if device and _RUNNING not in os.environ:
        os._exit(_run_on(device, [str(argument) for argument in early_config.invocation_params.args]))
    yield


def _run_on(device: str, arguments: Any) -> int:
    from . import _command
    _remove_old_runs()
    folder = tempfile.mkdtemp(prefix=_FOLDER)  # stays: the last line of the report names it
    sys.stdout.flush()
    return subprocess.call(
        [str(_command()), "run", "--device", device, "--folder", folder, "--no-progress", "--", sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, _RUNNING: device})


def _remove_old_runs() -> None:
    """Keeps those of the last sessions, as pytest does with tmp_path, and any that may still run."""
    kept, an_hour = 2, 3600
    try:
        runs = [entry for entry in os.scandir(tempfile.gettempdir())
                if entry.name.startswith(_FOLDER) and entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid()]
        runs.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in runs[kept:]:
            if time.time() - entry.stat().st_mtime > an_hour:
                shutil.rmtree(entry.path, ignore_errors=True)
    except OSError:
        pass  # another session was quicker


def pytest_report_header() -> Any:
    return f"oomdiag: on a virtual {os.environ[_RUNNING]}" if _RUNNING in os.environ else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if call.excinfo is not None and call.excinfo.typename == "BudgetExceeded":
        report.longrepr = f"{item.nodeid}: {call.excinfo.value}"  # its lines, and no page of our own frames
