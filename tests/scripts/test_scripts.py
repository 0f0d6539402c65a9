"""The scripts in a copy of the checkout whose path has a space, with a Python that only pretends to install.

Usage: test_scripts.py PATH/TO/scripts
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPTS = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2] / "scripts").resolve()

# Stands for python3 and for the virtual environment's python. PIP says what `pip install` does.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    echo "$@" >>"$PIP_LOG"
    [[ $PIP != fail ]] || exit 1
    [[ $PIP != hang ]] || sleep 60
    if [[ $PIP == fail-late ]]; then until [[ -s $CMAKE_LOG ]]; do sleep 0.02; done; exit 1; fi
    echo "#!$(dirname "$0")/python" >"$(dirname "$0")/pip"
    ;;
  "-c "*) ;;
  *) exit 1 ;;
esac
"""

# A compilation that never ends.
FAKE_CMAKE = """#!/usr/bin/env bash
[[ $1 != --version ]] || exec echo "cmake version 3.30.0"
sleep 60 & echo $$ $! >"$CMAKE_LOG"
wait
"""


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.root = self.folder / "a checkout"
        shutil.copytree(SCRIPTS, self.root / "scripts")
        self.write_program(self.folder / "bin" / "python3", FAKE_PYTHON)
        self.pip_log = self.folder / "pip.log"
        self.environment = os.environ | {"PIP": "work", "PIP_LOG": str(self.pip_log)}
        self.environment["PATH"] = f"{self.folder / 'bin'}:{self.environment['PATH']}"
        for name in "OOMDIAG_TORCH", "CXX":
            self.environment.pop(name, None)

    def write_program(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run_script(self, name, *arguments, **variables):
        return subprocess.run([self.root / "scripts" / name, *arguments], cwd=self.folder, timeout=60, capture_output=True,
                              text=True, env=self.environment | variables)

    def environments(self):
        return sorted(path.name for path in self.root.glob(".venv*"))

    def count_of_installs(self):
        return len(self.pip_log.read_text().splitlines()) if self.pip_log.exists() else 0


class Setup(Scripts):
    def test_a_second_set_up_finds_everything_done(self):
        for _ in range(2):
            result = self.run_script("setup")
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.environments(), [".venv"])
        self.assertEqual(self.count_of_installs(), 1)

    def test_test_programs_are_added_to_what_is_there(self):
        self.run_script("setup")
        self.assertEqual(self.run_script("setup", "--with-test-programs").returncode, 0)
        self.assertNotIn("torch==", self.pip_log.read_text())
        self.assertIn("2.15.0-test-programs.txt", self.pip_log.read_text().splitlines()[1])
        self.assertEqual(self.environments(), [".venv"])

    def test_scripts_of_the_environment_name_its_final_place(self):
        self.run_script("setup")
        self.assertEqual((self.root / ".venv/bin/pip").read_text(), f"#!{self.root}/.venv/bin/python\n")

    def test_another_version_has_an_environment_of_its_own(self):
        self.assertEqual(self.run_script("setup", "--torch-version", "2.11.0").returncode, 0)
        self.assertEqual(self.environments(), [".venv-2.11.0"])

    def test_a_failed_installation_leaves_nothing(self):
        result = self.run_script("setup", PIP="fail")
        self.assertEqual(result.returncode, 1)
        self.assertIn("hint: ", result.stderr)
        self.assertEqual(self.environments(), [])

    def test_a_failed_addition_leaves_the_environment_as_it_was(self):
        self.run_script("setup")
        self.assertEqual(self.run_script("setup", "--with-test-programs", PIP="fail").returncode, 1)
        self.assertEqual(self.environments(), [".venv"])
        self.assertEqual(self.run_script("setup").returncode, 0)
        self.assertEqual(self.count_of_installs(), 2)

    def test_an_interrupted_installation_leaves_nothing(self):
        with subprocess.Popen([self.root / "scripts/setup"], env=self.environment | {"PIP": "hang"}, start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not self.count_of_installs():
                self.assertIsNone(process.poll())
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGTERM)
            self.assertEqual(process.wait(30), 143)
        self.assertEqual(self.environments(), [])

    def test_a_torch_of_the_users_own_needs_no_installation(self):
        result = self.run_script("setup", OOMDIAG_TORCH=str(self.folder))
        self.assertEqual(result.returncode, 1)
        self.assertIn("OOMDIAG_TORCH", result.stderr)
        (self.folder / "version.py").touch()
        self.assertEqual(self.run_script("setup", OOMDIAG_TORCH=str(self.folder)).returncode, 0)
        self.assertEqual((self.environments(), self.count_of_installs()), ([], 0))


