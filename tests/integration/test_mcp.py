"""The MCP server, asked as an agent asks it.

    python tests/integration/test_mcp.py --build BUILD_FOLDER [unittest arguments]

Left out where the MCP SDK is not installed. OOMDIAG_TEST_MCP_PYTHON names a Python that has it, if this one does not.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SERVER = os.environ.get("OOMDIAG_TEST_MCP_PYTHON", sys.executable)


def has_sdk():
    return subprocess.run([SERVER, "-c", "import mcp"], capture_output=True).returncode == 0


class Agent:
    """Speaks JSON-RPC, one message a line."""

    def __init__(self, build, folder):
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        self.server = subprocess.Popen([SERVER, "-m", "oomdiag", "mcp"], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       env=os.environ | {"PYTHONPATH": str(build / "lib/python"), "PATH": path})
        self.number = 0
        self.ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "test", "version": "1"})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.server.stdin.write(json.dumps(message) + "\n")
        self.server.stdin.flush()

    def ask(self, method, **parameters):
        self.number += 1
        self.send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": parameters})
        while True:
            answer = json.loads(self.server.stdout.readline())
            if answer.get("id") == self.number:
                return answer["result"]

    def call(self, name, **arguments):
        return self.ask("tools/call", name=name, arguments=arguments)

    def close(self):
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait(30)


@unittest.skipUnless(has_sdk(), "the MCP SDK is not installed")
class Mcp(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "train.py").write_text("import torch\nx = [torch.zeros(1 << 28, device='cuda') for _ in range(20)]\n")
        self.agent = Agent(build, self.folder)
        self.addCleanup(self.agent.close)

    def test_tools_are_listed_with_what_they_take(self):
        tools = {tool["name"]: tool for tool in self.agent.ask("tools/list")["tools"]}
        self.assertEqual(sorted(tools), ["diff", "explain", "fit", "fix", "run"])
        self.assertEqual(tools["run"]["inputSchema"]["required"], ["program"])

    def test_a_program_is_run_and_explained(self):
        answer = self.agent.call("run", program=[sys.executable, "train.py"], device="t4", cwd=str(self.folder))
        failed = json.loads(answer["content"][0]["text"])
        self.assertEqual((failed["exit_code"], failed["report"]["outcome"]), (1, "out_of_memory"))
        self.assertIn("train.py:2", failed["report"]["devices"][0]["failure"]["source"])
        again = json.loads(self.agent.call("explain", cwd=str(self.folder))["content"][0]["text"])
        self.assertEqual(again["devices"][0]["failure"]["source"], failed["report"]["devices"][0]["failure"]["source"])
        self.assertLess(len(answer["content"][0]["text"]), 40000)

    def test_what_fails_is_reported_with_its_reason(self):
        answer = self.agent.call("explain", path="nothing.pickle", cwd=str(self.folder))
        self.assertTrue(answer["isError"])
        self.assertIn("no such file", answer["content"][0]["text"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    build = arguments.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
