"""OOMDIAG=1 in the environment of an installed oomdiag: the Python that starts with it goes on under `oomdiag run`.

oomdiag.pth beside the package imports this where OOMDIAG is set; without it nothing of ours is touched. For launchers that start
Python themselves. What is run keeps its process id as a child of ours, its input, its output and its exit code.
"""
import os
import sys

_SWITCH = "OOMDIAG"


def _command_line(value, arguments):
    """`oomdiag run [--device NAME] -- python …`, or None where nothing is to be done."""
    under_us = "OOMDIAG_OUTPUT" in os.environ  # a process that a recorded one started
    if value in ("", "0") or under_us or not arguments:
        return None
    device = [] if value == "1" else ["--device", value]
    return ["oomdiag", "run", *device, "--", sys.executable, *arguments[1:]]


def go_on_under_oomdiag():
    value = os.environ.pop(_SWITCH, "")  # once: oomdiag asks this Python for its torch
    command = _command_line(value, getattr(sys, "orig_argv", []))  # Python 3.10 has it first
    if command:
        from . import _command
        os.execv(str(_command()), command)


go_on_under_oomdiag()
