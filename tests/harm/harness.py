"""Two servers of programs on the same virtual GPU, one with the recorder and one without, and what must be equal."""
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from report_json import load_report  # noqa: E402
DEVICE = "rtx3060"
LONGEST = 700  # seconds that a program may take; the server ends it earlier


class Outcome:
    """How a program ended, and what it said."""

    def __init__(self, status, output):
        self.code = os.waitstatus_to_exitcode(status)
        self.stdout = pathlib.Path(f"{output}.stdout").read_text()
        self.stderr = pathlib.Path(f"{output}.stderr").read_text()

    def said_by_oomdiag(self):
        return [line for line in self.stderr.splitlines() if line.startswith("oomdiag")]

    def comparable(self):
        """Addresses, process numbers, names of temporary folders and our own lines are not part of the result."""
        errors = [line for line in self.stderr.splitlines() if not line.startswith(("oomdiag", "USDT:"))]
        return self.code, mask(self.stdout), mask(errors[-1] if errors else "")


def mask(text):
    return re.sub(r"0x[0-9a-f]+|Process \d+|\bpid \d+|/tmp/tmp\w{8}", "…", text)


class Server:
    def __init__(self, command, environment, folder, programs=HERE / "programs.py"):
        self.process = subprocess.Popen([*command, sys.executable, "-u", HERE / "server.py", programs], env=environment,
                                        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True)

    def run(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], LONGEST)[0]:
            self.process.kill()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the server is gone")
        return Outcome(int(answer), request["output"])

    def wait_until_ready(self):
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("a server did not start")

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def plain_environment(build, folder):
    """That of `oomdiag run`, with nothing of ours but the virtual device; and what keeps it alive."""
    done = subprocess.run([build / "bin/oomdiag", "run", "--device", DEVICE, "--folder", folder, "--", "env"],
                          capture_output=True, text=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    short = tempfile.TemporaryDirectory(prefix="harm")  # no part of LD_PRELOAD may have a space
    link = pathlib.Path(short.name) / "l"
    link.symlink_to(build / "lib/virtual_device")
    libraries = [link / pathlib.Path(library).name for library in re.split("[: ]", found["LD_PRELOAD"])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOMDIAG_")}
    for name in ("OOMDIAG_DEVICE_FILES", "TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment[name] = found[name]
    environment["LD_PRELOAD"] = ":".join(str(library) for library in libraries if library.exists())
    return environment, short


def find_programs(file, **defaults):
    """Those of a file by their decorator `@program(…)`, with its options or these: importing them would import torch."""
    found = {}
    for options, name in re.findall(r"^@program(?:\((.*)\))?\ndef (\w+)\(", file.read_text(), re.MULTILINE):
        found[name] = types.SimpleNamespace(**defaults | (eval(f"dict({options})") if options else {}))
    return found


def report_of(oomdiag, folder):
    """The report of a run folder, or none, and what the command said."""
    done = subprocess.run([oomdiag, "explain", folder, "--json"], capture_output=True, text=True)
    return (load_report(done.stdout) if done.returncode in (0, 3) and done.stdout else None), done


class Both:
    """Runs a program with and without the recorder, at the same time; with it as an argument of the command `under`."""

    def __init__(self, build, under=()):
        self.oomdiag = build / "bin/oomdiag"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag harm "))
        runs = self.folder / "runs"
        self.recorded = Server([self.oomdiag, "run", "--device", DEVICE, "--folder", runs, "--", *under], dict(os.environ),
                               self.folder)
        environment, self.short = plain_environment(build, self.folder)
        self.plain = Server([], environment, self.folder)
        self.recorded.wait_until_ready()
        self.plain.wait_until_ready()

    def run(self, name, **more):
        """The outcome with and the one without, and the folder of the recorded run."""
        folder = self.folder / f"oomdiag-{name}"
        folder.mkdir(mode=0o700)
        outcomes = {}

        def one(side, server, run_folder):
            outcomes[side] = server.run(program=name, folder=run_folder, output=str(self.folder / f"{name}.{side}"), **more)

        threads = [threading.Thread(target=one, args=("with", self.recorded, str(folder))),
                   threading.Thread(target=one, args=("without", self.plain, ""))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes["with"], outcomes["without"], folder

    def report(self, folder):
        return report_of(self.oomdiag, folder)

    def end(self):
        for server in (self.recorded, self.plain):
            server.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.short.cleanup()
