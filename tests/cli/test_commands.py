"""The command line as somebody at a shell sees it: exit codes, streams, signals and what it says.

Usage: test_commands.py PATH/TO/oomdiag. Needs no torch: the programs that are run here never use CUDA.
"""

import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

OOMDIAG = sys.argv.pop(1) if len(sys.argv) > 1 else "oomdiag"
REAL = ["run", "--device", "real", "--"]  # asks for no virtual device, which these programs do not need


class CommandLine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def oomdiag(self, *arguments, **options):
        options = {"capture_output": True, "text": True, "cwd": self.folder, "timeout": 60} | options
        return subprocess.run([OOMDIAG, *arguments], **options)

    def check_error(self, arguments, code, *words, **more):
        result = self.oomdiag(*arguments, **more)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertTrue(result.stderr.startswith("oomdiag: error: "), result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)


class Habits(CommandLine):
    def test_a_script_or_an_interpreter_in_the_place_of_a_command_is_run(self):
        (self.folder / "train.py").write_text("import sys; print('ran', *sys.argv[1:])")
        for words in ["train.py", "-x"], ["python", "train.py", "-x"], ["run", "train.py", "-x"]:
            self.assertEqual(self.oomdiag(*words).stdout, "ran -x\n", words)
        self.assertEqual(list(self.folder.glob("oomdiag-runs")), [])  # no CUDA was used: no run is left

    def test_a_word_that_is_neither_is_an_unknown_command(self):
        self.check_error(["trian"], 2, "unknown command 'trian'", "train")

    def test_without_a_file_the_newest_run_is_read(self):
        for command in ["explain"], ["export", "--to", "html"], ["fix"]:
            self.check_error(command, 2, "no run here")
        for number, folder in enumerate(["oomdiag-2", "oomdiag-runs/oomdiag-1"]):
            run = self.folder / folder
            run.mkdir(parents=True)
            (run / "trace").touch()
            os.utime(run, (number, number))
        result = self.oomdiag("explain")
        self.assertIn("the newest run: oomdiag-runs/oomdiag-1\n", result.stderr)
        self.assertEqual(result.returncode, 1)  # its trace is empty

    def test_help_has_groups_and_run_comes_first(self):
        text = self.oomdiag("--help").stdout
        self.assertLess(text.index("Diagnose:\n  run "), text.index("Share and compare:"))


