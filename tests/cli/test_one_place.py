"""What stands in several languages or files and has to be one and the same: ids of fixes, how JSON becomes text.

Usage: test_one_place.py
"""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = ROOT / "extension" / "python" / "remedies" / "oomdiag_remedies"
MEASURED_ONLY = {"channels_last"}  # what it saves, cuDNN alone knows


def texts(folder, pattern):
    return [file.read_text() for file in sorted((ROOT / folder).rglob(pattern))]


def predicted():
    ids = set()
    for text in texts("profiler/explain", "*.cpp"):
        for value in re.findall(r"\.id = ([^;,]*)", text):
            ids |= set(re.findall(r'"(\w+)"', value))
    return ids


def applied():
    return {file.stem for file in MODULES.glob("*.py") if re.search(r"^def apply\(", file.read_text(), re.M)} - {"look"}


def run():
    """Those that `fix` names: injected(...) applies a Python module, .id = "..." another way."""
    ids = set()
    for text in texts("cli", "fix*.cpp"):
        ids |= set(re.findall(r'injected\("(\w+)"', text)) | set(re.findall(r'\.id = (?:parts == 2 \? )?"(\w+)"', text))
    return ids


class Ids(unittest.TestCase):
    """In the rules that predict a fix, in `oomdiag fix` that runs it, and in the Python module that applies it."""

    def test_what_fix_runs_is_what_the_report_predicts(self):
        self.assertGreater(len(run()), 10)
        self.assertEqual(run() - predicted(), MEASURED_ONLY)

    def test_each_python_module_applies_a_fix_that_is_run(self):
        ids = {"accumulate" if id == "accumulate_2" else id for id in run()}
        self.assertEqual(applied() - ids, set())


class Json(unittest.TestCase):
    def test_the_command_line_writes_json_by_one_function(self):
        """dump() by itself throws where a file name is no UTF-8."""
        users = [file.name for file in (ROOT / "cli").rglob("*.cpp") if re.search(r"\.dump\(", file.read_text())]
        self.assertEqual(users, ["json_text.cpp"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
