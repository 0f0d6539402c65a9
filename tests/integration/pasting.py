"""Puts the lines that a report prints into a program, verbatim, at the place that they name: what a reader does by hand.

In a line "…" stands for what the program has there already: the other arguments of a call, or an expression.
"""
import ast
import builtins
import importlib.util
import re
import textwrap


class NoPlace(Exception):
    """The lines have names or places that this program does not have."""


def environment_of(lines):
    """Variables that the lines export."""
    return dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))


def as_code(lines):
    """The lines as Python that can be parsed; None where they are no Python: commands for a shell, options, notes."""
    shell = ("export ", "pip ", "torchrun ", "--", "#")
    if all(line.startswith(shell) for line in lines):
        return None
    code = "\n".join(line for line in lines if not line.startswith(shell)).replace("…", "...")
    last = code.splitlines()[-1].split("#")[0].rstrip()
    if last.startswith("@"):
        code += "\ndef _decorated(): ..."
    if last.endswith(":"):
        code += "\n" + " " * (len(last) - len(last.lstrip()) + 4) + "..."
    return code


def names_bound(code):
    """Names that running the code at the top of a program would bind there."""
    names = set()

    def visit(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            return
        if isinstance(node, (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(code))
    return names


def _names_unbound(code, program):
    """Names that the lines use and neither they nor the program define: `head` and `labels` stand for the reader's own."""
    tree = ast.parse(code)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | names_bound(code)
    bound |= {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
              for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name for name in used - bound if not hasattr(builtins, name) and not re.search(rf"\b{name}\b", program)}


def _around_loop(program, header):
    """`header` above the last loop at the top of the program, which goes one level in."""
    lines = program.splitlines()
    begin = max(i for i, line in enumerate(lines) if line.startswith("for "))
    end = next((i for i in range(begin + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    return "\n".join([*lines[:begin], header, *("    " + line for line in lines[begin:end]), *lines[end:]]) + "\n"


def _above_function(program, decorator):
    name = re.search(r"above def (\w+)", decorator)[1]
    return re.sub(rf"^def {name}\(", f"{decorator}\ndef {name}(", program, flags=re.M)


def _at_end_of_loop(program, line):
    return program.replace("    optimizer.step()\n", f"    optimizer.step()\n    {line}\n")


def _replace(program, old, new):
    if old not in program:
        raise NoPlace(old)
    return program.replace(old, new)


def paste(program, lines):
    """The program with the lines in it. Raises NoPlace."""
    for package in (line.removeprefix("pip install ") for line in lines if line.startswith("pip install ")):
        if importlib.util.find_spec(package) is None:
            raise NoPlace(f"{package} is not installed")
    imports = [line for line in lines if line.startswith("import ") and len(lines) < 4]
    lines = [line for line in lines if not line.startswith(("export ", "pip ", "# or, of")) and line not in imports]
    if not lines:
        return program
    program = "".join(line + "\n" for line in imports) + program
    first = lines[0]
    if match := re.fullmatch(r"optimizer = ([\w.]+)\(model\.parameters\(\), lr=…\)", first):
        return re.sub(r"torch\.optim\.\w+\(model\.parameters\(\).*\)", f"{match[1]}(model.parameters(), lr=0.1)", program)
    if match := re.fullmatch(r"(?:optimizer = )?torch\.optim\.\w+\(model\.parameters\(\), (?:…, )?(.*)\)(?:  # or .*)?", first):
        return _replace(program, "OPTIONS", match[1])
    if match := re.fullmatch(r"torch\.nn\.ReLU\((.*)\)", first):
        return _replace(program, "nn.ReLU()", f"nn.ReLU({match[1]})")
    if first.startswith("optimizer.zero_grad("):
        return _replace(program, "optimizer.zero_grad(ZERO)", first)
    if first.startswith("with torch.no_grad():"):
        return _around_loop(program, first)
    if first.startswith("@"):
        return _above_function(program, first)
    if first.startswith("del ") and "before loss.backward()" in first:
        return _replace(program, "    loss.backward()\n", f"    {first}\n    loss.backward()\n")
    if first.startswith(("del ", "gc.collect")):
        return _at_end_of_loop(program, first)
    if lines[-1] == "    output = model(x)":
        call = re.search(r"^( *)\w+ = model\([^()]*\)$", program, flags=re.M)
        if call is None:
            raise NoPlace(first)
        return program.replace(call[0], call[1] + first + "\n    " + call[0])
    if first.startswith(("with torch.autograd.graph.save_on_cpu", "with torch.autocast")):
        forward = re.search(r"^    \w+ = model\((?:.*\n)*?    loss = .*\n|^    loss = .*model\(.*\n", program, flags=re.M)
        if forward is None:
            raise NoPlace(first)
        body = re.sub("    loss = …  # forward.*\n?", lambda _: forward[0], "\n".join(lines))
        if lines[-1] == "loss.backward()":
            program = program.replace("    loss.backward()\n", "")
        return program.replace(forward[0], textwrap.indent(body, "    ").rstrip() + "\n")
    if first.startswith("for micro_x, micro_y in zip(inputs"):
        step = "    loss = loss_of(model(inputs), labels)\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        return _replace(program, step, textwrap.indent("\n".join(lines), "    ") + "\n")
    if "…" in "\n".join(lines) or "--" == first[:2] or _names_unbound(as_code(lines), program):
        raise NoPlace("stands for something that only the reader knows")
    return _replace(program, "# HERE", "\n".join(lines))
