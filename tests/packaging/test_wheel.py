"""A wheel as its user has it: installed into an environment with a torch, on this system and on an older one.

    python tests/packaging/test_wheel.py --wheel WHEEL --python INTERPRETER [--chroot FOLDER] [unittest arguments]

INTERPRETER has a torch. FOLDER: an older Linux with a python3, as debootstrap makes it; as root only. scripts/release runs this.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
options = argparse.Namespace()


def run(*command, **more):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, **more)


def newest_glibc(library):
    """(2, 28) of the newest symbol that it asks of the C library."""
    asked = run("objdump", "-T", library).stdout
    return max((tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", asked)), default=(0, 0))


class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        with zipfile.ZipFile(options.wheel) as wheel:
            wheel.extractall(cls.folder.name)
            cls.names = wheel.namelist()
        cls.programs = [path for path in pathlib.Path(cls.folder.name).rglob("*")
                        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_nothing_asks_for_a_newer_c_library_than_the_name_says(self):
        promised = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)_", options.wheel.name).groups()))
        self.assertGreater(len(self.programs), 15)
        for program in self.programs:
            self.assertLessEqual(newest_glibc(program), promised, program.name)

    def test_nothing_asks_for_a_c_plus_plus_library(self):
        for program in self.programs:
            needed = re.findall(r"NEEDED +(\S+)", run("objdump", "-p", program).stdout)
            self.assertFalse([name for name in needed if name.startswith(("libstdc++", "libc++", "libgcc", "libfmt"))], program.name)

    def test_nothing_of_nvidia_is_in_it(self):
        self.assertFalse([name for name in self.names if re.search(r"\.(cuh|fatbin|cubin)$|libcudnn", name)])
        self.assertLess(options.wheel.stat().st_size, 30 << 20)


class Environment(unittest.TestCase):
    """The wheel in an environment of its own, which sees the torch of another."""

    @classmethod
    def setUpClass(cls):
        cls.kept = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.kept.name)
        subprocess.run([options.python, "-m", "venv", "--without-pip", cls.folder / "venv"], check=True)
        packages = next((cls.folder / "venv/lib").glob("python3*")) / "site-packages"
        torch = run(options.python, "-c", "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])").stdout.strip()
        (packages / "torch.pth").write_text(f"{pathlib.Path(torch).parent}\n")
        subprocess.run([sys.executable, "-m", "pip", "--python", cls.folder / "venv/bin/python", "install", "--quiet", "--no-deps", "--no-index",
                        "--disable-pip-version-check", options.wheel], check=True)
        cls.environment = os.environ | {"PATH": f"{cls.folder / 'venv/bin'}:{os.environ['PATH']}"}
        cls.environment.pop("PYTHONPATH", None)

    @classmethod
    def tearDownClass(cls):
        cls.kept.cleanup()

    def type(self, command, code=0, **environment):
        done = run("bash", "-c", command, cwd=self.folder, env=self.environment | environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def train(self, how, **environment):
        (self.folder / "train.py").write_text(textwrap.dedent("""
            import torch
            layer = torch.nn.Linear(1024, 1024).cuda()
            layer(torch.randn(64, 1024, device="cuda")).sum().backward()
            print("peak", torch.cuda.max_memory_allocated())
        """))
        output = self.type(how, **environment)
        peak = int(re.search(r"peak (\d+)", output)[1])
        self.assertIn(f"peak       {peak / 2**20:.2f} MiB allocated in backward", output)
        self.assertRegex(output, r"train\.py:\d")

    def test_a_program_is_recorded_and_explained(self):
        self.train("oomdiag run --device rtx4090 -- python train.py")
        self.assertIn("parameters", self.type("oomdiag explain"))

    def test_one_variable_of_the_environment_switches_it_on(self):
        self.train("python train.py", OOMDIAG="rtx4090")

    def test_without_that_variable_nothing_of_ours_is_imported(self):
        output = self.type("python -c 'import sys; print([name for name in sys.modules if \"oomdiag\" in name])'")
        self.assertEqual(output.strip(), "[]")

    def test_what_needs_no_torch(self):
        self.assertIn("NVIDIA GeForce RTX 4090", self.type("oomdiag devices"))
        self.assertIn("oomdiag", self.type("oomdiag --version"))
        self.assertTrue(pathlib.Path(self.type("python -c 'import oomdiag; print(oomdiag.cmake_prefix_path)'").strip(), "lib/cmake/oomdiag").is_dir())


class OlderSystem(unittest.TestCase):
    def setUp(self):
        if not options.chroot:
            self.skipTest("no --chroot")

    def type(self, command):
        with_proc = 'mount -t proc proc "$0/proc" && exec chroot "$0" bash -c "$1"'
        done = run("unshare", "--mount", "bash", "-c", with_proc, options.chroot, command)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_the_command_line_runs_there(self):
        place = options.chroot / "opt/oomdiag"
        subprocess.run(["rm", "-rf", place], check=True)
        with zipfile.ZipFile(options.wheel) as wheel:
            wheel.extractall(place)
        program = "/opt/oomdiag/oomdiag/_native/bin/oomdiag"
        self.type(f"chmod +x {program}")
        self.assertIn("RTX 4090", self.type(f"{program} devices"))
        if options.report:
            (place / "report.json").write_bytes(options.report.read_bytes())
            self.assertIn("GPU memory", self.type(f"{program} explain /opt/oomdiag/report.json"))
        libraries = "/opt/oomdiag/oomdiag/_native/lib/oomdiag"
        load = f"import ctypes, glob; [ctypes.CDLL(name) for name in ['{libraries}/liboomdiag_reports.so', '{libraries}/virtual_device/libcuda.so.1']]"
        self.type(f'python3 -c "{load}"')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    for name in "wheel", "python":
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    for name in "chroot", "report":
        parser.add_argument(f"--{name}", type=pathlib.Path)
    options, rest = parser.parse_known_args()
    options.wheel = options.wheel.resolve()
    unittest.main(argv=["test_wheel.py", *rest], verbosity=2)
