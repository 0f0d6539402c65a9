"""The preloaded shim in programs that it cannot record: they run as ever, and it says why.

    python tests/preload/test_preload.py --build BUILD_FOLDER
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

build = pathlib.Path("build")
BEFORE, AFTER = "error 35, 0 GPUs", "error 0, 3 GPUs"  # as without a runtime, and the runtime's own answer


class PreloadTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.torch = self.folder / "torch"
        (self.torch / "lib").mkdir(parents=True)
        shutil.copy(build / "tests/preload/lib/libtorch_cpu.so", self.torch / "lib")

    def ask(self, major="13", program="oomdiag_test_asks", **more):
        """What the program prints, and what the shim reports to the launcher."""
        node = f"libcudart.so.{major}"
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        environment = {"LD_PRELOAD": str(build / "lib/liboomdiag_preload.so"), "OOMDIAG_OUTPUT": str(run),
                       "OOMDIAG_RECORDER": "/nowhere/liboomdiag.so", "OOMDIAG_RECORDER_FOR": "2.15.0+cu132",
                       "ASAN_OPTIONS": "verify_asan_link_order=0",  # of a sanitized build: the shim comes before it
                       **more}
        done = subprocess.run([build / "bin" / program, node, self.torch / "lib/libtorch_cpu.so",
                               build / "tests/preload/lib" / node], env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.splitlines(), (run / "loaded").read_text()

    def test_who_asks_before_the_runtime_is_there_does_not_spoil_it_for_later(self):
        answers, _ = self.ask()
        self.assertEqual(answers, [BEFORE, AFTER])

    def test_a_torch_for_a_major_of_cuda_that_is_not_recorded_is_named(self):
        for runtime, major in ("11.0", "11"), ("14", "14"):
            answers, word = self.ask(runtime)
            self.assertEqual(answers, [BEFORE, AFTER])
            self.assertRegex(word, f"torch is built for CUDA {major}, and oomdiag records with CUDA 12 and 13")

    def test_a_torch_for_cuda_12_is_asked_for_as_one_for_13(self):
        (self.torch / "version.py").write_text("__version__ = '2.15.0+cu128'\n")
        answers, word = self.ask("12")
        self.assertEqual(answers, [BEFORE, AFTER])
        self.assertIn("/nowhere/liboomdiag.so", word)

    def test_what_is_preloaded_needs_the_c_library_alone(self):
        """Each child process, a shell's `true` too, loads what these need: another library costs it as much as one of ours."""
        if not (build / "lib/virtual_device").exists():
            self.skipTest("a sanitized build has no virtual device")
        libraries = [build / "lib/liboomdiag_preload.so"] + [
            library for library in sorted((build / "lib/virtual_device").glob("*.so*"))
            if library.name not in ("liboomdiag_cudnn_by_name.so", "liboomdiag_forget.so")]  # not preloaded
        own = {library.name for library in libraries}
        self.assertGreater(len(own), 12)
        for library in libraries:
            dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
            needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
            self.assertLessEqual(needed - own, {"libc.so.6", "ld-linux-x86-64.so.2"}, library.name)

    def test_why_there_is_no_recorder_is_passed_on(self):
        answers, word = self.ask(OOMDIAG_NO_RECORDER="there is no compiler")
        self.assertEqual(answers, [BEFORE, AFTER])
        self.assertEqual(word, "there is no compiler\n")

    def test_a_second_shorter_reason_leaves_the_first_one_as_it_is(self):
        self.ask(OOMDIAG_NO_RECORDER="there is no compiler")
        self.assertEqual(self.ask(OOMDIAG_NO_RECORDER="no")[1], "there is no compiler\nno\n")

    def test_a_torch_that_does_not_say_what_it_is(self):
        answers, word = self.ask()
        self.assertEqual(answers[1], AFTER)
        self.assertIn(f"no file in '{self.torch}' says which torch this is", word)

    def test_an_archive_of_libtorch_is_known_by_its_build_version_or_its_headers(self):
        (self.torch / "build-version").write_text("2.99.0+cu130\n")
        self.assertIn("the program has torch 2.99.0+cu130", self.ask()[1])
        (self.torch / "build-version").unlink()
        header = self.torch / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 98\n#define TORCH_VERSION_PATCH 1\n")
        self.assertIn("the program has torch 2.98.1", self.ask()[1])

    def test_a_recorder_that_cannot_be_loaded(self):
        (self.torch / "version.py").write_text("__version__ = '2.15.0+cu132'\n")
        answers, word = self.ask()
        self.assertEqual(answers[1], AFTER)
        self.assertIn("/nowhere/liboomdiag.so", word)

    def test_a_free_threaded_python_is_rejected(self):
        (self.torch / "version.py").write_text("__version__ = '2.15.0+cu132'\n")
        answers, word = self.ask(program="oomdiag_test_asks_free_threaded")
        self.assertEqual(answers[1], AFTER)
        self.assertRegex(word, "this Python is a free-threaded build.*take the ordinary build")
        self.assertEqual(word.count("\n"), 1)


FINDINGS = {"address": "heap-use-after-free", "leak": "detected memory leaks", "thread": "data race",
            "undefined": "signed integer overflow"}


class SanitizerTest(unittest.TestCase):
    """Programs that were built with a sanitizer start, and find what they would find alone."""

    def setUp(self):
        if not (build / "lib/virtual_device").exists():
            self.skipTest("a sanitized build has no virtual device")
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def compare(self, *command, **more):
        """The outcome under `oomdiag run` on a virtual GPU, which is that of the command alone."""
        def run(*before):
            return subprocess.run([*before, *command], capture_output=True, text=True, env=os.environ | more)
        recorded = run(build / "bin/oomdiag", "run", "--device", "rtx3060", "--folder", self.folder, "--")
        alone = run()
        self.assertEqual((recorded.returncode, recorded.stdout), (alone.returncode, alone.stdout), recorded.stderr)
        return recorded

    def programs(self):
        found = {name: build / f"bin/oomdiag_test_sanitized_{name}" for name in FINDINGS}
        return {name: program for name, program in found.items() if program.exists()}

    def test_a_program_with_a_sanitizer_starts(self):
        for name, program in self.programs().items():
            with self.subTest(name):
                self.assertEqual(self.compare(program).returncode, 3)

    def test_so_does_one_that_a_shell_script_starts_with_options_of_its_own(self):
        for name, program in self.programs().items():
            with self.subTest(name):
                script = f"ASAN_OPTIONS=color=never '{program}'; echo ended with $?"
                self.assertIn("ended with 3", self.compare("sh", "-c", script).stdout)

    def test_what_the_sanitizer_is_there_to_find_is_found(self):
        for name, program in self.programs().items():
            with self.subTest(name):
                self.assertIn(FINDINGS[name], self.compare(program, name).stderr)

    def test_a_sanitizer_that_is_preloaded_into_a_program_without_one_comes_in_too(self):
        runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(runtime):
            self.skipTest("there is no libasan.so to preload")
        self.assertEqual(self.compare("sh", "-c", "exit 5", LD_PRELOAD=os.path.realpath(runtime)).returncode, 5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=["test_preload.py", *rest], verbosity=2)
