"""As test_harm.py, of programs that start processes which import torch anew.

    python tests/harm/test_slow.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness

build = pathlib.Path("build").resolve()


class Slow(unittest.TestCase):
    maxDiff = None

    def check(self, name):
        program = [sys.executable, "-B", harness.HERE / "slow_programs.py", name]
        with tempfile.TemporaryDirectory() as folder:
            environment, _short = harness.plain_environment(build, folder)
            without = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
            done = subprocess.run([build / "bin/oomdiag", "run", "--device", harness.DEVICE, "--folder", folder, "--", *program],
                                  env=dict(os.environ), capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, harness.mask(done.stdout)), (without.returncode, harness.mask(without.stdout)),
                         done.stderr + without.stderr)
        self.assertRegex(done.stdout, r"peaks \d+")
        self.assertRegex(done.stderr, re.compile("^oomdiag: (fits|[0-9]+ processes)", re.MULTILINE))


for name in ("spawned_loader", "loader_of_a_fork_server", "spawned_ranks", "compiled"):
    setattr(Slow, f"test_{name}", lambda self, name=name: self.check(name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=["test_slow.py", *rest], verbosity=2)
