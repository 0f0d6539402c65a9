"""oomdiag fix: every figure that it prints is that of the program with the printed lines in it, run on its own.

Usage: test_fix.py --build BUILD [GROUP]. Runs on the virtual device.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import fix_programs

BUILD = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]) if "--build" in sys.argv else pathlib.Path("build")
OOMDIAG = BUILD / "bin" / "oomdiag"
CARD = ["--device", "rtx3060"]


class Fix(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def oomdiag(self, *arguments, **environment):
        return subprocess.run([OOMDIAG, *map(str, arguments)], capture_output=True, text=True, cwd=self.folder,
                              env=os.environ | environment, timeout=800)

    def write(self, text):
        file = self.folder / "program.py"
        file.write_text(text)
        return file

    def peaks(self, text, memory="16TiB", **environment):
        """Peaks of a run on its own, as PyTorch tells them; None where it runs out of memory."""
        result = self.oomdiag("run", *CARD, "--memory", memory, "--no-progress", "--", "python", self.write(text), **environment)
        for line in result.stdout.splitlines():
            if line.startswith("PEAK"):
                return tuple(int(word) for word in line.split()[1:])
        self.assertIn("out of memory", result.stderr)
        return None

    def fix(self, text, memory, code=0):
        result = self.oomdiag("fix", *CARD, "--memory", memory, "--json", "--", "python", self.write(text))
        self.assertEqual(result.returncode, code, result.stderr + result.stdout)
        found = json.loads(result.stdout)
        self.assertEqual(found["schema"], "oomdiag-fix/1")
        return found

    def check_pasted(self, program, share):
        """All that was measured, pasted and run on its own: at most `share` of what the program takes is there."""
        allocated, _ = self.peaks(fix_programs.as_it_is(program))
        memory = int(allocated * share) + 200 * 2**20  # and the context
        found = self.fix(fix_programs.as_it_is(program), memory)
        self.assertEqual(found["before"]["peak_allocated_bytes"], allocated)
        proved = [one for one in found["remedies"] if one["unproved"] is None]
        for remedy in proved:
            with self.subTest(remedy["label"]):
                lines = remedy["how"]
                exported = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
                pasted = fix_programs.paste(program, lines)
                self.assertEqual(self.peaks(pasted, memory if remedy["fits"] else "16TiB", **exported),
                                 (remedy["measured_peak_bytes"], remedy["measured_reserved_bytes"]))
        return {"+".join(one["ids"]): one for one in found["remedies"]}


class Quick(Fix):
    def test_activations_are_helped_by_checkpoints_and_autocast(self):
        found = self.check_pasted(fix_programs.ACTIVATIONS, 0.7)
        for id in "checkpoint", "autocast_bf16":
            self.assertTrue(found[id]["fits"], id)
        self.assertFalse(found["foreach_off"]["fits"])


class Slow(Fix):
    def test_an_optimizer_step_is_helped_by_fused_or_loops(self):
        found = self.check_pasted(fix_programs.OPTIMIZER, 0.9)
        self.assertTrue(found["fused_optimizer"]["fits"])
        self.assertTrue(found["foreach_off"]["fits"])

    def test_gradients_that_are_kept(self):
        found = self.check_pasted(fix_programs.KEPT_GRADIENTS, 0.97)
        self.assertTrue(found["set_to_none"]["fits"])

    def test_images(self):
        found = self.check_pasted(fix_programs.IMAGES, 0.8)
        self.assertTrue(found["relu_in_place"]["fits"])

    def test_inference(self):
        found = self.check_pasted(fix_programs.INFERENCE, 0.5)
        self.assertTrue(found["no_grad"]["fits"])


if __name__ == "__main__":
    if "--build" in sys.argv:
        del sys.argv[sys.argv.index("--build"):sys.argv.index("--build") + 2]
    unittest.main(verbosity=2)
