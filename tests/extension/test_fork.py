"""What a forked child of a recorded program may do (extension/record/fork_and_exit.h): it ends as it would alone, whatever lock
another thread of its parent held when it was forked.

    python tests/extension/test_fork.py --build BUILD_FOLDER --locks LIBRARY [unittest arguments]
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import unittest

build = pathlib.Path("build").resolve()
locks = None

# `in_child` is run in a child that is forked while a thread of its parent holds the lock that a thread takes at its first op.
PROGRAM = """
import ctypes, os, signal, sys, threading, time, torch
slow = ctypes.c_int.in_dll(ctypes.CDLL({locks!r}), "slow_locks")
x = torch.ones(10, device="cuda")
y = x + 1
slow.value = 1
thread = threading.Thread(target=lambda: x + 1)
thread.start()
time.sleep(0.15)
pid = os.fork()
if pid == 0:
    slow.value = 0
    signal.alarm(20)
    {in_child}
_, status = os.waitpid(pid, 0)
slow.value = 0
thread.join()
hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
print("hung" if hung else "ended %d" % os.waitstatus_to_exitcode(status))
"""


class ForkTest(unittest.TestCase):
    def run_program(self, program):
        with tempfile.TemporaryDirectory(prefix="oomdiag fork ") as folder:
            file = pathlib.Path(folder) / "program.py"
            file.write_text(program)
            preloaded = ["sh", "-c", f'LD_PRELOAD="{locks}:$LD_PRELOAD" exec "$@"', "sh", sys.executable, file]
            command = [build / "bin/oomdiag", "run", "--device", "rtx3060", "--folder", pathlib.Path(folder) / "run", "--", *preloaded]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

    def child_that(self, in_child):
        return self.run_program(PROGRAM.format(locks=str(locks), in_child=in_child))

    def test_a_child_ends_by_sys_exit_while_a_thread_of_its_parent_begins(self):
        self.assertEqual(self.child_that("sys.exit(7)"), "ended 7\n")

    def test_a_child_ends_by_exit_of_c(self):
        self.assertEqual(self.child_that("ctypes.CDLL(None).exit(5)"), "ended 5\n")

    def test_ops_and_threads_of_a_child_end(self):
        ops = "t = threading.Thread(target=lambda: torch.ones(3) + 1); t.start(); t.join(); torch.ones(3) + 1; sys.exit(3)"
        self.assertEqual(self.child_that(ops), "ended 3\n")

    def test_a_child_gets_a_message_that_it_is_not_recorded(self):
        asks = ("torch.ops.oomdiag.stop()\n"
                "    for ask in torch.ops.oomdiag.start, torch.ops.oomdiag.report, torch.ops.oomdiag.peak:\n"
                "        try: ask()\n"
                "        except RuntimeError as error: print(str(error).splitlines()[0].split(',')[0], flush=True)\n"
                "    sys.exit(4)")
        said = "oomdiag: this process is a fork of one that records\n"
        self.assertEqual(self.child_that(asks), 3 * said + "ended 4\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    parser.add_argument("--locks", type=pathlib.Path, required=True)
    known, rest = parser.parse_known_args()
    build, locks = known.build.resolve(), known.locks.resolve()
    unittest.main(argv=["test_fork.py", *rest], verbosity=2)
