"""Prints how often a snapshot that PyTorch wrote leads to the cause that our own trace of the same process leads to:
python tests/causes/snapshots.py --build BUILD [--quick] [-v] [-k NAME]

Each program runs out of memory twice, with PyTorch's history recorded with stacks of Python and of all. Exits 1 where a cause
differs.
"""
import argparse
import pathlib
import subprocess
import sys

from confusion import cases, named_cause
from harness import DEVICE, load_report, run_jobs

PROGRAMS = [
    "a batch too large in forward",
    "a batch too large in backward",
    "Adam's state does not fit",
    "a transformer, in forward with free blocks, 500 MiB",
    "outputs in a list",
    "losses that keep their graph",
    "a buffer that grows by cat",
    "free blocks between live blocks",
    "20 GiB at once",
    "a fraction of one half",
]
STACKS = ("python", "all")


def explain(build, snapshot, *options):
    done = subprocess.run([str(pathlib.Path(build) / "bin/oomdiag"), "explain", snapshot, *options, "--json"],
                          capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return load_report(done.stdout)


def jobs_of(chosen, stacks):
    return [{"name": f"{case.name}, stacks of {mode}", "module": case.module, "function": case.function,
             "arguments": case.arguments, "memory_mib": case.memory, "environment": case.environment,
             "options": case.options, "train": (), "stacks": mode}
            for case in chosen for mode in stacks]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="a third of them")
    parser.add_argument("-v", action="store_true", help="print each program")
    parser.add_argument("-k", default="", help="programs with this in their name only")
    options = parser.parse_args()
    chosen = [case for case in cases() if case.name in PROGRAMS and options.k in case.name]
    jobs = jobs_of(chosen, STACKS)
    jobs = run_jobs(options.build, jobs[::3] if options.quick else jobs)
    same = 0
    for job in jobs:
        own = named_cause(job["report"])
        gpu = ["--device", DEVICE, "--memory", f"{job['memory_mib']}MiB"]
        report = explain(options.build, pathlib.Path(job["folder"], "snapshot.pickle"), *gpu)
        by_snapshot = named_cause(report)
        same += by_snapshot == own
        if options.v or by_snapshot != own:
            print(f"{'ok ' if by_snapshot == own else 'NO '} {job['name']}: {own} by our trace, {by_snapshot} by the snapshot"
                  f"   {job['folder']}")
    print(f"{same} of {len(jobs)} causes are the same")
    sys.exit(0 if same == len(jobs) else 1)


if __name__ == "__main__":
    main()
