"""oomdiag_forks.py starts a script as Python itself would: the same arguments, environment, streams and end."""
import array
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

FIXES = pathlib.Path(__file__).resolve().parents[2] / "extension/python/fixes"
sys.path.insert(0, str(FIXES))
import oomdiag_forks  # noqa: E402


class Program:
    """What stands for one forked program, as cli/process/forked_program.cpp does."""

    def __init__(self, place, arguments, environment, output):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(60)
        self.connection.connect(place)
        with open(os.devnull) as nothing, open(output, "wb") as file:
            streams = array.array("i", [nothing.fileno(), file.fileno(), file.fileno()])
            self.connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        parts = [str(len(arguments)), *arguments, *(f"{name}={value}" for name, value in environment.items())]
        body = b"".join(os.fsencode(part) + b"\0" for part in parts)
        self.connection.sendall(struct.pack("I", len(body)) + body)
        self.begun = self.connection.recv(1) == b"b"

    def end(self):
        with self.connection:
            return os.waitstatus_to_exitcode(struct.unpack("i", self.connection.recv(4))[0])


class Forks(unittest.TestCase):
    def serve(self, script):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.script = str(self.folder / "train.py")
        pathlib.Path(self.script).write_text(textwrap.dedent(script))
        self.place = str(self.folder / "forks")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.place)
        listener.listen()
        server = subprocess.Popen([sys.executable, FIXES / "oomdiag_forks.py", str(listener.fileno()), self.script],
                                  stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  pass_fds=[listener.fileno()], env=os.environ | {"PYTHONPATH": str(FIXES)})
        listener.close()
        self.addCleanup(server.wait, 60)
        self.addCleanup(server.stdin.close)

    def start(self, *arguments, **environment):
        self.output = self.folder / "output.txt"
        return Program(self.place, [sys.executable, self.script, *arguments], {"PATH": os.environ["PATH"], **environment}, self.output)

    def test_arguments_environment_and_exit_code_are_those_of_the_program(self):
        self.serve("""
            import os, sys
            print(sys.argv[1:], os.environ["WORD"], "HOME" in os.environ, __name__, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__))
            sys.exit(7)
            """)
        for word in ("one", "two"):
            self.assertEqual(self.start("--batch", word, WORD=word).end(), 7)
            self.assertEqual(self.output.read_text(), f"['--batch', '{word}'] {word} False __main__ train.py True\n")

    def test_an_exception_is_printed_and_a_signal_ends_it(self):
        self.serve("""
            import sys, time
            if len(sys.argv) == 1:
                raise ValueError("what it says")
            print("runs", flush=True)
            time.sleep(60)
            """)
        self.assertEqual(self.start().end(), 1)
        self.assertTrue(self.output.read_text().endswith("ValueError: what it says\n"))
        program = self.start("sleep")
        program.connection.send(bytes([signal.SIGTERM]))
        self.assertEqual(program.end(), -signal.SIGTERM)

    def test_a_program_ends_with_what_stands_for_it(self):
        self.serve("""
            import os, time
            print(os.getpid(), flush=True)
            time.sleep(60)
            """)
        program = self.start()
        while not (text := self.output.read_text()):
            pass
        pidfd = os.pidfd_open(int(text))
        program.connection.close()
        self.assertTrue(select.select([pidfd], [], [], 30)[0])

    def test_a_module_of_the_program_is_imported_by_the_program(self):
        self.serve("import own_module\nprint(own_module.VALUE)")
        (self.folder / "own_module.py").write_text("VALUE = 1")
        self.assertEqual(self.start().end(), 0)
        (self.folder / "own_module.py").write_text("VALUE = 22")
        self.assertEqual(self.start().end(), 0)
        self.assertEqual(self.output.read_text(), "22\n")

    def test_a_process_that_has_a_thread_does_not_fork(self):
        self.assertFalse(oomdiag_forks._has_begun())
        thread = threading.Timer(600, print)
        thread.daemon = True
        thread.start()
        self.addCleanup(thread.cancel)
        self.assertTrue(oomdiag_forks._has_begun())

    def test_imports_are_made_up_to_the_first_other_statement(self):
        source = textwrap.dedent('''
            """A docstring."""
            from __future__ import annotations
            import json, os.path
            from collections import deque
            BATCH = 4
            def train(): pass
            import math
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
            import random
            ''')
        names = [alias.name for node in oomdiag_forks.imports_at_head(source) for alias in node.names]
        self.assertEqual(names, ["json", "os.path", "deque", "math"])
        self.assertEqual(oomdiag_forks.imports_at_head("from . import model\nimport json"), [])
        self.assertEqual(oomdiag_forks.imports_at_head("import no_such_package_here\nimport json"), [])
        self.assertEqual(len(oomdiag_forks.imports_at_head("import json\nimport unittest", torch_only=True)), 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
