"""Fixes against running out of memory, applied to a program that knows nothing of them: one module per fix.

OOMDIAG_FIXES is a JSON list of [id, settings]; the module of that name has apply(settings). Each patches torch as the
lines would that a user types, and writes, in the file `fixes` of the run folder, those lines and how often it found
something to change. What it writes nothing of was not applied.
"""
import importlib
import json
import os
import sys


def _rank():
    """Of the process in its job; 0 outside of jobs."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def report(**what):
    """Raises nothing: the program's own code calls it."""
    folder = os.environ.get("OOMDIAG_OUTPUT")
    if not folder:
        return
    try:
        with open(os.path.join(folder, "fixes"), "a", encoding="utf-8") as file:
            file.write(json.dumps(what | {"rank": _rank()}) + "\n")
    except OSError:  # the disk is full, the program has no file descriptor left
        pass


def report_applied(id, lines):
    report(id=id, applied=True, lines=lines)


def report_not_applied(id, error):
    report(id=id, not_applied=f"{type(error).__name__}: {error}".splitlines()[0])


def apply_all():
    for id, settings in json.loads(os.environ["OOMDIAG_FIXES"]):
        try:
            importlib.import_module(f"{__name__}.{id}").apply(settings)
        except Exception as error:  # the program runs on without it, and that is said
            report_not_applied(id, error)
