"""The page's script in Node, with elements that only keep their text."""

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.supervisor import web

STATIC = Path(web.__file__).with_name("static")
PROGRAM = """
const made = () => new Proxy(Object.assign(() => made(), { textContent: "" }), {
  get: (target, name) => name === Symbol.iterator ? [][Symbol.iterator] : name === "rows" || name === "children" ? []
    : target[name] ?? (target[name] = name === "checked" ? true : name === "value" ? "advantages" : made()),
  set: (target, name, value) => { target[name] = value; return true; },
});
const elements = new Map();
globalThis.document = {
  hidden: false, addEventListener() {}, createElementNS: made, createElement: made, querySelectorAll: () => [],
  querySelector: (chosen) => ({ value: chosen.includes("axis") ? "time" : "0" }),
  getElementById: (id) => elements.get(id) ?? elements.set(id, made()).get(id),
};
const answers = JSON.parse(process.argv[2]);
globalThis.fetch = async (path) => ({ ok: true, json: async () => answers[path.split("?")[0]] });
await import(process.argv[1]);
await new Promise((resolve) => setTimeout(resolve, 200));
const shown = ["rollout-busy", "trainer-busy", "buffer-busy", "why"].map((id) => [id, elements.get(id).textContent]);
console.log(JSON.stringify(Object.fromEntries(shown)));
"""


@pytest.mark.needs("node")
def test_the_time_of_a_role_at_work_is_a_share_or_unknown(tmp_path):
    for path in STATIC.glob("*.js"):
        # Node takes a file as a module by this ending.
        text = path.read_text().replace('.js"', '.mjs"')
        (tmp_path / path.name).with_suffix(".mjs").write_text(text)
    point = {"start_s": 100.0, "end_s": 110.0, "seconds": 10.0, "step": 3, "tokens_per_s": 7.0}
    point["shares"] = {"rollout": {"generate": 0.75, "wait_data": 0.25}, "trainer": {"wait_data": 1.0}}
    status = {"state": "ended", "model": "m", "ended_unix_s": 110.0, "reward_functions": {}, "learning": {},
              "evaluation": None, "buffer": {}, "processes": [], "checkpoint": ""}  # fmt: skip
    answers = {"/api/live": {"status": status, "why": ["It has stopped."], "history": [point]},
               "/api/samples": {"hidden": "None are kept."}}  # fmt: skip

    found = subprocess.run(
        ["node", "--input-type=module", "-e", PROGRAM, str(tmp_path / "page.mjs"), json.dumps(answers)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    shown = json.loads(found.stdout or "{}")
    assert shown == {"rollout-busy": "75 %", "trainer-busy": "0 %", "buffer-busy": "–", "why": "It has stopped."}, (
        found.stderr
    )
