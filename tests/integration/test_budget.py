"""oomdiag.budget in the tests of a project, on a virtual GPU: what pytest says.

    python tests/integration/test_budget.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest


PROJECT = """
    import oomdiag, pytest, torch
    from torch import nn

    def step(batch):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
        model(torch.randn(batch, 1024, device="cuda")).sum().backward()

    def test_a_small_step_fits():
        with oomdiag.budget("64MiB"):
            step(64)

    def test_a_large_step_does_not():
        with oomdiag.budget("128MiB"):
            step(16384)

    def test_what_lived_before_counts_in_total_only():
        fixture = torch.empty(64 << 20, device="cuda")
        with oomdiag.budget("512MiB", total="1GiB"):
            step(64)
        with oomdiag.budget("512MiB", total="200MiB"):
            step(64)

    def test_a_smaller_peak_after_a_larger_one():
        with oomdiag.budget(1 << 20):
            torch.empty(1 << 20, device="cuda")

    def test_other_failures_are_as_they_were():
        with oomdiag.budget("1GiB"):
            assert 1 == 2

    def test_sizes():
        assert oomdiag._budget.parse_size("1.5 GiB") == 3 << 29
        with pytest.raises(ValueError, match="no size"):
            oomdiag._budget.parse_size("much")
"""


@unittest.skipUnless(importlib.util.find_spec("pytest"), "pytest is not installed")
class Budget(unittest.TestCase):
    def pytest(self, *arguments, TMPDIR=tempfile.gettempdir(), **files):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "test_memory.py").write_text(textwrap.dedent(PROJECT))
            for name, text in files.items():
                pathlib.Path(folder, name.replace("_", ".")).write_text(text)
            environment = {**os.environ, "TMPDIR": TMPDIR, "PYTHONPATH": str(build / "lib/python"), "OOMDIAG_LIBRARY": str(build / "lib/liboomdiag.so")}
            done = subprocess.run([sys.executable, "-m", "pytest", "-p", "oomdiag._pytest_plugin", "-p", "no:cacheprovider", *arguments],
                                  cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
            self.left = sorted(path.name for path in pathlib.Path(folder).iterdir() if path.name != "__pycache__")
        return done

    def test_a_test_above_its_budget_fails_with_the_holders_and_the_others_are_as_they_were(self):
        done = self.pytest("--oomdiag-device", "rtx3060")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("4 failed, 2 passed", done.stdout)
        self.assertIn("on a virtual rtx3060", done.stdout)
        self.assertRegex(done.stdout, r"test_a_large_step_does_not: this block adds \d+\.\d\d MiB, above its budget of 128\.00 MiB by ")
        self.assertRegex(done.stdout, r"at the peak: in backward, step \d, .*Backward0")
        self.assertRegex(done.stdout, r"who holds it: .*activations \(saved for backward\) \d+\.\d\d MiB")
        self.assertRegex(done.stdout, r"256\.00 MiB .* test_memory\.py:\d+ +\[16384, 4096\] float32")
        self.assertRegex(done.stdout, r"this block adds 4\.00 MiB, above its budget of 1\.00 MiB by 3\.00 MiB \(.* lived before it\)\nwho held it is not known")
        self.assertRegex(done.stdout, r"counts_in_total_only: peak of \d+\.\d\d MiB is above the budget of 200\.00 MiB in total by .* \(2\d\d\.\d\d MiB lived before this block")
        self.assertIn("assert 1 == 2", done.stdout)
        self.assertEqual(self.left, ["test_memory.py"])

    def test_the_folder_that_the_report_names_last_is_there(self):
        with tempfile.TemporaryDirectory() as temporary:
            old, young = pathlib.Path(temporary, "oomdiag-pytest-old"), pathlib.Path(temporary, "oomdiag-pytest-young")
            for folder, age in (old, 9000), (young, 60), (pathlib.Path(temporary, "oomdiag-pytest-younger"), 30):
                folder.mkdir()
                os.utime(folder, times=(time.time() - age,) * 2)
            done = self.pytest("--oomdiag-device", "rtx3060", "-k", "small_step", TMPDIR=temporary)
            named = re.search(r"next: oomdiag \w+ (\S+)", done.stdout + done.stderr)
            self.assertTrue(named, done.stdout + done.stderr)
            self.assertTrue(pathlib.Path(named[1], "trace").exists(), named[1])
            self.assertEqual((old.exists(), young.exists()), (False, True))

    def test_the_gpu_may_stand_in_the_configuration(self):
        done = self.pytest("-k", "sizes", pytest_ini="[pytest]\noomdiag_device = t4\n")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("on a virtual t4", done.stdout)

    def test_without_a_gpu_the_way_to_one_is_said(self):
        done = self.pytest("-k", "small_step")
        self.assertEqual(done.returncode, 1)
        self.assertIn("--oomdiag-device", done.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    build = arguments.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
