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
let look = () => {};
globalThis.document = {
  hidden: false, addEventListener(_, listener) { look = listener; },
  createElementNS: made, createElement: made, querySelectorAll: () => [],
  querySelector: (chosen) => ({ value: chosen.includes("axis") ? "time" : "0" }),
  getElementById: (id) => elements.get(id) ?? elements.set(id, made()).get(id),
};
// An answer, or one for each look; an answer of a run has its points behind a time.
const answers = JSON.parse(process.argv[2]), asked = [];
const looks = Math.max(...Object.values(answers).map((answer) => Array.isArray(answer) ? answer.length : 1));
let at = 0;
const answerTo = (path) => {
  asked.push(path);
  const given = answers[path.split("?")[0]];
  const answer = Array.isArray(given) ? given[Math.min(at, given.length - 1)] : given;
  const after_s = Number(path.split("after_s=")[1] ?? 0);
  if (!answer.history) return answer;
  return { ...answer, history: answer.history.filter((point) => point.end_s > after_s) };
};
globalThis.fetch = async (path) => ({ ok: true, json: async () => answerTo(path) });
await import(process.argv[1]);
for (; at < looks; at++) {
  if (at) look();
  await new Promise((resolve) => setTimeout(resolve, 200));
}
const shown = ["rollout-busy", "trainer-busy", "buffer-busy", "why"].map((id) => [id, elements.get(id).textContent]);
console.log(JSON.stringify({ ...Object.fromEntries(shown), asked }));
process.exit();
"""


def printed_by(program, folder, module, argument):
    """Return the JSON that a program prints, given the path of a module of the page and an argument."""
    for path in STATIC.glob("*.js"):
        # Node takes a file as a module by this ending.
        text = path.read_text().replace('.js"', '.mjs"')
        (folder / path.name).with_suffix(".mjs").write_text(text)
    found = subprocess.run(
        ["node", "--input-type=module", "-e", program, str(folder / module), json.dumps(argument)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stdout, found.stderr
    return json.loads(found.stdout)


def shown_by(folder, answers):
    """Return what the page shows after these answers, and the paths that it asked."""
    shown = printed_by(PROGRAM, folder, "page.mjs", answers)
    return shown.pop("asked"), shown


STATUS = {"state": "ended", "model": "m", "ended_unix_s": 110.0, "reward_functions": {}, "learning": {},
          "evaluation": None, "buffer": {}, "processes": [], "checkpoint": ""}  # fmt: skip


@pytest.mark.needs("node")
def test_the_time_of_a_role_at_work_is_a_share_or_unknown(tmp_path):
    point = {"start_s": 100.0, "end_s": 110.0, "seconds": 10.0, "step": 3, "tokens_per_s": 7.0}
    point["shares"] = {"rollout": {"generate": 0.75, "wait_data": 0.25}, "trainer": {"wait_data": 1.0}}
    answers = {"/api/live": {"status": STATUS, "why": ["It has stopped."], "history": [point]},
               "/api/samples": {"hidden": "None are kept."}}  # fmt: skip

    _, shown = shown_by(tmp_path, answers)

    assert shown == {"rollout-busy": "75 %", "trainer-busy": "0 %", "buffer-busy": "–", "why": "It has stopped."}


@pytest.mark.needs("node")
def test_a_page_of_another_run_at_the_same_address_shows_nothing_of_the_one_before(tmp_path):
    def live(run, run_id, start_s, share):
        point = {"start_s": start_s, "end_s": start_s + 10.0, "seconds": 10.0, "step": 3, "tokens_per_s": 7.0}
        point["shares"] = {"rollout": {"generate": share, "wait_data": 1.0 - share}}
        status = STATUS | {"state": "ready", "ended_unix_s": 0.0, "run": run, "run_id": run_id}
        return {"status": status, "why": [], "history": [point]}

    answers = {
        "/api/live": [live("a", "1", 100.0, 1.0), live("a", "2", 50.0, 0.5), live("b", "3", 200.0, 0.25)],
        "/api/samples": {"cursor": "x.7", "samples": []},
    }

    asked, shown = shown_by(tmp_path, answers)

    assert shown["rollout-busy"] == "25 %"
    assert asked == [
        "/api/live?after_s=0", "/api/samples?cursor=",
        "/api/live?after_s=110", "/api/live?after_s=0", "/api/samples?cursor=",
        "/api/live?after_s=60", "/api/live?after_s=0", "/api/samples?cursor=",
    ]  # fmt: skip


@pytest.mark.needs("node")
def test_a_step_has_the_newest_value_of_an_evaluation_and_the_mean_of_others(tmp_path):
    program = """
    const { byStep, byTime } = await import(process.argv[1]);
    console.log(JSON.stringify(byStep(byTime(JSON.parse(process.argv[2])))));
    """
    values = [(4, 2.0, 0.1, 1.0), (5, 2.0, 0.1, 3.0), (5, 6.0, 0.9, 7.0), (5, 0.0, 0.8, 100.0), (5, 2.0, None, 0.0)]
    points = [
        {"start_s": 0.0, "end_s": seconds, "seconds": seconds, "step": step, "ready_items": ready}
        | ({} if right is None else {"pass_at_1": right})
        for step, seconds, right, ready in values
    ]

    found = printed_by(program, tmp_path, "charts.mjs", points)

    assert [(one["step"], one["pass_at_1"]) for one in found] == [(4, 0.1), (5, 0.8)]
    assert [round(one["ready_items"], 3) for one in found] == [1.0, 4.8]


@pytest.mark.needs("node")
def test_rewards_get_the_axis_from_0_to_1_where_all_of_them_lie_there(tmp_path):
    program = """
    const { isWithinOne } = await import(process.argv[1]);
    console.log(JSON.stringify(JSON.parse(process.argv[2]).map(([mean, spread]) => isWithinOne(mean, spread))));
    """
    # Rewards of 0 and 1, all 1, of 0.2 and 0.4; of -1 and 1, all 2, of 0 and 2.
    within, beyond = [(0.25, 0.433), (1.0, 0.0), (0.3, 0.1)], [(0.5, 0.866), (2.0, 0.0), (0.5, 0.866), (-0.1, 0.1)]

    assert printed_by(program, tmp_path, "charts.mjs", within) == [True] * 3
    assert printed_by(program, tmp_path, "charts.mjs", beyond) == [False] * 4
