"""What is built for a torch at its first use is built once, also where two start at the same time.

    python tests/packaging/test_first_use.py --build BUILD --python INTERPRETER [unittest arguments]
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import textwrap
import unittest

HERE = pathlib.Path(__file__).resolve().parent
options = argparse.Namespace()

# Stands for g++: takes a second for each unit, and notes what it was asked.
SLOW_COMPILER = """#!/bin/sh
case "$*" in
  *-dumpversion*) echo 12; exit ;;
  "-shared "*) what=link ;;
  *-DNDEBUG*) what=unit; sleep 1 ;;  # as torch was compiled: its classes have other members without
  *) what=unit_for_another_torch ;;
esac
echo $what >>"$COMPILER_LOG"
case "$COMPILER $*" in "of C++23 "*-std=c++20*) echo "std.h:1: error: needs C++23" >&2; exit 1 ;; esac
[ "$COMPILER" != broken ] || { echo "unit.cpp:1: error: broken" >&2; exit 1; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done
if [ $what = link ]; then exec cc -shared -o "$output" -x c /dev/null; else : >"$output"; fi
"""


class FirstUse(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.environment = os.environ | {"XDG_CACHE_HOME": str(self.folder / "cache")}

    def start_two(self, *command):
        """The same command twice at once; stdout, stderr and exit code of each."""
        started = [subprocess.Popen([*map(str, command)], cwd=self.folder, env=self.environment, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        ended = []
        for process in started:
            out, err = process.communicate(timeout=800)
            ended.append((out, err, process.returncode))
        return ended

    def built(self):
        return [path for path in (self.folder / "cache/oomdiag/recorders").glob("*") if path.suffix != ".lock"]

    def assert_built_once(self, ended):
        self.assertEqual([code for *_, code in ended], [0, 0], ended)
        self.assertEqual(sum("built in" in err for _, err, _ in ended), 1, ended)
        self.assertEqual(len(self.built()), 1)


class WithACompilerThatPretends(FirstUse):
    """A torch that has only what is looked at, of a version that no build is for."""

    def setUp(self):
        super().setUp()
        torch = self.folder / "packages" / "torch"
        (torch / "include" / "ATen").mkdir(parents=True)
        (torch / "include" / "ATen" / "record_function.h").touch()
        (torch / "version.py").write_text("__version__ = '2.99.1+cu130'\ncuda = '13.0'\n")
        (torch / "__init__.py").write_text(textwrap.dedent("""
            class _C:
                @staticmethod
                def _cuda_getArchFlags(): return "sm_75 sm_90"
        """))
        compiler = self.folder / "slow-g++"
        compiler.write_text(SLOW_COMPILER)
        compiler.chmod(0o755)
        self.log = self.folder / "compiler.log"
        self.environment |= {"PYTHONPATH": str(torch.parent), "CXX": str(compiler), "COMPILER_LOG": str(self.log)}

    def test_two_that_start_at_once_build_once(self):
        ended = self.start_two(options.build / "bin" / "oomdiag", "recorder", options.python)
        self.assert_built_once(ended)
        self.assertEqual(sorted(self.log.read_text().split()), ["link"] * 2 + ["unit"] * 4)
        answers = [json.loads(out) for out, *_ in ended]
        self.assertEqual(answers[0], answers[1])
        self.assertTrue(pathlib.Path(answers[0]["recorder"]).exists())

    def recorder(self):
        """`oomdiag recorder`, once."""
        return subprocess.run([options.build / "bin" / "oomdiag", "recorder", options.python], cwd=self.folder,
                              env=self.environment, text=True, capture_output=True, timeout=100)

    def test_headers_that_want_more_than_cpp20_are_compiled_as_cpp23(self):
        self.environment["COMPILER"] = "of C++23"
        done = self.recorder()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(self.log.read_text().split()), ["link"] * 2 + ["unit"] * 8)
        self.assertEqual([path.name for path in self.built()[0].iterdir() if path.suffix in (".log", ".o", ".cpp")], [])

    def test_a_recorder_that_another_user_could_have_put_there_is_not_taken(self):
        self.addCleanup(os.umask, os.umask(0))  # what is built is the user's alone all the same
        recorder = pathlib.Path(json.loads(self.recorder().stdout)["recorder"])
        self.assertEqual(self.recorder().returncode, 0)
        for path in (recorder, recorder.parent, recorder.parent.parent, recorder.with_name("liboomdiag_forget.so")):
            with self.subTest(path.name):
                mode = path.stat().st_mode
                self.assertEqual(mode & 0o022, 0)
                path.chmod(mode | 0o020)
                self.assert_rejected(self.recorder(), f"'{path}' may be written by others")
                path.chmod(mode)
                if os.geteuid() == 0:
                    os.chown(path, 65534, 65534)
                    self.assert_rejected(self.recorder(), f"'{path}' belongs to")
                    os.chown(path, 0, 0)
        self.assertEqual(self.recorder().returncode, 0)

    def assert_rejected(self, done, why):
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertIn(why, done.stderr)
        self.assertIn("hint: oomdiag loads code from there", done.stderr)

    def test_a_compiler_that_fails_is_reported_with_its_line_and_what_still_works(self):
        self.environment["COMPILER"] = "broken"
        done = self.recorder()
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("unit.cpp:1: error: broken", done.stderr)
        self.assertIn("the virtual device still works", done.stderr)
        self.assertEqual([path.suffix for path in self.built()], [".building"])


class WithTheTorchOfTheBuild(FirstUse):
    """Takes about two minutes: the recorder is compiled."""

    def test_two_runs_that_start_at_once_have_a_report_each(self):
        prefix = self.folder / "prefix"
        subprocess.run(["cmake", "--install", options.build, "--prefix", prefix, "--strip"], check=True, capture_output=True)
        ended = self.start_two(prefix / "bin" / "oomdiag", "run", "--device", "rtx4090", "--no-progress", "--", options.python,
                               HERE / "train.py", "--batch-size", 8)
        self.assert_built_once(ended)
        for out, err, _ in ended:
            self.assertIn(f"{json.loads(out)['allocated'] / 2**20:.2f} MiB allocated", err)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--python", type=pathlib.Path, required=True)
    options, rest = parser.parse_known_args()
    unittest.main(argv=["test_first_use.py", *rest], verbosity=2)
