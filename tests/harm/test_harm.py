"""The matrix of harm: dozens of programs with and without the recorder on the same virtual GPU. Exit code, output, exception
text and peaks are equal, and a readable report follows, or one line that says why there is none.

    python tests/harm/test_harm.py --build BUILD_FOLDER [--under COMMAND] [unittest arguments, as in -k nested]

--under: a command that starts the recorded side, as scripts/sanitize_recorder has one.
"""
import argparse
import pathlib
import re
import shlex
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness

build = pathlib.Path("build").resolve()
under = []
both = None
PROGRAMS = harness.find_programs(harness.HERE / "programs.py", report=True, recorded=None)


class Harm(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        global both
        both = harness.Both(build, under)
        cls.addClassCleanup(both.end)

    def check(self, name, program):
        with_us, without, folder = both.run(name)
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.assertEqual(with_us.comparable(), without.comparable(), with_us.stderr)
        if program.report is False:
            self.assertLessEqual(len(with_us.said_by_oomdiag()), 1, with_us.stderr)
            return self.assertRegex(with_us.stderr, program.recorded or "^")
        self.assertLessEqual(len(with_us.said_by_oomdiag()), 1 if program.report is None else 0, with_us.stderr)
        self.check_report(name, folder, without.stdout)

    def check_report(self, name, folder, output):
        report, done = both.report(folder)
        if report is None:
            self.assertRegex(done.stderr, r"\Aoomdiag: error: .*\n(hint: .*\n)?\Z")
            return self.assertIsNone(PROGRAMS[name].report, done.stderr)
        peaks = re.findall(r"^peaks (\d+) (\d+)$", output, re.MULTILINE)
        if peaks:
            peak = report["peak"]
            self.assertEqual((peak["allocated_bytes"], peak["reserved_bytes"]), tuple(map(int, peaks[-1])))
        self.assertEqual(report["replay_error_bytes"], 0)


for name, program in PROGRAMS.items():
    setattr(Harm, f"test_{name}", lambda self, name=name, program=program: self.check(name, program))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    parser.add_argument("--under", type=shlex.split, default=under)
    known, rest = parser.parse_known_args()
    under = known.under
    build = known.build.resolve()
    unittest.main(argv=["test_harm.py", *rest], verbosity=2)
