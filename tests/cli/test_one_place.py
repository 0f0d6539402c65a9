"""What stands in several languages or files and has to be one and the same: ids of fixes, how JSON becomes text.

Usage: test_one_place.py
"""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def known():
    """Ids of the table of fixes, by which the report predicts and Python modules apply them."""
    return set(re.findall(r'^    \{\.id = "(\w+)"', (ROOT / "profiler/explain/fixes.cpp").read_text(), re.M))


def run():
    """Those that `fix` runs: injected(...) applies a Python module, .id = "..." another way. A number at the end is a setting."""
    ids = set()
    for file in (ROOT / "cli/experiments").glob("fix*.cpp"):
        ids |= set(re.findall(r'injected\("(\w+)"|\.id = (?:parts == 2 \? )?"(\w+)"', file.read_text()))
    return {re.sub(r"_\d+$", "", first or second) for first, second in ids}


class Ids(unittest.TestCase):
    def test_what_fix_runs_is_what_the_report_predicts(self):
        self.assertGreater(len(known()), 20)
        self.assertGreater(len(run()), 10)
        self.assertEqual(run() - known(), set())


class Json(unittest.TestCase):
    def test_the_command_line_writes_json_by_one_function(self):
        """dump() by itself throws where a file name is no UTF-8."""
        users = [file.name for file in (ROOT / "cli").rglob("*.cpp") if re.search(r"\.dump\(", file.read_text())]
        self.assertEqual(users, [])  # profiler/report/json_text.h does it


if __name__ == "__main__":
    unittest.main(verbosity=2)
