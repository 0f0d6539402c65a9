"""A C++ project that finds oomdiag by find_package is built, and names places of its run.

    python tests/packaging/test_cpp.py --prefix PREFIX --python INTERPRETER --torch SITE_PACKAGES/torch [unittest arguments]

PREFIX: of cmake --install, oomdiag/_native of the wheel, or a build folder.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile
import unittest

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/libtorch"
options = argparse.Namespace()


def run(*command, folder):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder, timeout=800)


class FindPackage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def configure(self, python):
        return run("cmake", "-S", EXAMPLE, "-B", self.folder / "build", f"-DCMAKE_PREFIX_PATH={options.prefix}",
                   f"-DOOMDIAG_PYTHON={python}", f"-DTORCH={options.torch}", folder=self.folder)

    def test_an_example_is_built_and_explains_its_oom(self):
        for done in (self.configure(options.python), run("cmake", "--build", self.folder / "build", folder=self.folder)):
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        report = self.folder / "report.json"
        done = run(options.prefix / "bin" / "oomdiag", "run", "--device", "rtx3060", "--no-progress", "-o", report, "--",
                   self.folder / "build" / "example", folder=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("out of memory", done.stdout.splitlines()[0])
        self.assertEqual(done.stdout.splitlines()[-1], f"peak {4 << 20}")
        self.assertEqual([mark["name"] for mark in json.loads(report.read_text())["devices"][0]["marks"]], ["weights are there"])

    def test_a_python_without_torch_is_named(self):
        for python in "python3", "other":
            done = self.configure(self.folder / python)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("set OOMDIAG_PYTHON", " ".join(done.stderr.split()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    for name in "prefix", "python", "torch":
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    options, rest = parser.parse_known_args()
    unittest.main(argv=["test_cpp.py", *rest], verbosity=2)
