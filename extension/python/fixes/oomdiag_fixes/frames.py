"""The program's own frames, for fixes that change what one of its functions does. No fix itself."""
import ctypes
import inspect
import os
import sys

from oomdiag_packages import is_installed


def own_frames():
    """Frames of the program, innermost first; those of packages, of Python and of oomdiag are left out."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not is_installed(file):
            yield frame
        frame = frame.f_back


def place_of(frame):
    """"train.py:68", as reports write it."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _has_copy(frame):
    """Before 3.13 f_locals of a function is a copy that stays with the frame, and would keep its tensors alive."""
    return sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED


def locals_of(frame):
    """Its variables and their values; nothing is left that refers to them."""
    held = frame.f_locals
    values = dict(held)
    if _has_copy(frame):
        held.clear()
    return values


def forget(frame, name):
    """The variable no longer refers to its tensor: what `del` does, for a frame that is running."""
    held = frame.f_locals
    held[name] = None
    if _has_copy(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        held.clear()
