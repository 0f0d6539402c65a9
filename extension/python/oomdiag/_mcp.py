"""An MCP server: oomdiag's commands as tools for agents. `python -m oomdiag mcp`, with `pip install mcp` (the official SDK) beside it.

    {"mcpServers": {"oomdiag": {"command": "python", "args": ["-m", "oomdiag", "mcp"]}}}

Each tool is a command and gives its JSON, shortened: what an agent asks for is the answer, not every table. `program` is an argument
list, run without a shell, with the rights of this server, as the agent itself could.
"""
from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Optional

_MOST_ROWS = 12  # of a list in an answer
_LEFT_OUT = ("timeline", "devices_before", "blocks", "segments")


class _Failed(Exception):
    """What oomdiag or the program says of its failure."""


def _short(value: Any) -> Any:
    """The same with the first rows of its lists, and without those that only a picture needs."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items() if name not in _LEFT_OUT and one not in (None, [], {}, "")}
    if isinstance(value, list):
        return [_short(one) for one in value[:_MOST_ROWS]] + ([f"… {len(value) - _MOST_ROWS} more"] if len(value) > _MOST_ROWS else [])
    return value


def _oomdiag(*arguments: str, cwd: Optional[str] = None) -> "subprocess.CompletedProcess[str]":
    from . import _command
    environment = {**os.environ, "OOMDIAG_PYTHON": os.environ.get("OOMDIAG_PYTHON", sys.executable)}
    return subprocess.run([str(_command()), *arguments], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)


def _device(device: Optional[str]) -> List[str]:
    return ["--device", device] if device else []


def _last(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])


def run(program: List[str], device: Optional[str] = None, cwd: Optional[str] = None, complete: bool = False) -> Dict[str, Any]:
    """Runs a PyTorch program, as in ["python", "train.py"], and explains its GPU memory: where it ran out, who holds it, why, what helps.

    device: a virtual GPU as rtx4090 or a100-80, which need not be there; default: the real one if there is one, else an H200.
    complete: where it runs out of memory, run it once more with more memory, so that figures are those of a whole step.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "report.json")
        done = _oomdiag("run", *_device(device), *(["--complete"] if complete else []), "--no-progress", "-o", str(file), "--", *program, cwd=cwd)
        if not file.exists():
            raise _Failed(f"exit code {done.returncode}, and no report: {_last(done.stderr)}")
        return {"exit_code": done.returncode, "text": _last(done.stderr, 40), "report": _short(json.loads(file.read_text()))}


def explain(path: str = "", device: Optional[str] = None, cwd: Optional[str] = None) -> Dict[str, Any]:
    """The report on a run folder, a trace, a report.json, a bundle, or a memory snapshot of PyTorch; default: the newest run in cwd.

    device: of a snapshot, the GPU that it was taken on, which it does not name.
    """
    done = _oomdiag("explain", *([path] if path else []), *_device(device), "--json", cwd=cwd)
    if done.returncode != 0:
        raise _Failed(_last(done.stderr))
    return _short(json.loads(done.stdout))


def _text_of(*arguments: str, cwd: Optional[str], fine: tuple = (0,)) -> str:
    done = _oomdiag(*arguments, cwd=cwd)
    if done.returncode not in fine:
        raise _Failed(_last(done.stderr) or _last(done.stdout))
    return done.stdout or _last(done.stderr, 60)


def fix(program: Optional[List[str]] = None, path: str = "", device: Optional[str] = None, cwd: Optional[str] = None) -> str:
    """Applies each fix to an unchanged program, runs it, and gives what it measured with the lines to write. Takes minutes.

    Give a program with a device, or the path of a run folder; neither: the newest run in cwd.
    """
    what = ["--", *program] if program else ([path] if path else [])
    return _text_of("fix", *_device(device), *what, cwd=cwd, fine=(0, 3))  # 3: nothing makes it fit


def fit(program: List[str], vary: List[str], device: Optional[str] = None, cwd: Optional[str] = None) -> str:
    """The largest value that fits: vary ["batch=1..512"] with {batch} in the program, as in ["python", "train.py", "--batch-size", "{batch}"]."""
    varied = [word for one in vary for word in ("--vary", one)]
    return _text_of("fit", *_device(device), *varied, "--", *program, cwd=cwd, fine=(0, 3))


def diff(before: str, after: str, cwd: Optional[str] = None) -> str:
    """What the second run (a folder or report.json) holds more or less than the first, by category, module, op and line."""
    return _text_of("diff", before, after, cwd=cwd, fine=(0, 1))


TOOLS = (run, explain, fix, fit, diff)


def _with_errors(tool: Any, error: Any) -> Any:
    """The same tool, whose failures reach the agent with their words."""
    @functools.wraps(tool)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return tool(*arguments, **keywords)
        except _Failed as failure:
            raise error(str(failure)) from None
    return call


def serve() -> None:
    """Answers on stdin and stdout until they are closed."""
    try:
        from mcp.server.mcpserver import MCPServer as Server
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        try:
            from mcp.server.fastmcp import FastMCP as Server  # its name in version 1
            from mcp.server.fastmcp.exceptions import ToolError
        except ImportError:
            sys.exit("oomdiag: error: the MCP SDK is missing\nhint: pip install 'oomdiag[mcp]', or pip install mcp")
    server = Server("oomdiag", instructions="Explains the GPU memory of PyTorch programs, on GPUs that need not be there.")
    for tool in TOOLS:
        server.tool()(_with_errors(tool, ToolError))
    server.run("stdio")
