"""The report's schema: what docs/report-schema.md says, what reports have, and whether old reports are still read.

    python tests/reports/test_schema.py --build BUILD_FOLDER [unittest arguments]

corpus/ holds reports of today (now-*.json) and such as older versions wrote, named by the number of fields that the schema had
then. A field is (object, name): objects are named as the sections of the document are.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = sorted((HERE / "corpus").glob("*.json"))
SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())
FREE = {"figures", "packing", "attribution", "phase_peaks", "private_pools"}  # names of figures, which are not fixed
INLINE = {"notes": "note", "blocked_segments": "blocked_segment"}  # objects without a definition of their own in the schema


def documented():
    """Fields by the document, but for what the top level repeats of its main device."""
    found, section = set(), None
    for line in (ROOT / "docs/report-schema.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        elif line.startswith("| `"):
            found |= {(section, name) for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    return found


def target(schema):
    """The name of the definition that describes a value, or None."""
    for one in [schema, schema.get("items", {}), *schema.get("oneOf", [])]:
        if "$ref" in one and not one["$ref"].endswith(("figures", "no_categories")):
            return one["$ref"].rsplit("/", 1)[1]
    return None


def declared():
    """Fields by the JSON schema, and which object each of them holds."""
    found = {}

    def read(name, one):
        for field, value in (one.get("properties") or one.get("items", {}).get("properties", {})).items():
            found[name, field] = INLINE.get(field) or target(value)
            if field in INLINE:
                read(INLINE[field], value["items"])

    read("report", SCHEMA)
    for name, one in SCHEMA["$defs"].items():
        if name not in ("figures", "no_categories"):
            read(name, one)
    return found


def without_repetition(fields):
    """Of the top level only what is not also said of each card."""
    return {(name, field) for name, field in fields if name != "report" or ("card_report", field) not in fields}


def fields_of(value, name, holds, found):
    if isinstance(value, list):
        for one in value:
            fields_of(one, name, holds, found)
    elif isinstance(value, dict):
        for field, inner in value.items():
            found.add((name, field))
            inside = holds.get((name, field)) or holds.get(("card_report", field)) if name == "report" else holds.get((name, field))
            if inside and field not in FREE:
                fields_of(inner, inside, holds, found)


class Schema(unittest.TestCase):
    maxDiff = None

    def assert_same(self, fields):
        self.assertEqual((fields - documented(), documented() - fields), (set(), set()), "undocumented, and not there")

    def explain(self, file, *options):
        return subprocess.run([build / "bin/oomdiag", "explain", file, *options], capture_output=True, text=True, timeout=60)

    def test_each_field_of_the_schema_is_documented_and_no_other(self):
        self.assert_same(without_repetition(set(declared())))

    def test_reports_have_the_documented_fields_and_no_other(self):
        holds, found = declared(), set()
        for file in CORPUS:
            done = self.explain(file, "--json")
            self.assertEqual(done.returncode, 0, f"{file.name}: {done.stderr}")
            fields_of(json.loads(done.stdout), "report", holds, found)
        self.assert_same(without_repetition(found))

    def test_old_reports_are_read_and_lose_nothing(self):
        self.assertGreater(len(CORPUS), 4)
        for file in CORPUS:
            with self.subTest(file.name):
                text, again = self.explain(file), self.explain(file, "--json")
                self.assertEqual((text.returncode, again.returncode), (0, 0), text.stderr + again.stderr)
                self.assertIn("oomdiag: ", text.stdout.splitlines()[0])
                self.assert_holds(json.loads(again.stdout), json.loads(file.read_text()), file.name)

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
