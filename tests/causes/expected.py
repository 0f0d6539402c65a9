"""The programs in programs/ and what the first screen is to say of each. Nearly all are after public threads in which people confirmed why
their program ran out of memory: written anew, each with a model, a loop and the mistake, and with what is wrong before its first run, by
somebody who had not read the rules. What is taken from a thread is its cause, and `fixed` is the program with the confirmed fix.
"""
import ast
import dataclasses
import pathlib

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass
class Program:
    module: str
    function: str
    reason: str
    fix: str
    thread: str = ""
    memory: int = 1024
    held_back: bool = False
    quick: bool = False


def expected(reason, fix, thread="", memory=1024, held_back=False, quick=False):
    """Of a function `program(fixed=False)` that runs out of memory, or grows, and does not when it is fixed. The arguments are literals.

    reason     the id of a row of kReasons, or a cause where that says it all; of what nothing shows in a recording, an id that no row has
    fix        a regular expression of what one of the three best fixes is to mention
    thread     the public thread in which people confirmed the cause; empty: a known habit, without one thread
    memory     of the GPU, MiB
    held_back  no rule was written between its writing and its first run
    quick      one of the few that every test run has
    """
    return lambda function: function


def list_programs():
    """In the order of files and lines."""
    programs = []
    for path in sorted((FOLDER / "programs").rglob("*.py")):
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == expected.__name__:
                    words = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                    programs.append(Program(module, node.name, *map(ast.literal_eval, call.args), **words))
    return programs
