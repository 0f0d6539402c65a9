"""Which files are of Python or of an installed package, and not of the program."""
import os
import sysconfig

_STANDARD = tuple({os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "platstdlib")})
# By name, so that platlib, the user's own folder and Debian's are among them.
_PACKAGES = ("/site-packages/", "/dist-packages/")
_HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
_known = {}


def is_installed(file):
    """Whether this file, or this folder of a package, is."""
    if file not in _known:
        real = os.path.realpath(file)
        _known[file] = real.startswith((*_STANDARD, _HERE)) or any(folder in path for path in (file, real) for folder in _PACKAGES)
    return _known[file]
