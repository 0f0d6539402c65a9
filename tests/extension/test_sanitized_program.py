"""The recorder in a LibTorch program, both sanitized, does nothing that the sanitizer knows to be wrong.

    python tests/extension/test_sanitized_program.py --build BUILD_FOLDER --program PROGRAM --recorder LIBRARY
                                                     --sanitizer address,undefined|thread [unittest arguments]

Not sanitized are torch, the virtual device and the shim, which is a few lines that load the recorder.
"""
import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

RUNTIMES = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
REPORTS = re.compile(r"ERROR: (Address|Leak|Thread)Sanitizer|FATAL: |runtime error: ")
RACE = re.compile(r"WARNING: ThreadSanitizer: .*?SUMMARY: ThreadSanitizer", re.DOTALL)
ACCESS = re.compile(r"^  (?:Previous |)(?:\w+ )+of size .*?\n((?:    #.*\n)+)", re.MULTILINE | re.IGNORECASE)


def race_of_ours(said, recorder):
    """The first race with an access in the recorder, or none. Torch is not instrumented: what orders its own threads is not
    seen, so that what they do looks like races. That goes for a stack, too, on which torch has its variables where we had ours
    before: a race there is one of ours if both accesses are."""
    for report in RACE.finditer(said):
        ours = []
        for stack in ACCESS.findall(report.group()):
            frames = [frame for frame in stack.splitlines() if "libtsan" not in frame]
            ours.append(bool(frames) and recorder.name in frames[0])
        if any(ours) and (all(ours) or "Location is stack of" not in report.group()):
            return report.group()
    return None


class SanitizedTest(unittest.TestCase):
    """`build`, `program`, `recorder` and `sanitizer` are set by main()."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="oomdiag sanitized ")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def sample(self, model, *arguments, memory="", sanitized):
        """The sanitized program under `oomdiag run`, with the sanitized recorder or with the one that people use: how it ended,
        and its report."""
        folder = self.folder / ("sanitized" if sanitized else "plain")
        folder.mkdir()
        runtimes = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
                    for name in RUNTIMES[self.sanitizer]]
        recorder = f"OOMDIAG_RECORDER={shlex.quote(str(self.recorder))}" if sanitized else ""
        program = shlex.join([str(self.program), "--model", model, "--device", "cuda", *arguments])
        script = f"{recorder} LD_PRELOAD={':'.join(runtimes)}:$LD_PRELOAD exec {program}"
        # torch keeps what it has until the process ends
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "exitcode=0"}
        gpu = ["--memory", memory] if memory else []
        done = subprocess.run([self.build / "bin/oomdiag", "run", "--device", "rtx3060", *gpu, "--folder", folder,
                               "-o", folder / "report.json", "--no-progress", "--", "sh", "-c", script],
                              capture_output=True, text=True, env=os.environ | options, timeout=600)
        report = folder / "report.json"
        return done, json.loads(report.read_text()) if report.exists() else None

    def check(self, model, *arguments, memory=""):
        """Nothing is reported, and all ends as with the recorder that people use; the report is the same."""
        done, report = self.sample(model, *arguments, memory=memory, sanitized=True)
        self.assertIsNone(REPORTS.search(done.stderr), done.stderr[-6000:])
        self.assertIsNone(race_of_ours(done.stderr, self.recorder))
        plain, expected = self.sample(model, *arguments, memory=memory, sanitized=False)
        self.assertEqual(done.returncode, plain.returncode, done.stderr[-3000:])
        self.assertIsNotNone(report, done.stderr[-3000:])
        self.assertEqual(report["outcome"], expected["outcome"])
        self.assertEqual(report["devices"][0]["replay_error_bytes"], 0)
        gpu, same = report["devices"][0], expected["devices"][0]
        self.assertEqual(gpu["peak"]["allocated_bytes"], same["peak"]["allocated_bytes"])
        self.assertEqual([saved["bytes"] for saved in gpu["saved_tensors"]], [saved["bytes"] for saved in same["saved_tensors"]])


class Models(SanitizedTest):
    """Each of the samples, named by add_models()."""


def add_models(build):
    for model in json.loads((build / "share/models.json").read_text()):
        name = model["name"]
        setattr(Models, f"test_{name}", lambda self, name=name: self.check(name))


class OutOfMemory(SanitizedTest):
    def test_out_of_memory_in_forward_is_explained(self):
        self.check("deepcnn", "--batch", "4096", memory="1GiB")

    def test_out_of_memory_in_backward_is_explained(self):
        self.check("resnet50", memory="1GiB")


def main():
    parser = argparse.ArgumentParser()
    for name in ("--build", "--program", "--recorder"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    parser.add_argument("--sanitizer", choices=RUNTIMES, required=True)
    options, rest = parser.parse_known_args()
    for name, value in vars(options).items():
        setattr(SanitizedTest, name, value.resolve() if isinstance(value, pathlib.Path) else value)
    add_models(SanitizedTest.build)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
