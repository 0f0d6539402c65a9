"""The HTML pages in a real browser: axe-core finds nothing to complain of, nothing is wider than the window at three widths, light and
dark, and they print; a failure, a run that fits, one whose work was metered, a search and a comparison of plans.

Usage: test_page_in_browser.py --build BUILD --python PYTHON [--pictures FOLDER]. By hand: it needs Chromium (Debian's package
`chromium`) and, in the Python that runs it, `pip install playwright axe-playwright-python` for the driver and for axe-core, which that
package carries. --pictures keeps what the pages look like.
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

import axe_playwright_python
from playwright.sync_api import sync_playwright

AXE = next(pathlib.Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")).read_text(encoding="utf-8")
WIDTHS = (390, 820, 1440)
PROGRAM = """
import sys, torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for _ in range(6):
    x = torch.randn(int(sys.argv[1]), 1024, device="cuda")
    kept.append(model(x).square().mean())
    kept[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def write_pages(oomdiag, python, folder):
    """Path by name."""
    (folder / "train.py").write_text(PROGRAM)
    program = ["--", python, str(folder / "train.py")]
    gpu = ["--device", "rtx3060", "--memory", "1GiB"]
    pages = {name: folder / f"{name}.html" for name in ("failure", "fits", "timed", "fit", "fix", "plans")}
    for name, batch, options in ("failure", "40000", []), ("fits", "64", []), ("timed", "64", ["--meter"]):
        subprocess.run([oomdiag, "run", *gpu, *options, "--no-progress", "--folder", folder / name, *program, batch], capture_output=True)
        run = next((folder / name).iterdir())
        subprocess.run([oomdiag, "export", run, "--to", "html", "-o", pages[name]], check=True, capture_output=True)
    for name, options in ("fit", ["fit", *gpu, "--vary", "batch=1..65536"]), ("fix", ["fix", *gpu]), ("plans", ["fix", "--budget", "700MiB", *gpu]):
        words = [*program, "{batch}" if name == "fit" else "40000"]
        done = subprocess.run([oomdiag, *options, "--html", pages[name], *words], capture_output=True, text=True)
        assert pages[name].exists(), done.stderr
    return pages


def complaints(browser, file, pictures):
    for scheme in "light", "dark":
        for width in WIDTHS:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            errors = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(file.as_uri())
            page.evaluate(AXE)
            for violation in page.evaluate("axe.run()")["violations"]:
                node = violation["nodes"][0]
                yield f"{scheme}, {width}: {violation['id']} ({violation['impact']}): {node['html'][:120]}"
            beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if beyond > 0:
                yield f"{scheme}, {width}: {beyond} pixels wider than the window"
            yield from (f"{scheme}, {width}: {error}" for error in errors)
            page.screenshot(path=pictures / f"{file.stem}-{scheme}-{width}.png", full_page=True)
            context.close()
    page = browser.new_page()
    page.goto(file.as_uri())
    printed = page.pdf(path=pictures / f"{file.stem}.pdf")
    if len(printed) < 10_000:
        yield f"prints {len(printed)} bytes"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--python", required=True, help="with torch")
    parser.add_argument("--pictures", type=pathlib.Path)
    options = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory(prefix="oomdiag-page-") as folder, sync_playwright() as playwright:
        folder = pathlib.Path(folder)
        pictures = options.pictures or folder
        pictures.mkdir(parents=True, exist_ok=True)
        pages = write_pages(options.build / "bin/oomdiag", options.python, folder)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, file in pages.items():
            problems = list(complaints(browser, file, pictures))
            found += len(problems)
            print(f"{name}: {'; '.join(problems) or 'nothing to complain of'}", flush=True)
        browser.close()
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
