"""The wheel for 64-bit ARM on an emulated processor (qemu-user): it answers as that of this machine does.

    python tests/packaging/test_aarch64.py [--wheel WHEEL] [--oomdiag COMMAND] [--unit-tests FOLDER] [unittest arguments]

WHEEL: of scripts/release (default: the newest in dist/). COMMAND: the oomdiag of this machine, which records what is read by both
(default: that of the x86_64 wheel beside WHEEL). FOLDER: with the unit tests, compiled for that processor (default: where
scripts/release leaves them). INTERPRETER has a torch. Ends with 77 where nothing could be run.
"""
import argparse
import importlib
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPUS = ROOT / "extension/virtual_device/device_files"
CASES = ROOT / "tests/virtual_device"
SKIPPED = 77
# Pages are 4 KiB under most kernels, 64 KiB under those of many servers. With the latter qemu 7.2 runs what loads few libraries
# only: its loader's own memory is then unreadable to system calls.
PAGE_SIZES = (4096, 65536)
options = argparse.Namespace()


def run(*command, **more):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1800, **more)


class Emulator:
    """The processor, with a Debian for it: a C library and a Python."""

    def __init__(self):
        self.qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if not self.qemu:
            raise unittest.SkipTest("there is no qemu-aarch64: apt-get install qemu-user")
        made = run(ROOT / "scripts/arm64")
        if made.returncode:
            raise unittest.SkipTest(made.stderr.strip())
        self.system = pathlib.Path(made.stdout.strip())
        self.python = self.system / "usr/bin/python3.11"

    def command(self, *program, page=PAGE_SIZES[0], **environment):
        """`program` there, with more in its environment than is in ours: LD_PRELOAD must not reach the emulator."""
        given = [part for name, value in environment.items() for part in ("-E", f"{name}={value}")]
        return [self.qemu, "-p", page, "-L", self.system, *given, *program]

    def run(self, *program, page=PAGE_SIZES[0], folder=None, **environment):
        return run(*self.command(*program, page=page, **environment), cwd=folder)


def unpack(wheel, folder):
    """Its files, with the programs as pip makes them; the folder of what is compiled."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    native = pathlib.Path(folder) / "oomdiag/_native"
    for program in (native / "bin").iterdir():
        program.chmod(0o755)
    return native


class Emulated(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.emulator = Emulator()
        cls.kept = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.kept.cleanup)
        cls.folder = pathlib.Path(cls.kept.name)
        if not options.wheel:
            raise unittest.SkipTest("there is no wheel for 64-bit ARM in dist/: scripts/release makes it")
        cls.native = unpack(options.wheel, cls.folder / "wheel")


class CommandLine(Emulated):
    """Reads the same runs as the command of this machine, and says the same of them."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.own = options.oomdiag
        if not cls.own:
            beside = sorted(options.wheel.parent.glob("oomdiag-*_x86_64.whl"))
            if not beside:
                raise unittest.SkipTest(f"no --oomdiag, and no wheel for this machine in {options.wheel.parent}")
            cls.own = unpack(beside[-1], cls.folder / "own") / "bin/oomdiag"
        for batch in 64, 6000:  # the second runs out of memory
            run(cls.own, "run", "--device", "rtx4090", "--no-progress", "--folder", cls.folder / str(batch), "-o",
                cls.folder / f"{batch}.json", "--", options.python, HERE / "train.py", "--batch-size", batch, cwd=cls.folder)
            if not (cls.folder / f"{batch}.json").exists():
                raise AssertionError(f"no run with {batch} was recorded")
        cls.small, cls.large = (next((cls.folder / str(batch)).glob("oomdiag-*")) for batch in (64, 6000))

    def both(self, *arguments, code=0):
        """What both print, which is the same."""
        ours = run(self.own, *arguments, cwd=self.folder)
        theirs = self.emulator.run(self.native / "bin/oomdiag", *arguments, folder=self.folder)
        self.assertEqual(ours.returncode, code, ours.stderr)
        self.assertEqual((theirs.returncode, theirs.stderr), (code, ours.stderr))
        self.assertEqual(theirs.stdout, ours.stdout)
        return theirs.stdout

    def test_version_help_and_gpus(self):
        self.assertIn("oomdiag 0", self.both("--version"))
        self.assertIn("explain", self.both("--help"))
        listed = self.emulator.run(self.native / "bin/oomdiag", "devices")  # a build knows its torch, and lists fewer
        self.assertEqual((listed.returncode, listed.stderr), (0, ""))
        self.assertIn("NVIDIA GeForce RTX 4090", listed.stdout)

    def test_runs_are_explained(self):
        self.assertIn("peak", self.both("explain", self.small, "--all"))
        self.assertIn("out of memory", self.both("explain", self.large, "--all"))
        self.assertIn('"outcome": "out_of_memory"', self.both("explain", self.large, "--json"))

    def test_runs_are_compared(self):
        for mode in [], ["--json"]:
            self.assertTrue(self.both("diff", self.small, self.large, *mode, code=1))  # they differ

    def test_runs_are_exported(self):
        for format in "html", "folded", "markdown", "csv", "perfetto", "snapshot", "bundle":
            with self.subTest(format):
                written = [self.folder / f"{who}.{format}" for who in ("own", "emulated")]
                arguments = ["export", "--to", format, self.large, "-o"]
                done = [run(self.own, *arguments, written[0]), self.emulator.run(self.native / "bin/oomdiag", *arguments, written[1])]
                self.assertEqual([one.returncode for one in done], [0, 0], [one.stderr for one in done])
                self.assertEqual(written[1].read_bytes(), written[0].read_bytes())

    def test_an_exported_snapshot_is_read(self):
        snapshot = self.folder / "snapshot.pickle"
        self.assertEqual(run(self.own, "export", "--to", "snapshot", self.large, "-o", snapshot).returncode, 0)
        self.both("explain", snapshot)