class Run(CommandLine):
    def test_the_exit_code_is_the_programs(self):
        self.assertEqual(self.oomdiag(*REAL, "true").returncode, 0)
        self.assertEqual(self.oomdiag(*REAL, "sh", "-c", "exit 7").returncode, 7)
        self.assertEqual(self.oomdiag(*REAL, "sh", "-c", "exit 255").returncode, 255)

    def test_it_ends_by_the_signal_that_ended_the_program_and_leaves_no_core(self):
        for name in ("TERM", "KILL", "INT", "SEGV"):
            result = self.oomdiag(*REAL, "sh", "-c", f"ulimit -c 0; kill -{name} $$")
            self.assertEqual(result.returncode, -signal.Signals[f"SIG{name}"], result.stderr)
        shell = subprocess.run(["sh", "-c", '"$@"; echo $?', "sh", OOMDIAG, *REAL, "sh", "-c", "kill -TERM $$"], cwd=self.folder,
                               capture_output=True, text=True)
        self.assertEqual(shell.stdout, "143\n")
        self.assertEqual(list(self.folder.glob("core*")), [])

    def test_a_shell_loop_ends_with_the_program_that_ctrl_c_ends(self):
        loop = 'for i in 1 2; do "$@"; done; echo went on'
        shell = subprocess.run(["bash", "-c", loop, "bash", OOMDIAG, *REAL, "sh", "-c", "echo begun; kill -INT $$"], cwd=self.folder,
                               capture_output=True, text=True)
        self.assertEqual(shell.stdout, "begun\nbegun\nwent on\n")  # nobody sent it to the shell
        shell = subprocess.run(["bash", "-c", loop, "bash", OOMDIAG, *REAL, "sh", "-c", "echo begun; kill -INT 0; sleep 5"],
                               cwd=self.folder, capture_output=True, text=True, start_new_session=True)
        self.assertEqual(shell.stdout, "begun\n")

    def test_nobody_need_read_what_it_says(self):
        for program, code in (("exit 0", 0), ("exit 7", 7), ("trap - PIPE; kill -PIPE $$", -signal.SIGPIPE)):
            reader, writer = os.pipe()
            os.close(reader)
            result = self.oomdiag("run", "--", "sh", "-c", program, capture_output=False, stderr=writer)
            os.close(writer)
            self.assertEqual(result.returncode, code)

    def test_streams_that_are_closed_are_closed_for_the_program(self):
        look = ["sh", "-c", "ls /proc/self/fd > here; exit 5"]  # ls has its own folder open, as the lowest number that is free
        for closed in ("<&-", "<&- >&-", "<&- >&- 2>&-"):
            for before in ([], [OOMDIAG, *REAL]):
                run = subprocess.run(["bash", "-c", f'exec "$@" {closed}', "bash", *before, *look], cwd=self.folder, capture_output=True)
                self.assertEqual(run.returncode, 5, closed)
                seen = (self.folder / "here").read_text()
                if not before:
                    expected = seen
            self.assertEqual(seen, expected, closed)

    def test_streams_are_the_programs(self):
        result = self.oomdiag(*REAL, "cat", "-", input="line\n")
        self.assertEqual(result.stdout, "line\n")
        result = self.oomdiag(*REAL, "sh", "-c", "echo out; echo err >&2")
        self.assertEqual(result.stdout, "out\n")
        self.assertIn("err\n", result.stderr)

    def test_arguments_arrive_as_they_are(self):
        script = 'printf "%s|" "$@"'
        for separator in ["--"], []:
            result = self.oomdiag("run", "--device", "real", *separator, "sh", "-c", script, "sh", "a b", "--device", "--", "")
            self.assertEqual(result.stdout, "a b|--device|--||")

    def test_a_signal_is_passed_on(self):
        script = "trap 'exit 5' TERM; touch ready; while :; do sleep 0.05; done"
        with subprocess.Popen([OOMDIAG, *REAL, "sh", "-c", script], cwd=self.folder, stderr=subprocess.DEVNULL) as process:
            self.wait_for(self.folder / "ready")
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(30), 5)

    def wait_for(self, path):
        for _ in range(600):
            if path.exists():
                return
            time.sleep(0.05)
        self.fail(f"{path} does not appear")

    def test_signals_of_the_program_are_as_they_were(self):
        show = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
        plain = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout
        self.assertEqual(self.oomdiag(*REAL, "sh", "-c", show).stdout, plain)

    def test_a_parent_may_ignore_that_children_end(self):
        show = "grep SigIgn /proc/self/status; kill -TERM $$"

        def ignore():
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

        plain = subprocess.run(["sh", "-c", show], capture_output=True, text=True, preexec_fn=ignore)
        result = self.oomdiag(*REAL, "sh", "-c", show, preexec_fn=ignore)
        self.assertEqual((result.returncode, result.stdout), (-signal.SIGTERM, plain.stdout))
        (self.folder / "python").write_text("#!/bin/sh\nexit 1\n")
        (self.folder / "python").chmod(0o755)
        result = self.oomdiag("recorder", "./python", preexec_fn=ignore)
        self.assertIn("'./python' is no Python that can be started", result.stderr)

    def test_the_run_folder_has_the_pid_of_the_program(self):
        result = self.oomdiag(*REAL, "sh", "-c", 'echo $$; echo "$OOMDIAG_OUTPUT"; test -d "$OOMDIAG_OUTPUT"')
        self.assertEqual(result.returncode, 0)
        pid, folder = result.stdout.split()
        self.assertEqual(pathlib.Path(folder), self.folder.resolve() / f"oomdiag-runs/oomdiag-{pid}")

    def test_a_program_without_cuda_leaves_nothing_but_a_line(self):
        result = self.oomdiag(*REAL, "true")
        self.assertRegex(result.stderr, "no CUDA memory was used; nothing to report|the recorder is missing")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_the_preloaded_libraries_come_before_the_users_own(self):
        environment = os.environ | {"LD_PRELOAD": "libm.so.6", "OOMDIAG_PRELOAD_FIRST": "libdl.so.2",
                                    "ASAN_OPTIONS": "verify_asan_link_order=0"}
        entries = self.oomdiag(*REAL, "printenv", "LD_PRELOAD", env=environment).stdout.strip().split(":")
        self.assertEqual((entries[0], entries[-1]), ("libdl.so.2", "libm.so.6"))

    def test_what_triton_compiles_for_virtual_gpus_lies_where_only_the_user_can_write(self):
        def folder_of(cache):
            shown = self.oomdiag("run", "--device", "rtx3060", "--", "printenv", "TRITON_CACHE_DIR",
                                 env=os.environ | {"XDG_CACHE_HOME": str(cache)})
            self.assertEqual(shown.returncode, 0, shown.stderr)
            return pathlib.Path(shown.stdout.strip())
        own, everybodys = self.folder / "own", self.folder / "everybodys"
        everybodys.mkdir()
        everybodys.chmod(0o777)
        self.assertEqual(folder_of(own), own / "oomdiag/virtual/triton")
        self.assertEqual((own / "oomdiag/virtual").stat().st_mode & 0o777, 0o700)
        instead = folder_of(everybodys)
        self.assertFalse(instead.is_relative_to(everybodys), instead)
        self.assertFalse(instead.parent.exists(), "it goes with the run")

    def test_a_program_that_is_not_there(self):
        self.check_error(["run", "--device", "real", "--folder", "runs", "--", "no-such-program"], 127, "no-such-program", "hint: ")
        self.assertEqual(list((self.folder / "runs").iterdir()), [])

    def test_a_script_in_this_folder_is_run_by_its_interpreter(self):
        for name, mode in (("train.py", 0o644), ("./train.py", 0o644), ("both.py", 0o755)):
            (self.folder / name).write_text("print(1)\n")
            (self.folder / name).chmod(mode)
            self.assertEqual(self.oomdiag(*REAL, name).stdout, "1\n", name)

    def test_a_file_that_no_interpreter_is_known_for_is_not_run(self):
        for name, mode, code, hint in (("tool", 0o755, 127, "run -- ./tool"), ("./data", 0o644, 126, "chmod +x ./data")):
            (self.folder / name).write_text("print(1)\n")
            (self.folder / name).chmod(mode)
            self.check_error(["run", "--device", "real", "--folder", "runs", "--", name], code, f"cannot run '{name}'", hint)

    def test_a_program_that_sigkill_ended_is_said_to_be_killed(self):
        result = self.oomdiag(*REAL, "sh", "-c", "kill -KILL $$")
        self.assertRegex(result.stderr, "killed by SIGKILL .exit code 137.*OOM killer.*dmesg")

    def test_a_folder_that_cannot_be_written_is_replaced(self):
        if os.geteuid() != 0:
            self.skipTest("drops rights, so it needs them")
        self.folder.chmod(0o755)
        try:
            result = self.oomdiag(*REAL, "printenv", "OOMDIAG_OUTPUT", user="nobody")
        except PermissionError:
            self.skipTest("the program is where nobody may not go")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("cannot write into the current folder", result.stderr)
        self.assertNotIn(str(self.folder), result.stdout)


    def test_a_report_that_cannot_be_made_leaves_the_exit_code_alone(self):
        (self.folder / "huge").write_bytes(trace_of_names(6_000_000))
        script = f"ulimit -v 200000; exec '{OOMDIAG}' run --device real -- sh -c 'cp huge \"$OOMDIAG_OUTPUT/trace\"; exit 7'"
        result = subprocess.run(["sh", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 7, result.stderr)
        self.assertIn("not enough memory to read the trace", result.stderr)

    def test_a_full_disk_behind_stderr_leaves_the_exit_code_alone(self):
        with open("/dev/full", "w") as full:
            result = self.oomdiag(*REAL, "sh", "-c", "exit 7", capture_output=False, stderr=full)
        self.assertEqual(result.returncode, 7)


def trace_of_names(count):
    """A trace whose header is sound and that has nothing but names: 32 bytes of memory for five in the file."""
    header = bytearray(4096)
    struct.pack_into("<8sIIQiiiI13Q", header, 0, b"OOMDIAG1", 3, 4096, 0, 1, 0, 1, 0, 4096, 5 * count + 4, 0, 0, 0, 0, 0, 0, 0, 0,
                     0, 4096, 0)
    struct.pack_into("<Q", header, 2784, 5 * count + 4)  # names_used
    return bytes(header) + struct.pack("<I", 0) + b"\1\0\0\0a" * count


class Usage(CommandLine):
    def test_help_begins_with_an_example(self):
        for command in [], ["train"], ["run"], ["fit"], ["fix"], ["explain"], ["devices"], ["models"], ["env"], ["mcp"]:
            result = self.oomdiag(*command, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertTrue(result.stdout.startswith("example: oomdiag "), result.stdout)

    def test_unknown_names_are_answered_with_the_nearest(self):
        self.check_error(["trian"], 2, "trian", "did you mean train?")
        self.check_error(["run", "--jsn", "--", "true"], 2, "unknown option '--jsn'")
        self.check_error(["train", "--bacth", "3"], 2, "--bacth", "--batch")
        self.check_error(["explain", "a", "b"], 2, "unexpected argument 'b'")
        self.check_error(["train", "--device", "rtx3061"], 2, "rtx3061", "rtx3060")
        self.check_error(["run", "--device", "h20", "--", "true"], 2, "h20", "h200")
        self.check_error(["train", "--model", "depcnn"], 2, "depcnn", "deepcnn")

    def test_fix_and_fit_want_a_program_and_a_gpu_that_can_be_tried(self):
        self.check_error(["fix", "--model", "deepcnn", "--", "true"], 2, "fix needs a program")
        for command in ["fix"], ["fit", "--vary", "batch=1..4"]:  # no driver is found there, whatever the machine has
            self.check_error([*command, "--device", "real", "--", "true", "{batch}"], 1, "no NVIDIA GPU or no driver",
                             "leave out --device", env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        for command in ["train"], ["doctor"]:
            self.check_error([*command, "--device", "real"], 1, "no NVIDIA GPU or no driver", "leave out --device",
                             env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        self.check_error(["fix", "no-such-folder"], 2, "no such file or directory: 'no-such-folder'")
        (self.folder / "empty").mkdir()
        self.check_error(["fix", "empty"], 1, "does not say how its program was started")
        self.check_error(["fix", "empty", "--world-size", "2"], 2, "a rank cannot be chosen")
        self.check_error(["fit", "--device", "real", "--smallest-card", "--", "true"], 2, "virtual device")
        self.check_error(["fit", "--device", "rtx3060", "--vary", "batch=3..1", "--", "true", "{batch}"], 2, "3 is above 1", "batch=1..3")
        self.check_error(["fit", "--device", "rtx3060", "--vary", "batch=1..4", "--", "true"], 2, "no {batch} to vary")
        self.check_error(["fit", "--vary", "batch=1..4", "--vary", "batch=8", "--", "true", "{batch}"], 2, "--vary names batch twice")
        self.check_error(["fit", "--vary", "batch=1..4", "--print-jobs", "--", "true", "{batch}"], 2, "--print-jobs needs a job")
        for command in ["fix"], ["fit", "--smallest-card"]:
            self.check_error([*command, "--amp", "bf16", "--", "true"], 2, "--amp", "--model")

    def test_wrong_values_are_answered_with_the_right_ones(self):
        self.check_error(["train", "--batch", "0"], 2, "from 1 to")
        self.check_error(["train", "--steps", "many"], 2, "from 1 to")
        self.check_error(["train", "--amp", "fp8"], 2, "bf16")
        self.check_error(["train", "--memory", "8XB", "--device", "h200"], 2, "8GiB")
        self.check_error(["train", "--memory", "1MiB", "--device", "h200"], 2, "256MiB")
        self.check_error(["train", "--memory", "8", "--device", "h200"], 2, "'8' is 8 bytes", "did you mean 8GiB")
        self.check_error(["clean", "--older-than", "abc"], 2, "'abc' is not a number from 0 to 1000000")
        self.check_error(["run", "--device", "real", "--memory", "8GiB", "--", "true"], 2, "virtual")
        self.check_error(["run", "--device", "t4", "--count", "17", "--", "true"], 2, "from 1 to 16")
        self.check_error(["run", "--device", "t4,h200", "--count", "2", "--", "true"], 2, "a100-80,a100-80")
        self.check_error(["run", "--device", "real", "-o", "absent/report.json", "--", "true"], 2, "absent")
        self.check_error(["run"], 2, "oomdiag run")

    def test_a_file_that_cannot_be_read_is_no_budget_that_is_not_kept(self):
        (self.folder / "broken.json").write_text("{")
        for words in (["check", "missing.json"], ["check", "broken.json"], ["check", "missing.json", "--baseline", "none.json"], ["explain", "missing.json"]):
            self.assertEqual(self.oomdiag(*words).returncode, 2, words)

    def test_explain_wants_something_of_ours(self):
        (self.folder / "text").write_text("hello")
        (self.folder / "empty").touch()
        (self.folder / "other.json").write_text('{"a": 1}')
        (self.folder / "cut.json").write_text('{"schema": "oomdiag-report/1", "outc')
        (self.folder / "snapshot.pickle").write_bytes(b"\x80\x04\x95")
        for name in "text", "empty", "other.json", "cut.json", "snapshot.pickle", "absent", ".":
            code = 2 if name == "absent" else 1
            self.check_error(["explain", name], code, name, "hint: ")
            self.check_error(["compare", name, name], code, name, "hint: ")
        self.check_error(["explain", "cut.json"], 1, "it is cut off after 36 bytes")
        self.check_error(["compare", "cut.json", "cut.json"], 1, "'cut.json' is a report of oomdiag")
        self.check_error(["explain", "absent"], 2, "no such file or directory: 'absent'")

    def test_a_folder_that_may_not_be_read_says_so(self):
        if os.geteuid() != 0:
            self.skipTest("drops rights, so it needs them")
        self.folder.chmod(0o755)
        (self.folder / "run").mkdir(mode=0o700)
        try:
            result = self.oomdiag("explain", "run", user="nobody")
        except PermissionError:
            self.skipTest("the program is where nobody may not go")
        self.assertIn("cannot read 'run': Permission denied", result.stderr)

    def test_help_and_version_are_what_other_programs_call_so(self):
        for words in ["help"], ["help", "run"], ["run", "--help"]:
            self.assertIn("example: oomdiag ", self.oomdiag(*words).stdout)
        self.assertEqual(self.oomdiag("help", "run").stdout, self.oomdiag("run", "--help").stdout)
        for word in "version", "-V", "-v", "--version":
            self.assertRegex(self.oomdiag(word).stdout, r"^oomdiag \d+\.\d+")
        self.check_error(["help", "trian"], 2, "did you mean train?")

    def test_values_are_looked_at_before_anything_is_run(self):
        result = self.oomdiag("fit", "--device", "rtx3060", "--vary", "batch=x", "--", "python3", "{batch}")
        self.assertEqual(result.returncode, 2)
        self.assertNotIn("running your", result.stderr)

    def test_a_full_disk_behind_stdout_is_an_error_with_its_reason(self):
        report = self.folder / "report.json"
        report.write_text('{"schema": "oomdiag-report/1", "outcome": "ok"}')
        for command in ["explain", str(report)], ["explain", str(report), "--json"], ["devices"], ["--help"]:
            with open("/dev/full", "w") as full:
                result = self.oomdiag(*command, capture_output=False, stdout=full, stderr=subprocess.PIPE)
            self.assertEqual(result.returncode, 1, command)
            self.assertIn("No space left on device", result.stderr)
            self.assertNotIn("fault of oomdiag", result.stderr)

    def test_a_large_file_that_begins_like_a_report_is_rejected_unread(self):
        begin = time.monotonic()
        for content, said in ((b'{"schemaVersion": 1, "traceEvents": [', ("a Chrome trace",)),
                              (b'{"schemaVersion": 1, "events": [', ("no report of oomdiag", "8192 MiB"))):
            with open(self.folder / "trace.json", "wb") as file:
                file.write(content)
                file.truncate(8 << 30)
            self.check_error(["explain", "trace.json"], 1, "trace.json", *said)
        self.assertLess(time.monotonic() - begin, 5)

    def test_names_in_errors_do_not_reach_the_terminal_as_they_are(self):
        result = self.oomdiag("explain", "no\x1b[31m\u202esuch")
        self.assertNotRegex(result.stderr, "[\x1b\u202e]")
        self.assertIn("no?[31m?such", result.stderr)

    def test_a_pipe_that_closes_is_no_crash(self):
        result = subprocess.run(["sh", "-c", f'"{OOMDIAG}" devices | head -n1'], capture_output=True, text=True, check=True)
        self.assertIn("device", result.stdout)


class Clean(CommandLine):
    def make(self, path, *files):
        for file in files:
            (self.folder / path / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path / file).write_text("content")

    def setUp(self):
        super().setUp()
        self.make("oomdiag-11", "trace", "report.json", "output.txt", "run.json", "fix.json", "report.html", "run.json.part")
        self.make("oomdiag-12-2", "rank-0/trace", "rank-0/report.json", "4711/trace", "report.json")
        self.make("oomdiag-13", "trace", "my-notes.txt")
        self.make("oomdiag-notes", "trace")
        self.make("oomdiag-14x", "trace")
        self.make("elsewhere", "trace", "report.json")
        (self.folder / "oomdiag-15").symlink_to(self.folder / "elsewhere")
        self.make("oomdiag-16", "trace")
        (self.folder / "oomdiag-16/report.json").symlink_to(self.folder / "elsewhere/report.json")

    def here(self):
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def test_without_a_word_it_only_lists(self):
        before = self.here()
        result = self.oomdiag("clean")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("2 runs, ", result.stdout)
        self.assertIn("--yes", result.stdout)
        self.assertEqual(self.here(), before)

    def test_only_what_runs_wrote_goes(self):
        before = self.here()
        result = self.oomdiag("clean", "--yes")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("'my-notes.txt', which no run writes", result.stdout)
        gone = set(before) - set(self.here())
        self.assertEqual({path.split("/")[0] for path in gone}, {"oomdiag-11", "oomdiag-12-2"})
        self.assertFalse((self.folder / "oomdiag-11").exists() or (self.folder / "oomdiag-12-2").exists())
        self.assertIn("nothing to remove", self.oomdiag("clean", "--yes").stdout)

    def test_an_age_spares_the_young(self):
        for path in [self.folder / "oomdiag-11", *(self.folder / "oomdiag-11").iterdir()]:
            os.utime(path, (0, 0))
        result = self.oomdiag("clean", "--older-than", "7", str(self.folder), cwd="/")
        self.assertIn("1 run of the last 7 days stays", result.stdout)
        self.assertFalse((self.folder / "oomdiag-11").exists())
        self.assertTrue((self.folder / "oomdiag-12-2").exists())


class Devices(CommandLine):
    def test_the_catalogue_in_a_table_and_in_json(self):
        table = self.oomdiag("devices")
        self.assertEqual(table.returncode, 0, table.stderr)
        gpus = json.loads(self.oomdiag("devices", "--json").stdout)
        self.assertGreaterEqual({gpu["id"] for gpu in gpus}, {"rtx3060", "rtx4090", "h200"})
        for gpu in gpus:
            self.assertIn(gpu["id"], table.stdout)
            self.assertGreater(gpu["total_bytes"], gpu["context_bytes"])

    def test_gpus_that_this_torch_has_no_code_for_are_known_by_name(self):
        table = self.oomdiag("devices", "--all").stdout
        self.assertIn(" gtx1080, ", table)
        supported = {gpu["id"] for gpu in json.loads(self.oomdiag("devices", "--json").stdout)}
        for name in ("gtx1080", "GTX-1080", "orin-nx-16", *({"v100-32"} - supported)):  # torches for CUDA 12 have code for a V100
            self.check_error(["train", "--model", "deepcnn", "--device", name], 2, "no virtual ", "oomdiag devices")

    def test_a_machine_without_a_gpu_has_no_gpu_to_measure(self):
        self.check_error(["devices", "-o", "device.json"], 2, "--measure")
        if not pathlib.Path("/dev/nvidiactl").exists():
            self.check_error(["devices", "--measure"], 1, "no GPU to measure")

    def test_a_gpu_of_ones_own_is_a_copy_with_other_numbers(self):
        gpu = json.loads(pathlib.Path(json.loads(self.oomdiag("devices", "--json").stdout)[0]["file"]).read_text())
        gpu["total_bytes"]["value"] = "much"
        (self.folder / "mine.json").write_text(json.dumps(gpu))
        self.check_error(["train", "--model", "deepcnn", "--device", "./mine.json"], 1, "mine.json", '"total_bytes"')

    def test_it_starts_in_milliseconds(self):
        best = min(self.time_devices() for _ in range(5))
        self.assertLess(best, 0.1)

    def time_devices(self):
        begin = time.monotonic()
        self.oomdiag("devices")
        return time.monotonic() - begin


if __name__ == "__main__":
    unittest.main(verbosity=2)
