"""What test_truth.py, test_times.py and test_verdicts.py share: environments of pinned packages, programs of ours that run rows on a virtual
GPU, and a file that keeps what rows came to."""
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = ROOT / ".venv"  # of scripts/setup


def make_venv(folder, *installs):
    """With what each list of arguments of `pip install` says; nothing where the environment is there."""
    if (folder / "bin/python").exists():
        return
    subprocess.run([BASE / "bin/python", "-m", "venv", folder], check=True)
    for arguments in installs:
        install(folder, *arguments)


def install(folder, *arguments):
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", *arguments], check=True)


def run_rows(build, device, command, rows, folder, done, settings, options=()):
    """`command` is a program with its arguments after the file of rows. Calls `done` with each line of JSON that it prints; the run's own
    folder is made in `folder`. Where the program fails, what it said last is printed."""
    file = pathlib.Path(folder) / "rows.json"
    file.write_text(json.dumps(rows))
    python, program, *arguments = command
    words = [build / "bin/oomdiag", "run", *options, "--device", device, "--folder", folder, "--no-progress", "--", python, program, file, *arguments]
    with (pathlib.Path(folder) / "said").open("w+") as said:
        run = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | settings)
        for line in run.stdout:
            if line.startswith("{"):
                done(json.loads(line))
        if run.wait() != 0:
            said.seek(0)
            print(said.read()[-3000:], file=sys.stderr)


class Kept:
    """What rows came to, by their names; what the file has, if one is given, is not measured again."""

    def __init__(self, file):
        self.lines = {}
        if file and file.exists():
            self.lines = {line["row"]: line for line in map(json.loads, file.read_text().splitlines())}
        self.file = file

    def add(self, line):
        self.lines[line["row"]] = line
        if self.file:
            with self.file.open("a") as stream:
                print(json.dumps(line), file=stream)
