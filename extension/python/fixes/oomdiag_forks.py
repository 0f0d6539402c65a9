"""Starts a Python program many times with its imports made once: each run is a fork of this process.

    python oomdiag_forks.py LISTENER SCRIPT [torch]     LISTENER: the number of a listening Unix socket that it inherits

Makes the imports at the head of SCRIPT, of packages that are installed: up to its first statement that is neither an
import nor a definition, as that may change what later ones do. With `torch` only those of torch and of Python's own
modules: a fix changes torch before other packages take functions from it. The first forks say what they import later, and
the next ones have that too. Then serves cli/process/forked_program.cpp, which draws who talks
to whom. Ends when its stdin is closed; at once, so that programs are started as ever, where the imports began a thread
or used CUDA: a fork would lack what they made.
"""
import ast
import importlib
import importlib.abc
import importlib.util
import os
import select
import signal
import socket
import struct
import sys
import threading
import types

from oomdiag_packages import is_installed


def _is_installed(name, torch_only):
    """Part of Python, or of a package that the program does not bring itself."""
    package = name.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    files = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    inside = any(is_installed(file) for file in files)
    return inside and (not torch_only or package == "torch" or package in sys.stdlib_module_names)


def _names(node):
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def _is_harmless(node):
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def imports_at_head(source, torch_only=False):
    """The import statements that can be made beforehand."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if getattr(node, "level", 0) or not all(_is_installed(name, torch_only) for name in _names(node)):
                break
            if _names(node) != ["__future__"]:
                found.append(node)
        elif not _is_harmless(node):
            break
    return found


def _make_imports(script, torch_only):
    with open(script, "rb") as file:
        nodes = imports_at_head(file.read(), torch_only)
    for node in nodes:
        exec(compile(ast.Module([node], []), script, "exec"), {})


def _has_begun():
    """Something that a fork would not have: a thread of Python, or what CUDA made."""
    if threading.active_count() > 1:
        return True
    recorder = os.path.basename(os.environ.get("OOMDIAG_RECORDER") or "liboomdiag.so")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(line.rstrip().endswith("/" + recorder) for line in maps)


class _Listing(importlib.abc.MetaPathFinder):
    """In a fork: writes down the name of each module that is asked for. It keeps no file open: the program may close it."""

    def __init__(self, file):
        self._file = file

    def find_spec(self, name, path, target=None):
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(name + "\n")
        except OSError:
            pass
        return None


class _Modules:
    """What the first forks imported, which the next ones find imported."""

    _MAX_LISTED = 2  # forks: of two that begin together neither knows what the other needs

    def __init__(self, folder, torch_only):
        self._file, self._torch_only, self._listed, self._known = os.path.join(folder, "modules"), torch_only, 0, 0

    def list_in_child(self):
        if self._listed <= self._MAX_LISTED:
            sys.meta_path.insert(0, _Listing(self._file))

    def import_known(self):
        self._listed += 1
        try:
            with open(self._file, encoding="utf-8") as file:
                names = file.read().splitlines()
        except OSError:
            return
        for name in names[self._known:]:
            if name not in sys.modules and _is_installed(name, self._torch_only):
                try:
                    importlib.import_module(name)
                except Exception:  # as it may have in the program, which went on without it
                    pass
        self._known = len(names)


def _receive(connection):
    """The arguments and the environment of a program, and its standard streams. Raises EOFError if nobody waits for it any more."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)

    def read(size):
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    parts = read(struct.unpack("I", read(4))[0]).split(b"\0")[:-1]
    count = int(parts[0])
    return parts[1:count + 1], parts[count + 1:], streams


def _become(arguments, environment, streams, script):
    """In the child: all that a process has when Python reaches the first line of its script."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environb.update(pair.split(b"=", 1) for pair in environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = os.environ.get("OOMDIAG_OUTPUT")
    if folder:
        open(os.path.join(folder, "loaded"), "a", encoding="utf-8").close()  # as the preloaded library does when a process starts
    words = [os.fsdecode(word) for word in arguments]
    sys.argv = words[words.index(script):]
    import sitecustomize
    sitecustomize.apply_what_the_environment_names()


def _keep(connection, child):
    """Passes signals on to the child and returns how it ended."""
    pidfd = os.pidfd_open(child)
    connection.send(b"b")
    while True:
        ready, _, _ = select.select([pidfd, connection], [], [])
        if pidfd in ready:
            break
        signals = connection.recv(16)
        for number in signals or [signal.SIGKILL]:
            os.kill(child, number)
        if not signals:
            break
    status = os.waitpid(child, 0)[1]
    try:
        connection.send(struct.pack("i", status))
    except OSError:
        pass
    os._exit(0)


def _fork_one(listener, script, modules):
    """Whether this is the child, which shall run the script."""
    connection, _ = listener.accept()
    modules.import_known()
    if _has_begun():
        os._exit(0)
    if os.fork() != 0:
        connection.close()
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    try:
        arguments, environment, streams = _receive(connection)
    except (EOFError, OSError):
        os._exit(0)
    child = os.fork()
    if child != 0:
        for stream in streams:
            os.close(stream)
        _keep(connection, child)
    connection.close()
    _become(arguments, environment, streams, script)
    modules.list_in_child()
    return True


def _serve(listener, script, modules):
    """Returns in children only."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        if _fork_one(listener, script, modules):
            return


def _run(script):
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)


def _main():
    listener, script = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    torch_only = sys.argv[3:] == ["torch"]
    _make_imports(script, torch_only)
    if _has_begun():
        os._exit(0)
    _serve(listener, script, _Modules(os.path.dirname(listener.getsockname()), torch_only))
    _run(script)


if __name__ == "__main__":
    _main()
