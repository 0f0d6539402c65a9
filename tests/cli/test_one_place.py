"""What stands in several languages or files and has to be one and the same: ids of fixes, how JSON becomes text.

Usage: test_one_place.py
"""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def known():
    """Ids of the table of fixes, by which the report predicts and Python modules apply them."""
    return {id for file in (ROOT / "profiler/explain/fixes").glob("*.cpp") for table in re.findall(r"FixRow \w+\[\] = \{.*?^\};", file.read_text(), re.M | re.S)
            for id in re.findall(r'^    \{\.id = "(\w+)"', table, re.M)}


def run():
    """Those that `fix` names itself; it applies Python modules as the rows say. A number at the end is a setting."""
    ids = set()
    for file in (ROOT / "cli/experiments").glob("fix*.cpp"):
        ids |= set(re.findall(r'change_of\((?:parts == 2 \? )?"(\w+)"', file.read_text()))
    return {re.sub(r"_\d+$", "", id) for id in ids}


class Ids(unittest.TestCase):
    def test_what_fix_runs_is_what_the_report_predicts(self):
        self.assertGreater(len(known()), 80)
        self.assertGreater(len(run()), 4)
        self.assertEqual(run() - known(), set())


class Json(unittest.TestCase):
    def test_the_command_line_writes_json_by_one_function(self):
        """dump() by itself throws where a file name is no UTF-8."""
        users = [file.name for file in (ROOT / "cli").rglob("*.cpp") if re.search(r"\.dump\(", file.read_text())]
        self.assertEqual(users, [])  # profiler/report/words/json_text.h does it


if __name__ == "__main__":
    unittest.main(verbosity=2)
