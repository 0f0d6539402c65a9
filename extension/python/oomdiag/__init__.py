"""oomdiag in a notebook or a script: why the card is full, from inside of the program.

    %load_ext oomdiag             records from here on, and explains every CUDA OutOfMemoryError of a cell below it
    %oomdiag                      the report so far
    %oomdiag mark NAME            names this place in the run
    %oomdiag stop | start         stops recording, or goes on

In plain Python: oomdiag.start(), stop(), mark(name), report() (a dict), explain() (text), peak(), saved_tensors(loss).
"""
import json
import os
import pathlib

import torch

_LIBRARY = "liboomdiag.so"


def _find_library():
    named = os.environ.get("OOMDIAG_LIBRARY")
    library = pathlib.Path(named) if named else pathlib.Path(__file__).resolve().parents[2] / _LIBRARY
    if not library.exists():
        raise ImportError(f"oomdiag: {library} is missing; build it by scripts/build, or name it in OOMDIAG_LIBRARY")
    return library


def _built_for():
    """The minor version of torch that the library was built for: it would crash another one."""
    return (pathlib.Path(__file__).parent / "torch_minor").read_text().strip()


def _load():
    if hasattr(torch.ops.oomdiag, "start"):
        return
    if not torch.__version__.startswith(_built_for() + "."):
        raise ImportError(f"oomdiag: this one was built for torch {_built_for()}, and this is {torch.__version__}; "
                          "build for yours: OOMDIAG_TORCH=<its site-packages/torch> scripts/build")
    torch.ops.load_library(str(_find_library()))


_load()

start = torch.ops.oomdiag.start
stop = torch.ops.oomdiag.stop
mark = torch.ops.oomdiag.mark
explain = torch.ops.oomdiag.explain
peak = torch.ops.oomdiag.peak
saved_tensors = torch.ops.oomdiag.saved_tensors


def report():
    """The report so far: what `oomdiag explain --json` gives, as a dict."""
    return json.loads(torch.ops.oomdiag.report())


def _magic(line):
    """%oomdiag: the report so far. %oomdiag mark NAME, %oomdiag stop, %oomdiag start."""
    command, _, argument = line.strip().partition(" ")
    commands = {"": lambda: print(explain()), "mark": lambda: mark(argument), "stop": stop, "start": lambda: start("") and None}
    commands.get(command, lambda: print(_magic.__doc__))()


def _explain_failure(shell, kind, error, traceback, tb_offset=None):
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    print(explain())


def load_ipython_extension(shell):
    start()
    shell.register_magic_function(_magic, magic_kind="line", magic_name="oomdiag")
    shell.set_custom_exc((torch.OutOfMemoryError,), _explain_failure)


def unload_ipython_extension(shell):
    stop()
    shell.set_custom_exc((), None)
