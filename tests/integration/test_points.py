"""What `oomdiag fit` computes of random points against runs of them, for programs of many kinds (fit_programs.py).

Usage: test_points.py --build BUILD [Quick|Slow] [--points N] [--only NAME,NAME]. Runs on the virtual device. Prints a line for each program.

Each point is run in a fork of one process that has made the imports: what PyTorch itself counts there is what it counts in a
process of its own, which the test of one point shows.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def option(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


BUILD = pathlib.Path(option("--build", "build")).absolute()
POINTS = int(option("--points", "35"))
ONLY = [name for name in option("--only", "").split(",") if name]
OOMDIAG = BUILD / "bin" / "oomdiag"
PROGRAMS_FILE = pathlib.Path(__file__).parent / "fit_programs.py"
GPU = ["--device", "rtx3060", "--memory", "1TiB"]
FORKS = """
import inspect, os, sys
import torch, torch.optim, torch._dynamo
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import fit_programs
name, points = sys.argv[2], sys.argv[3:]
for line in inspect.getsource(fit_programs.PROGRAMS[name]).splitlines():
    if line.strip().startswith(("import ", "from ")):
        exec(line.strip())
for point in points:
    if os.fork() == 0:
        fit_programs.PROGRAMS[name](*map(int, point.split(",")))
        print("PEAK", point, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
        sys.exit(0)
    os.wait()
"""


def values_of(text):
    """Of "1..48" or "size=16..64:8"."""
    span, _, step = text.split("=")[-1].partition(":")
    least, most = map(int, span.split(".."))
    return list(range(least, most + 1, int(step or 1)))


def run_points(name, points):
    """What PyTorch counts at each point: {point: (allocated, reserved)}."""
    words = [",".join(map(str, point)) for point in points]
    done = subprocess.run([OOMDIAG, "run", *GPU, "--no-progress", "--", sys.executable, "-c", FORKS, PROGRAMS_FILE, name, *words],
                          capture_output=True, text=True, timeout=3000, cwd=os.environ.get("TMPDIR", "/tmp"))
    peaks = {}
    for line in done.stdout.splitlines():
        if line.startswith("PEAK"):
            point, allocated, reserved = line.split()[1:]
            peaks[tuple(map(int, point.split(",")))] = int(allocated), int(reserved)
    return peaks


def compute_points(name, points):
    """What fit says of each point, learned on the range of the program."""
    program = fit_programs.PROGRAMS[name]
    names = ["batch"] + ([program.second.split("=")[0]] if program.second else [])
    arguments = ["--vary", f"batch={program.batch}"] + (["--vary", program.second] if program.second else [])
    for point in points:
        arguments += ["--at", ",".join(f"{n}={v}" for n, v in zip(names, point))]
    done = subprocess.run([OOMDIAG, "fit", *GPU, "--only-at", "--json", *arguments, "--", sys.executable, PROGRAMS_FILE, name,
                           *(f"{{{n}}}" for n in names)], capture_output=True, text=True, timeout=3000)
    if done.returncode not in (0, 3):
        raise AssertionError(done.stderr)
    return {tuple(one[n] for n in names): one for one in json.loads(done.stdout)["computed"]}


class Points(unittest.TestCase):
    def check_programs(self, names, count):
        totals = {False: [0] * 5, True: [0] * 5}
        for name in names:
            program, rng = fit_programs.PROGRAMS[name], random.Random(name)
            axes = [values_of(text) for text in (program.batch, program.second) if text]
            points = sorted({tuple(rng.choice(axis) for axis in axes) for _ in range(2 * count)})
            points = sorted(rng.sample(points, min(count, len(points))))
            said, did = compute_points(name, points), run_points(name, points)
            counts = [len(did), 0, 0, 0, 0]
            for point, peaks in did.items():
                one = said[point]
                for i, kind in enumerate(("allocated", "reserved")):
                    equal = one[f"peak_{kind}_bytes"] == peaks[i]
                    counts[1 + i] += equal
                    counts[3] += not equal and one[f"{kind}_exact"]
                    if not equal:
                        print(f"  {name} {point}: {kind} {one[f'peak_{kind}_bytes']} computed, {peaks[i]} run,"
                              f" {'said to be exact' if one[f'{kind}_exact'] else 'flagged: ' + one['doubt']}", flush=True)
                counts[4] += one["allocated_exact"]
            print("{}{}: {} points, allocated equal {}, reserved equal {}, wrong and not flagged {}, allocated said to be exact {}".format(
                name, " (kept back)" if program.kept_back else "", *counts), flush=True)
            totals[program.kept_back] = [a + b for a, b in zip(totals[program.kept_back], counts)]
        for kept_back, counts in totals.items():
            print(f"{'kept back' if kept_back else 'the others'}: points, allocated, reserved, wrong and not flagged, exact: {counts}", flush=True)
        self.assertEqual([counts[3] for counts in totals.values()], [0, 0])


class Quick(Points):
    def test_points_of_a_small_program_are_equal_to_runs_or_flagged(self):
        self.check_programs(["lstm"], 6)


class Slow(Points):
    def test_points_are_equal_to_runs_or_flagged(self):
        self.check_programs(ONLY or fit_programs.PROGRAMS, POINTS)


import fit_programs  # noqa: E402 - beside this file

if __name__ == "__main__":
    for word in ("--build", "--points", "--only"):
        if word in sys.argv:
            at = sys.argv.index(word)
            del sys.argv[at:at + 2]
    unittest.main(verbosity=2)
