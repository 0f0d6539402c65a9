"""The report of a run whose repeating steps were not watched, and that of the same run watched in full: field by field equal.

    python tests/integration/test_steady.py --build BUILD_FOLDER [Quick | All] [unittest arguments, as in -k accumulation]
"""
import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "harm"))
import harness

build = pathlib.Path("build").resolve()
# What differs from run to run, or by definition.
TIMES = {"time_ns", "steady_steps", "timeline", "command", "pid"}


def differences(steady, watched, path=""):
    if type(steady) is not type(watched):
        return [f"{path}: {steady!r} instead of {watched!r}"]
    if isinstance(steady, dict):
        keys = (steady.keys() | watched.keys()) - TIMES
        missing = [f"{path}.{key}: only {'watched' if key in watched else 'steady'}" for key in keys if
                   (key in steady) != (key in watched)]
        return missing + [line for key in sorted(keys) if key in steady and key in watched
                          for line in differences(steady[key], watched[key], f"{path}.{key}")]
    if isinstance(steady, list):
        if len(steady) != len(watched):
            return [f"{path}: {len(steady)} entries instead of {len(watched)}: {steady!r} instead of {watched!r}"[:2000]]
        return [line for i, pair in enumerate(zip(steady, watched)) for line in differences(*pair, f"{path}[{i}]")]
    return [] if steady == watched else [f"{path}: {steady!r} instead of {watched!r}"]


class Base:
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-steady"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        command = [build / "bin/oomdiag", "run", "--device", harness.DEVICE, "--folder", cls.folder / "runs", "--"]
        cls.server = harness.Server(command, dict(os.environ), cls.folder, HERE / "steady_programs.py")
        cls.addClassCleanup(cls.server.end)
        cls.server.wait_until_ready()

    def run_once(self, name, every_step):
        folder = self.folder / f"oomdiag-{name}-{every_step}"
        folder.mkdir(mode=0o700)
        outcome = self.server.run(program=name, folder=str(folder), output=str(folder / "said"),
                                  environment={"OOMDIAG_EVERY_STEP": every_step})
        report, done = harness.report_of(build / "bin/oomdiag", folder)
        self.assertIsNotNone(report, done.stderr + outcome.stderr)
        self.assertEqual(report["replay_error_bytes"], 0)
        return report

    def check(self, name, steady):
        watched, learned = self.run_once(name, "1"), self.run_once(name, "0")
        self.assertEqual(watched["steady_steps"], 0)
        if steady:
            self.assertGreater(learned["steady_steps"], 5)
        found = differences(learned, watched)
        self.assertFalse(found, "\n".join(found))


class All(Base, unittest.TestCase):
    pass


class Quick(Base, unittest.TestCase):
    """Those that show most in half a minute."""


for name, program in harness.find_programs(HERE / "steady_programs.py", steady=True, quick=False).items():
    for group in (Quick, All) if program.quick else (All,):
        setattr(group, f"test_{name}", lambda self, name=name, steady=program.steady: self.check(name, steady))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=["test_steady.py", *rest], verbosity=2)
