"""Whether "8 fits; up to 37 should fit (predicted)" is true, for programs of many kinds (fit_programs.py, architectures.py).

Usage: test_batch_line.py --build BUILD [Quick|Slow|Slow.test_…]. Runs on the virtual device. Each claim is run with the largest batch that it
names; it is false where that runs out of memory.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fit_programs  # noqa: E402 - beside this file
import architectures  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop(sys.argv.index("--build") + 1)).absolute()
sys.argv.remove("--build")
OOMDIAG = BUILD / "bin" / "oomdiag"
SECONDS = {"length": 64, "size": 32}  # of programs of two dimensions
GPUS = (("rtx3060", "1GiB", 2), ("rtx4090", "2GiB", 8), ("a100-80", "3GiB", 24))  # with so much memory; the batch that is run


def command_of(name, batch):
    if name in architectures.PROGRAMS:
        return [architectures.__file__, name, str(batch)]
    second = fit_programs.PROGRAMS[name].second
    return [fit_programs.__file__, name, str(batch)] + ([str(SECONDS[second.split("=")[0]])] if second else [])


def run(name, gpu, memory, batch):
    """The exit code, and the report."""
    with tempfile.TemporaryDirectory(prefix="oomdiag-batch-") as folder:
        report = pathlib.Path(folder) / "report.json"
        done = subprocess.run([OOMDIAG, "run", "--device", gpu, "--memory", memory, "--no-progress", "-o", report, "--folder", folder,
                               "--", sys.executable, *command_of(name, batch)], capture_output=True, text=True, timeout=900)
        return done.returncode, json.loads(report.read_text()) if report.exists() else {}


def claim_of(report):
    """The batch that was run and the largest that should fit, or None where the report names none."""
    if "main_device" not in report:
        return None
    batch = report["devices"][report["main_device"]].get("batch")
    return batch and (batch["batch"], batch["largest_batch"]) if batch and batch["largest_batch"] > batch["batch"] else None


class BatchLine(unittest.TestCase):
    def check(self, names, gpus):
        claims, false = 0, []
        for name in names:
            for gpu, memory, batch in gpus:
                code, report = run(name, gpu, memory, batch)
                claim = claim_of(report) if code == 0 else None
                if claim is None:
                    print(f"  {name} on {gpu} with {memory}, batch {batch}: no claim, exit {code}", flush=True)
                    continue
                claims += 1
                largest = claim[1]
                code, report = run(name, gpu, memory, largest)
                above, _ = run(name, gpu, memory, largest + max(1, largest // 50))
                print(f"{'ok ' if code == 0 else 'NO '} {name} on {gpu} with {memory}: {claim[0]} fits, up to {largest} should; exit {code};"
                      f" 2 % above: exit {above}", flush=True)
                if code != 0:
                    false.append(name)
        print(f"{claims} claims, {len(false)} false", flush=True)
        self.assertEqual(false, [])


class Quick(BatchLine):
    def test_the_largest_batch_of_a_small_program_fits(self):
        self.check(["lstm"], GPUS[:1])


class Slow(BatchLine):
    def test_the_largest_batch_that_a_report_names_fits(self):
        self.check(fit_programs.PROGRAMS, GPUS)

    def test_the_largest_batch_of_an_architecture_that_the_rules_do_not_know_fits(self):
        self.check(architectures.PROGRAMS, GPUS[1:2])


if __name__ == "__main__":
    unittest.main(verbosity=2)
