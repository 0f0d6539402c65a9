"""The report's schema: what reports have of it, and whether old reports are still read.

    python tests/reports/test_schema.py --build BUILD_FOLDER [unittest arguments]

corpus/ holds reports of today (now-*.json) and such as older versions wrote, named by the number of fields that the schema had
then. A field is (object, name).
"""
import argparse
import json
import pathlib
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = sorted((HERE / "corpus").glob("*.json"))
SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())


def fields_of(value, name, found):
    """Fields of a value in JSON, by the object of the schema that each belongs to."""
    properties = (SCHEMA if name == "report" else SCHEMA["$defs"][name])["properties"]
    for one in value if isinstance(value, list) else [value] if value else []:
        for field, inner in one.items():
            found.add((name, field))
            inside = target(properties.get(field, {}))
            if inside:
                fields_of(inner, inside, found)


def target(field):
    """The object that a field holds, or a list of, or None."""
    for one in [field, field.get("items", {}), *field.get("oneOf", [])]:
        if "$ref" in one:
            return one["$ref"].rsplit("/", 1)[1]
    return None


def declared(key):
    return {(name, field) for name, one in [("report", SCHEMA), *SCHEMA["$defs"].items()] for field in one.get(key, ())}


class Schema(unittest.TestCase):
    maxDiff = None

    def explain(self, file, *options):
        return subprocess.run([build / "bin/oomdiag", "explain", file, *options], capture_output=True, text=True, timeout=60)

    def test_reports_have_the_declared_fields_and_no_other(self):
        found = set()
        for file in CORPUS:
            done = self.explain(file, "--json")
            self.assertEqual(done.returncode, 0, f"{file.name}: {done.stderr}")
            fields_of(json.loads(done.stdout), "report", found)
        self.assertEqual((found - declared("properties"), declared("required") - found), (set(), set()), "undeclared, and not there")

    def test_old_reports_are_read_and_lose_nothing(self):
        self.assertGreater(len(CORPUS), 4)
        for file in CORPUS:
            with self.subTest(file.name):
                text, again = self.explain(file), self.explain(file, "--json")
                self.assertEqual((text.returncode, again.returncode), (0, 0), text.stderr + again.stderr)
                self.assertIn("oomdiag: ", text.stdout.splitlines()[0])
                repeated = SCHEMA["$defs"]["device_report"]["properties"]  # older ones had the main device at the top level, too
                old = {name: value for name, value in json.loads(file.read_text()).items() if name not in repeated}
                self.assert_holds(json.loads(again.stdout), old, file.name)

    def assert_holds(self, new, old, place):
        """All that the old report says, the new one says too."""
        if isinstance(old, dict):
            for name, value in old.items():
                if value not in (None, [], {}):
                    self.assertIn(name, new, place)
                    self.assert_holds(new[name], value, f"{place}.{name}")
        elif isinstance(old, list):
            self.assertEqual(len(new), len(old), place)
            for i, (a, b) in enumerate(zip(new, old)):
                self.assert_holds(a, b, f"{place}[{i}]")
        else:
            self.assertEqual(new, old, place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    build = arguments.build
    unittest.main(argv=[sys.argv[0], *rest])
