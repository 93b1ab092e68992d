"""Hold the planner page's numbers, in headless Chromium, against this checkout's formulas."""

import json
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

SITE = Path(__file__).parent
sys.path[:0] = [str(SITE.parent)]

import planner  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4_864,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
# Settings. The first are read from the page's address, the others filled in.
CASES = (
    {"seq": "1024", "chunked_loss": "1"},
    {"model": "124m", "precision": "autocast", "batch": "8", "seq": "1024", "gpu": "t4"},
    {"optimizer": "lion8bit", "checkpointing": "checkpointing", "step_in_backward": "1"},
    {"optimizer": "muon", "chunked_loss": "1", "batch": "4", "accumulation": "1", "gpu": "mi300x"},
    {"model": "llama-3-8b", "precision": "master-weights", "zero_stage": "3", "gpus": "8"},
    {"model": "llama-3-8b", "adapters": "QLoRA", "checkpointing": "selective-checkpointing"},
    {"offload": "streamed-layers", "gpu": "rtx3060"},
    {"config": json.dumps(QWEN), "seq": "4096"},
    {"optimizer": "adam8bit", "gpus": "8", "zero_stage": "2"},  # an error
    {"seq": "0"},  # another
    {"seq": "1.5"},
    {"seq": "99999999999"},
)
PATIENCE_MS = 180_000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def faults(public: Path) -> list[str]:
    """Return one sentence for each case where the page shows other numbers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(public)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        browser = launched(playwright)
        page = browser.new_page()
        elsewhere = requests_to_others(page, address)
        page.goto(f"{address}/planner/?{urlencode(CASES[0])}")
        found = [fault for case in CASES for fault in of(page, case)]
        browser.close()
    server.shutdown()
    return found + [f"the planner page asked {url}" for url in elsewhere]


def launched(playwright) -> Browser:
    """Return playwright's own Chromium, else the system's."""
    for path in (None, "/usr/bin/chromium", "/usr/bin/google-chrome"):
        if path is None or Path(path).exists():
            try:
                return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            except Exception as error:
                reason = error
    raise RuntimeError(
        f"no Chromium starts ({str(reason).splitlines()[0]}); run `playwright install chromium`"
    )


def requests_to_others(page: Page, address: str) -> list[str]:
    """Return a list that will hold the addresses of other hosts that the page asks."""
    own, elsewhere = (address, "data:", "blob:"), []
    page.on("request", lambda r: None if r.url.startswith(own) else elsewhere.append(r.url))
    return elsewhere


# Fills in the form as a reader would.
FILL = """settings => {
  const form = document.getElementById("settings");
  for (const [name, value] of Object.entries(settings)) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = value !== ""; else field.value = value;
  }
  form.dispatchEvent(new Event("input"));
}"""
ANSWERED = """settings => {
  const {asked} = document.getElementById("answer").dataset;
  if (!asked) return false;
  const got = JSON.parse(asked);
  return Object.entries(settings).every(([name, value]) => got[name] === value);
}"""


def of(page: Page, case: dict[str, str]) -> list[str]:
    """Return the differences of one case."""
    settings = {**planner.DEFAULTS, **case}
    if case is not CASES[0]:
        page.evaluate(FILL, settings)
    page.wait_for_function(ANSWERED, arg=settings, timeout=PATIENCE_MS)
    got = json.loads(page.get_attribute("#answer", "data-answer"))
    wanted = json.loads(planner.answer(json.dumps(settings)))
    found = [] if got == wanted else [f"the page has {got}, memlab {wanted}"]
    line = wanted["error"] if "error" in wanted else wanted["shown"][str(wanted["peak"])]
    if line not in page.inner_text("#answer"):
        found.append(f"the page does not show {line!r}")
    return [f"planner {case}: {fault}" for fault in found]


if __name__ == "__main__":
    wrong = faults(SITE / "public")
    sys.exit("\n".join(wrong)) if wrong else print(f"planner page: {len(CASES)} settings agree")