class UnitTests(Emulated):
    # What qemu 7.2 does not do: it takes MADV_POPULATE_WRITE and does nothing, has neither seccomp nor RLIMIT_DATA, and says on
    # stderr that a program aborts. The last is minutes of arithmetic there, and has nothing of the processor in it.
    NOT_EMULATED = ("a store on a full disk *", "a disk that fills up *", "a full disk is no SIGBUS *",
                    "a recording ends before the disk *", "the file may be moved*", "the program may change its folder",
                    "a work that is run apart may not take more memory *", "a lock out of order aborts *", "two locks of one rank *",
                    "20 000 allocations of one line *")

    def run_program(self, name, *arguments, page=PAGE_SIZES[0]):
        program = options.unit_tests / name
        if not program.exists():
            self.skipTest(f"{program} is not there: scripts/release --only aarch64 makes it")
        done = self.emulator.run(program, *arguments, *(f"~{name}" for name in self.NOT_EMULATED), page=page)
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-5000:])
        self.assertIn("All tests passed", done.stdout)

    def test_the_profiler(self):
        self.run_program("oomdiag_tests", "~[cli]")

    def test_the_command_line(self):
        self.run_program("oomdiag_tests", "[cli]")

    def test_the_recorders_parts_that_know_no_torch(self):
        for page in PAGE_SIZES:
            with self.subTest(page=page):
                self.run_program("oomdiag_record_tests", page=page)
                self.run_program("oomdiag_tests", "[trace]", page=page)

    def test_the_collector(self):
        self.run_program("oomdiag_cupti_tests")


# A case that starts a Python of its own: the kernel knows nothing of the emulator.
CANNOT_START = r"OSError: \[Errno 8\] Exec format error"
# qemu-user has no process_vm_readv, by which the driver looks whether an address may be read.
NOT_EMULATED = ("an_address_that_is_nobodys_is_an_invalid_value", "code_that_is_none_and_kernels_that_are_not_there_are_errors",
                "pinned_host_memory_ends_with_the_machines")


def fits(case, major):
    """Whether it needs no torch, and is not about the tables, which have functions that came with CUDA 13."""
    source = inspect.getsource(case)
    return "torch" not in source and case.__name__ not in NOT_EMULATED and (major == 13 or "entry_points.txt" not in source)


