"""The functions that a library's headers declare, as the compiler sees them."""

import re
import subprocess

ATTRIBUTE = r"(?:\s+__attribute__\s*\(\([^;]*?\)\)\s*)?"  # what cuFFT's macro for exported functions is


def preprocess(compiler, include, headers, defines=()):
    """The text of the headers."""
    source = "".join(f"#include <{header}>\n" for header in headers)
    command = [compiler, "-E", "-P", "-x", "c++", *(f"-I{folder}" for folder in include), *(f"-D{define}" for define in defines), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def enumerators(text, type_):
    """The names of the values of an enumeration."""
    values = re.search(r"\benum\b[^{};]*\{([^{}]*)\}\s*" + type_ + r"\s*;", text).group(1)
    return re.findall(r"(?:^|,)\s*(\w+)", values)


def declarations(text, status):
    """(name, [(type, parameter)]) of each function that returns `status`."""
    for name, parameters in re.findall(r"\b" + status + ATTRIBUTE + r"\s+(\w+)\s*\(([^;{}]*?)\)\s*;", text):
        yield name, [split_parameter(" ".join(one.split())) for one in parameters.split(",") if one.strip() not in ("", "void")]


def split_parameter(text):
    """ "const float *A[]" as ("const float **", "A"). """
    text = re.sub(r"\s*=.*", "", text)  # a default is not for the definition
    type_, name, array = re.match(r"(.*?)(\w+)\s*((?:\[\w*\])*)$", text).groups()
    return type_.strip() + "*" * array.count("["), name


def definition(status, name, parameters, body):
    """The function in C++, on one line; parameters that the body does not use have no name."""
    used = [f"{type_} {parameter}" if re.search(rf"\b{parameter}\b", body) else type_ for type_, parameter in parameters]
    return f"OOMDIAG_ENTRY_POINT {status} {name}({', '.join(used)}) {{ {body} }}"
