"""oomdiag in a notebook or a script: why the GPU is full, from inside of the program.

    with oomdiag.watch():         records; on a CUDA OutOfMemoryError the explanation goes to stderr
        train()

    %load_ext oomdiag             records from here on, and explains every CUDA OutOfMemoryError of a cell below it
    %oomdiag                      the report so far
    %oomdiag mark NAME            names this place in the run
    %oomdiag stop | start         stops recording, or goes on

    with oomdiag.budget("2GiB"):  fails a test that adds more, and says who holds it; for pytest see _pytest_plugin.py

    oomdiag.estimate(train, {"batch": 32}, device="rtx4090")    what a function would take on a GPU that is not here

Else: oomdiag.start(), stop(), mark(name), report() (a dict), explain() (text, as in an except block), peak(), saved_tensors(loss).
What depends on the torch of this Python is built when it is first needed, once: about a minute.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional

if TYPE_CHECKING:
    import torch

from ._budget import BudgetExceeded, budget
from ._estimate import Estimate, estimate

__all__ = ["watch", "start", "stop", "mark", "report", "explain", "peak", "saved_tensors", "budget", "BudgetExceeded", "estimate",
           "Estimate", "library", "cmake_prefix_path"]

if TYPE_CHECKING:
    library: str  # the recorder for this torch, built if need be: torch.ops.load_library(oomdiag.library) gives torch.ops.oomdiag
    cmake_prefix_path: str  # for CMAKE_PREFIX_PATH, so that find_package(oomdiag) finds it


def __dir__() -> List[str]:
    return sorted(__all__)


def __getattr__(name: str) -> str:
    if name == "library":
        return _find_recorder()
    if name == "cmake_prefix_path":
        return str(_command().parents[1])
    raise AttributeError(f"module 'oomdiag' has no attribute '{name}'")


def _command() -> pathlib.Path:
    """The command line: in a wheel, in an installation by CMake, in a build folder."""
    here = pathlib.Path(__file__).resolve().parent
    for prefix in here / "_native", here.parents[3], here.parents[2]:
        if (prefix / "bin" / "oomdiag").exists():
            return prefix / "bin" / "oomdiag"
    raise ImportError(f"oomdiag: its command line is missing beside {here}; install it again")


def _find_recorder() -> str:
    named = os.environ.get("OOMDIAG_LIBRARY")
    if named:
        return named
    done = subprocess.run([_command(), "recorder", sys.executable], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ImportError("oomdiag: there is no recorder for this torch; see the lines above")
    answer = json.loads(done.stdout)
    os.environ.setdefault("OOMDIAG_REPORTS", answer["reports"])
    return answer["recorder"]


def _ops() -> Any:
    """torch.ops.oomdiag, loaded when it is first asked for."""
    import torch
    if not hasattr(torch.ops.oomdiag, "start"):
        torch.ops.load_library(_find_recorder())
        if not hasattr(torch.ops.oomdiag, "start"):
            raise ImportError("oomdiag: the recorder has no effect in this process; see its warning")
    return torch.ops.oomdiag


def start(folder: str = "") -> str:
    """Begins to record, or goes on; where the trace goes."""
    return _ops().start(folder)


def _begin(folder: str = "") -> bool:
    """start(), and whether nobody recorded before: only then is it to be stopped by who asked for it."""
    was_recording = _ops().is_recording()
    start(folder)
    return not was_recording


def stop() -> None:
    """Records nothing from here on. What was recorded can be asked for."""
    _ops().stop()


def mark(name: str) -> None:
    """Names this place in the run: a report lists the marks with the peaks between them."""
    _ops().mark(name)


def report() -> Dict[str, Any]:
    """The report so far: what `oomdiag explain --json` gives."""
    return json.loads(_ops().report())


def explain() -> str:
    """The same as text. In `except torch.OutOfMemoryError` it explains that error."""
    return _ops().explain()


def peak() -> Dict[str, int]:
    """allocated_bytes, reserved_bytes, step and device of the highest peak so far."""
    return _ops().peak()


def saved_tensors(root: Optional[torch.Tensor] = None) -> Dict[str, int]:
    """What autograd keeps for backward, by who made and who keeps it: behind `root`, else at the failure or the peak."""
    return _ops().saved_tensors(root)


def _said_or_why_not(say: Callable[[], str]) -> str:
    """What say() gives, or why there is nothing: its error must not take the place of the program's own."""
    try:
        return say()
    except Exception as error:
        return f"oomdiag: there is no report: {str(error).partition(chr(10))[0] or type(error).__name__}"


@contextlib.contextmanager
def watch(folder: str = "") -> Iterator[None]:
    """Records what runs inside. A CUDA OutOfMemoryError that leaves it is explained on stderr and goes on."""
    import torch
    began = _begin(folder)
    try:
        yield
    except torch.OutOfMemoryError:
        print(_said_or_why_not(explain), file=sys.stderr)
        raise
    finally:
        if began:
            stop()


def _magic(line: str) -> None:
    """%oomdiag: the report so far. %oomdiag mark NAME, %oomdiag stop, %oomdiag start."""
    command, _, argument = line.strip().partition(" ")
    commands = {"": lambda: print(explain()), "mark": lambda: mark(argument), "stop": stop, "start": lambda: start("") and None}
    commands.get(command, lambda: print(_magic.__doc__))()


def _explain_failure(shell: Any, kind: Any, error: Any, traceback: Any, tb_offset: Any = None) -> None:
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    print(_said_or_why_not(explain))


_extension_began = False


def load_ipython_extension(shell: Any) -> None:
    global _extension_began
    import torch
    _extension_began = _begin()
    shell.register_magic_function(_magic, magic_kind="line", magic_name="oomdiag")
    shell.set_custom_exc((torch.OutOfMemoryError,), _explain_failure)


def unload_ipython_extension(shell: Any) -> None:
    if _extension_began:
        stop()
    shell.set_custom_exc((), None)


def _main() -> None:
    """The `oomdiag` on the PATH of an environment: the program itself, which learns whose it is."""
    os.environ.setdefault("OOMDIAG_PYTHON", sys.executable)
    if sys.argv[1:] == ["mcp"]:
        from ._mcp import serve
        return serve()
    program = str(_command())
    os.execv(program, ["oomdiag", *sys.argv[1:]])
