"""A process that has imported torch and nothing of CUDA, and forks one for each line of its input that asks for it.

A line is JSON: {"program", "arguments", "environment", "output", "errors"}, the last two being files; the answer is a line with the exit code
(of one that a signal ended, minus its number). It saves each of them the import, which is most of what they take.
"""

import json
import os
import runpy
import sys

import torch  # noqa: F401, this is what it is for


def become(job):
    """In the child: what a new process of that program would be."""
    for number, name in (1, "output"), (2, "errors"):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = [job["program"], *job["arguments"]]
    runpy.run_path(job["program"], run_name="__main__")


def main():
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            return become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