class Libraries(Emulated):
    """The virtual device and the shim, in a Python for that processor."""

    def setUp(self):
        self.libraries = self.native / "lib/oomdiag/virtual_device"
        self.torch = self.folder / "packages/torch"  # only what the cases ask: for which CUDA it is
        self.torch.mkdir(parents=True, exist_ok=True)
        (self.torch / "__init__.py").touch()

    def stand_ins(self, major):
        names = ["libcuda.so.1", f"libcudart.so.{major}", f"libcublas.so.{major}", f"libcublasLt.so.{major}", "libnvidia-ml.so.1",
                 f"libcufft.so.{major - 1}", f"libcusolver.so.{major - 1}", "libcusparse.so.12", "libcusparseLt.so.0", "libnccl.so.2",
                 f"libcupti.so.{major}"]
        return ":".join(str(self.libraries / name) for name in names)

    def python(self, *arguments, **environment):
        return self.emulator.run(self.emulator.python, *arguments, PYTHONPATH=self.torch.parent, **environment)

    def test_every_library_is_loaded_with_all_its_symbols(self):
        libraries = {*self.libraries.iterdir(), *(self.native / "lib/oomdiag").glob("*.so")}
        libraries.remove(self.libraries / "liboomdiag_cudnn_by_name.so")  # it wants NVIDIA's cuDNN
        self.assertGreater(len(libraries), 15)
        for library in libraries:
            with self.subTest(library.name):
                done = self.python("-c", f"import ctypes, os; ctypes.CDLL('{library}', mode=os.RTLD_NOW)")
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_shim_is_no_burden_to_a_program_without_torch(self):
        done = self.python("-c", "print(1)", LD_PRELOAD=self.native / "lib/oomdiag/liboomdiag_preload.so")
        self.assertEqual((done.stdout, done.stderr, done.returncode), ("1\n", "", 0))

    def test_the_virtual_device_keeps_what_cuda_promises(self):
        for major in 13, 12:
            (self.torch / "version.py").write_text(f"cuda = '{major}.0'\n")
            for (module, gpu, extra), cases in self.batches(major).items():
                outcomes = self.run_cases(module, gpu, dict(extra), cases, major)
                for case in cases:
                    with self.subTest(case, cuda=major):
                        self.assertRegex(outcomes, rf"(?m)^(ok|skip) {case}\b|^FAIL {case}: {CANNOT_START}")

    @staticmethod
    def batches(major):
        """Names of cases by their file, GPU and environment: one process for each."""
        batches = {}
        sys.path.insert(0, str(CASES))
        try:
            modules = [importlib.import_module(f"{name}_cases") for name in ("contract", "entry_point", "memory_account", "lookup")]
        finally:
            sys.path.pop(0)
        for case in sys.modules["device_cases"].CASES:
            if sys.modules[case.__module__] in modules and case.group == "quick" and fits(case, major):
                key = case.__module__, case.gpu, tuple(sorted(case.environment.items()))
                batches.setdefault(key, []).append(case.__name__)
        return batches

    def run_cases(self, module, gpu, environment, cases, major):
        environment |= {"OOMDIAG_DEVICE_FOLDER": GPUS, "LD_PRELOAD": self.stand_ins(major)}
        if gpu:
            environment["OOMDIAG_DEVICE_FILES"] = "\n".join(str(GPUS / f"{name}.json") for name in gpu.split(","))
        done = self.python(CASES / f"{module}.py", *cases, **environment)
        return done.stdout + done.stderr[-2000:]


def newest_wheel():
    return max((ROOT / "dist").glob("oomdiag-*_aarch64.whl"), key=os.path.getmtime, default=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--wheel", type=lambda text: pathlib.Path(text).resolve(), default=newest_wheel())
    parser.add_argument("--oomdiag", type=pathlib.Path)
    parser.add_argument("--unit-tests", type=pathlib.Path, default=ROOT / "build-release-aarch64/bin")
    parser.add_argument("--python", type=pathlib.Path, default=sys.executable)
    options, rest = parser.parse_known_args()
    program = unittest.main(argv=["test_aarch64.py", *rest], verbosity=2, exit=False)
    ended = program.result
    nothing_ran = ended.wasSuccessful() and ended.testsRun == 0
    sys.exit(SKIPPED if nothing_ran else not ended.wasSuccessful())
