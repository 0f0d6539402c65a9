"""What a report prints is what was tested: the lines of each predicted fix, pasted verbatim, give the peak that is printed.

Usage: test_pasted.py --build BUILD [Quick|Slow]. Runs on the virtual device.
"""
import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import fix_programs
import pasting

BUILD = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]).absolute() if "--build" in sys.argv else pathlib.Path("build").absolute()
OOMDIAG = BUILD / "bin" / "oomdiag"
TOLERANCE = 0.1  # of a prediction from a complete step: docs/trust.md
MEANT = {"model", "optimizer", "loss", "y", "state", "x", "torch"}  # that lines assign on purpose
SHARES = {"gpt2": 0.8, "resnet50": 0.5, "llama": 0.9, "optimizer": 0.9, "kept_gradients": 0.97}  # of its peak, that there is


class NoHostMemory(Exception):
    """Activations are offloaded to memory of this machine, which is there."""


class Pasted(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, text, memory, *options, **environment):
        file = self.folder / "program.py"
        file.write_text(text)
        return subprocess.run([OOMDIAG, "run", "--device", "rtx3060", "--memory", str(memory), "--no-progress", *options, "--",
                               sys.executable, file], capture_output=True, text=True, cwd=self.folder, env=os.environ | environment)

    def peak(self, text, **environment):
        result = self.run_program(text, "16TiB", "-o", "whole.json", **environment)
        peaks = [line for line in result.stdout.splitlines() if line.startswith("PEAK")]
        if "in pack_to_cpu" in result.stderr and "cudaErrorMemoryAllocation" in result.stderr:
            raise NoHostMemory
        self.assertTrue(peaks, text + result.stderr[-2000:])
        return int(peaks[0].split()[1])

    def workspace(self):
        """At the peak of the newest whole run."""
        report = json.loads((self.folder / "whole.json").read_text())
        return report["devices"][report["main_device"]]["categories"]["workspace"]

    def fixes_of(self, name, program, peak):
        memory = int(peak * SHARES.get(name, 0.7)) + 200 * 2**20  # and the context
        self.run_program(fix_programs.as_it_is(program), memory, "--complete", "-o", "report.json")
        report = json.loads((self.folder / "report.json").read_text())
        self.assertEqual(report["outcome"], "out_of_memory", name)
        return [fix for fix in report["devices"][report["main_device"]]["fixes"] if fix["how"]]

    def check_code(self, program, fix):
        """The lines are Python, and leave the program's own names alone."""
        code = pasting.as_code(fix["how"])
        if code is None:
            return
        taken = pasting.names_bound(fix_programs.as_it_is(program)) - MEANT
        self.assertFalse(pasting.names_bound(code) & taken, fix["how"])

    def check(self, name):
        program, pasted = getattr(fix_programs, name.upper()), []
        before, workspace = self.peak(fix_programs.as_it_is(program)), self.workspace()
        for fix in self.fixes_of(name, program, before):
            with self.subTest(f"{name}: {fix['label']}"):
                self.check_code(program, fix)
                try:
                    text = fix_programs.as_it_is(pasting.paste(program, fix["how"]))
                except pasting.NoPlace:
                    continue
                ast.parse(text)
                try:
                    peak = self.peak(text, **pasting.environment_of(fix["how"]))
                except NoHostMemory:
                    print(f"{name:16} {fix['id']:22} left out: this machine has too little memory to be offloaded to")
                    continue
                predicted, frees = fix["predicted_peak_bytes"], fix["frees_bytes"]
                pasted.append(fix["id"])
                kind = " at least" if fix["at_least"] else f", frees {frees / 2**20:.1f}" if frees else ""
                print(f"{name:16} {fix['id']:22} {predicted / 2**20:9.1f} {peak / 2**20:9.1f} MiB{kind}")
                if frees:  # the report says this alone
                    self.assertGreaterEqual(before - peak, frees * (1 - TOLERANCE))
                elif fix["at_least"]:
                    self.assertGreaterEqual(peak * 1.001, predicted)
                else:  # cuDNN takes another workspace for another type: a prediction leaves it as it is
                    other = workspace if fix["id"].startswith("autocast") else 0
                    self.assertLess(abs(peak - predicted), TOLERANCE * peak + other)
        return pasted


class Quick(Pasted):
    def test_activations(self):
        self.assertIn("checkpoint", self.check("activations"))


class Slow(Pasted):
    """Every program; `test_<name>` is made for each."""


for each in fix_programs.ALL:
    if each != "growing":  # in a leak no fix has a peak of its own
        setattr(Slow, f"test_{each}", lambda self, each=each: self.assertTrue(self.check(each)))


if __name__ == "__main__":
    if "--build" in sys.argv:
        del sys.argv[sys.argv.index("--build"):sys.argv.index("--build") + 2]
    unittest.main(verbosity=2)
