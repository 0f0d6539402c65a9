"""Whether the border that `oomdiag fit` finds is that of runs with every value, for programs of many kinds (fit_programs.py).

Usage: test_borders.py --build BUILD [Quick|Slow] [--only NAME,NAME]. Runs on the virtual device. Each program gets three devices: with the
memory that its batches of 6, 12 and 18 take at most where there is enough. A border is the largest batch that fits; where a smaller one does not, it says so.
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fit_programs  # noqa: E402 - beside this file


def option(name, default):
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    sys.argv.pop(at)
    return sys.argv.pop(at)


BUILD = pathlib.Path(option("--build", "build")).absolute()
ONLY = [name for name in option("--only", "").split(",") if name]
OOMDIAG = BUILD / "bin" / "oomdiag"
PROGRAMS_FILE = pathlib.Path(__file__).resolve().parent / "fit_programs.py"
SECONDS = {"length": 48, "size": 32}  # of programs of two dimensions
BATCHES = range(1, 25)
MIB = 1 << 20
os.environ["KEPT_MIB"] = "256"  # as small a device as these programs need does not exist
FORKS = """
import os, sys
import torch, torch.optim, torch._dynamo
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import fit_programs
name, second = sys.argv[2], sys.argv[3:4]
for batch in range(1, 25):
    if os.fork() == 0:
        try:
            fit_programs.PROGRAMS[name](batch, *map(int, second))
            free, total = torch.cuda.mem_get_info()
            others = total - free - torch.cuda.memory_reserved()
            print("FITS", batch, torch.cuda.max_memory_reserved() + others, flush=True)
        except torch.OutOfMemoryError:
            pass
        os._exit(0)
    os.wait()
"""


def run_all(name, second, memory):
    """{batch: bytes that it takes of the device at most} of those that fit."""
    done = subprocess.run([OOMDIAG, "run", "--device", "rtx3060", "--memory", str(memory), "--no-progress", "--", sys.executable, "-c", FORKS,
                           PROGRAMS_FILE, name, *second], capture_output=True, text=True, timeout=3000, cwd="/tmp")
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("FITS")]
    return {int(batch): int(taken) for _, batch, taken in lines}


def find_border(name, second, memory):
    done = subprocess.run([OOMDIAG, "fit", "--device", "rtx3060", "--memory", str(memory), "--json", "--vary",
                           f"batch={BATCHES[0]}..{BATCHES[-1]}", "--", sys.executable, PROGRAMS_FILE, name, "{batch}", *second],
                          capture_output=True, text=True, timeout=3000, cwd="/tmp")
    if not done.stdout:
        raise AssertionError(done.stderr)
    found = json.loads(done.stdout)
    return found["largest"]["batch"] if found.get("largest") else None, found


class Borders(unittest.TestCase):
    def check(self, names, batches):
        count, wrong = 0, []
        for name in names:
            axis = fit_programs.PROGRAMS[name].second
            second = [str(SECONDS[axis.split("=")[0]])] if axis else []
            taken = run_all(name, second, 1 << 40)
            for batch in batches:
                memory = -(-taken[batch] // (2 * MIB)) * 2 * MIB
                real = run_all(name, second, memory)
                largest = max(real, default=None)
                found, answer = find_border(name, second, memory)
                count += 1
                runs = answer.get("runs")
                print(f"{'ok ' if found == largest else 'NO '} {name}, {memory // MIB} MiB: fit {found} in {runs} runs, every value"
                      f" {largest}{'' if len(real) == largest else ', not all below'}", flush=True)
                if found != largest:
                    wrong.append(name)
        print(f"{count} borders, {len(wrong)} wrong", flush=True)
        self.assertEqual(wrong, [])


class Quick(Borders):
    def test_the_border_of_a_small_program_is_that_of_runs_with_every_value(self):
        self.check(["lstm"], [6])


class Slow(Borders):
    def test_borders_are_those_of_runs_with_every_value(self):
        self.check(ONLY or fit_programs.PROGRAMS, [6, 12, 18])


if __name__ == "__main__":
    unittest.main(verbosity=2)
