"""Runs programs of a file on request, each in a child forked from a process that has imported torch and not touched CUDA:
so each begins as a fresh process does, without the three seconds of `import torch`.

    python server.py programs.py    reads lines of JSON {"program", "folder", "output"}, answers with the child's wait status
"""
import importlib
import json
import os
import pathlib
import resource
import signal
import sys

LONGEST = 60  # seconds of a processor, after which SIGXCPU ends a program
HANGS = 600   # seconds after which SIGALRM does, on however busy a machine


def become(request):
    """The child: its output goes to files, its run to a folder of its own."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if request["folder"]:
        os.environ["OOMDIAG_OUTPUT"] = request["folder"]
    os.environ.update(request.get("environment", {}))
    sys.argv = [request["program"]]
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 5))
    signal.setitimer(signal.ITIMER_REAL, HANGS)


def serve():
    """Returns in children only, with what they shall run."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            return request
        print(os.waitpid(child, 0)[1], flush=True)
    os._exit(0)


if __name__ == "__main__":
    file = pathlib.Path(sys.argv[1])
    sys.path[:0] = [str(file.parent), str(pathlib.Path(__file__).parent)]
    programs = importlib.import_module(file.stem)
    request = serve()
    if "seed" in request:
        import random_program
        random_program.run(request["seed"])
    else:
        programs.PROGRAMS[request["program"]]()
    if hasattr(programs, "peaks"):
        programs.peaks()