class Launcher(Scripts):
    def setUp(self):
        super().setUp()
        (self.root / "CMakeLists.txt").touch()
        for folder in "profiler", "extension", "samples", "cli":
            (self.root / folder).mkdir()
        self.write_program(self.root / "build/bin/oomdiag", '#!/bin/sh\nprintf "%s|" "$@"\n')
        self.write_program(self.root / "scripts/build", '#!/bin/sh\necho building\n')
        (self.root / "build/.built").write_text(f"{self.root}\n\n")

    def test_a_fresh_build_is_run_as_it_is(self):
        result = self.run_script("oomdiag", "run", "a b", "")
        self.assertEqual((result.stdout, result.stderr), ("run|a b||", ""))

    def test_a_program_finds_the_package_of_the_checkout_last(self):
        self.write_program(self.root / "build/bin/oomdiag", '#!/bin/sh\necho "$PYTHONPATH"\n')
        found = self.run_script("oomdiag", "run", PYTHONPATH="/mine").stdout.strip()
        self.assertEqual(found, f"/mine:{self.root}/build/lib/python")

    def test_a_changed_source_is_built_first(self):
        time.sleep(0.02)
        (self.root / "cli" / "new.cpp").touch()
        result = self.run_script("oomdiag", "devices")
        self.assertEqual((result.stdout, result.stderr), ("devices|", "building\n"))

    def test_a_torch_of_the_users_own_is_remembered(self):
        torch = self.folder / "own" / "torch"
        torch.mkdir(parents=True)
        (torch / "version.py").touch()
        (self.root / "build/.origin").write_text(f"{self.root}\n{torch}\n\n")
        (self.root / "build/.built").write_text(f"{self.root}\n{torch}\n")
        self.assertEqual(self.run_script("oomdiag", "devices").stderr, "")
        self.assertEqual(self.run_script("setup").returncode, 0)
        self.assertEqual(self.count_of_installs(), 0)
        self.assertIn("building", self.run_script("oomdiag", "devices", OOMDIAG_TORCH="").stderr)

    def test_another_torch_or_a_moved_checkout_is_built_first(self):
        self.assertIn("building", self.run_script("oomdiag", OOMDIAG_TORCH="/elsewhere").stderr)
        (self.root / "build/.built").write_text("/moved\n\n")
        self.assertIn("building", self.run_script("oomdiag").stderr)


class Build(Scripts):
    def setUp(self):
        super().setUp()
        self.cmake_log = self.folder / "cmake.log"
        self.environment["CMAKE_LOG"] = str(self.cmake_log)
        self.write_program(self.folder / "bin" / "cmake", FAKE_CMAKE)

    def test_what_is_compiled_while_torch_is_installed_ends_with_a_failed_installation(self):
        result = self.run_script("build", PIP="fail-late")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("while that is installed", result.stderr)
        for process in self.cmake_log.read_text().split():
            self.assertTrue(ends_soon(int(process)), result.stderr)


def ends_soon(process):
    """True if the process is gone, or waits for nothing but to be asked how it ended."""
    for _ in range(100):
        try:
            if pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


class Options(Scripts):
    def test_help_begins_with_the_usage(self):
        for name in "setup", "build", "test", "format", "tidy", "torches", "release", "docs":
            result = self.run_script(name, "--help")
            self.assertEqual(result.returncode, 0, name)
            self.assertTrue(result.stdout.startswith(f"Usage: scripts/{name}"), result.stdout)

    def test_unknown_options_and_versions_are_rejected(self):
        for name in "setup", "build", "test", "format", "release", "docs":
            self.assertEqual(self.run_script(name, "--bogus").returncode, 2, name)
        for name in "setup", "build", "test":
            result = self.run_script(name, "--torch-version", "1.0")
            self.assertEqual(result.returncode, 1, name)
            self.assertIn("2.11.0 2.15.0", result.stderr)
        self.assertEqual(self.environments(), [])


class Layers(Scripts):
    def check(self, path, include):
        source = self.folder / "tree" / path
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"#pragma once\n#include {include}\n")
        result = subprocess.run([sys.executable, "-B", SCRIPTS / "check_layers", self.folder / "tree"], capture_output=True, text=True)
        source.unlink()
        return result.stdout

    def test_arrows_go_one_way(self):
        for path, include in [
            ("profiler/event.h", '"profiler/error.h"'),
            ("profiler/trace/trace.h", '"profiler/replay/replay.h"'),
            ("profiler/report/text/text.cpp", '"cli/terminal/terminal.h"'),
            ("cli/main.cpp", "<torch/torch.h>"),
            ("cli/main.cpp", "<c10/core/Device.h>"),
            ("profiler/replay/replay.cpp", "<ATen/ATen.h>"),
            ("extension/record/session.cpp", "<cupti.h>"),
            ("extension/record/session.cpp", "<fmt/format.h>"),
            ("extension/virtual_device/driver/devices.cpp", "<torch/torch.h>"),
            ("cli/process/launcher.cpp", '"cli/terminal/terminal.h"'),
            ("cli/experiments/executor.cpp", '"cli/commands/commands.h"'),
            ("samples/main.cpp", '"profiler/event.h"'),
            ("samples/main.cpp", '"extension/record/session.h"'),
        ]:
            self.assertIn(f"{path}:2: ", self.check(path, include), include)

    def test_what_the_design_allows_is_silent(self):
        for path, include in [
            ("profiler/trace/trace.h", '"profiler/event.h"'),
            ("profiler/report/text/text.cpp", '"profiler/explain/explain.h"'),
            ("cli/main.cpp", '"profiler/report/report.h"'),
            ("extension/record/session.cpp", "<c10/core/Device.h>"),
            ("extension/cupti/collector.cpp", "<cupti.h>"),
            ("samples/main.cpp", "<torch/torch.h>"),
            ("cli/main.cpp", "<vector>"),
        ]:
            self.assertEqual(self.check(path, include), "", path)


if __name__ == "__main__":
    unittest.main(verbosity=2)
