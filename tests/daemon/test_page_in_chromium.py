"""The page in a real Chromium against a real daemon: one browser and one daemon, started twice, for the whole file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from pipeline.telemetry.history import SPAN_S
from pipeline.telemetry.samples import Sample, SampledResponse, SampleWriter, folder_of
from tests.support.browser import PROGRAM, Browser, Page
from tests.support.daemon import PROGRAM as DAEMON_PROGRAM
from tests.support.daemon import SMALL, Daemon, Metrics, clean_environment, total, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.needs(PROGRAM),
    # The run that all of them look at counts for the first.
    pytest.mark.timeout(300),
]

MARKUP = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
# A sign that reorders the text, a space without width, and a hyphen that is not shown.
UNSEEN = "\u202e\u200b\u00ad"
_REWARD = """
def first(input_ids, attention_mask, *, response_start, response_end, **_):
    length = int(response_end - response_start)
    tiny = {"a_tiny_number_with_a_name_that_is_longer_than_a_phone_is_wide": 2.5e-7}
    return {"reward": float(input_ids[response_start] % 5), "length": length, **tiny}


def second(input_ids, attention_mask, *, response_end, response_start, **_):
    return 0.125 * float(input_ids[response_end - 1] % 2)
"""
TINY = "first.a_tiny_number_with_a_name_that_is_longer_than_a_phone_is_wide"
# A reward that differs, and a further number; each row takes its time.
_NUMBERED = """
import time

def score(input_ids, attention_mask, *, response_start, response_end, **_):
    time.sleep(0.02)
    return {"reward": float(input_ids[response_start] % 5), "length": int(response_end - response_start)}
"""
# What has the focus, by a name of its own.
FOCUSED = "(() => { const e = document.activeElement; return e.id || e.className || e.tagName; })()"


@dataclasses.dataclass
class Seen:
    """A paused daemon, its page, and the readings from before its restart."""

    daemon: Daemon
    browser: Browser
    metrics: Metrics
    first_start_s: float
    first_history: int

    def value(self, name: str, **labels: str) -> float:
        return total(self.metrics, name, **labels)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "two.py").write_text(_REWARD)
    prompts = [json.dumps({"prompt": prompt, "answer": MARKUP}) for prompt in ("21>", "7302>")]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    settings = (
        *SMALL, f"model.actor={task / 'model'}", f"prompts.path={folder / 'prompts.jsonl'}", "samples.per_minute=600",
        'rewards=["two:first", "two:second"]', "daemon.hang_timeout_s=0",
    )  # fmt: skip
    with Browser() as browser:
        with Daemon(folder, *settings) as daemon:
            daemon.wait_step(3)
            # Two points of each start: a line has the width of a point then, however fast the start was.
            daemon.wait_until(lambda: len(live(daemon)["history"]) >= 2, "two points of history are whole")
            first = live(daemon)
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0
        # The page marks a time without the daemon from a second on, and a start may take less.
        time.sleep(1.0)
        with Daemon(folder, *settings, name="again") as daemon:
            # It resumes at the step of the run before: only later steps count.
            daemon.wait_ready()
            daemon.wait_step(daemon.status()["step"] + 2)
            daemon.wait_until(lambda: {"21>", "7302>"} <= sampled(daemon), "both prompts are among the rollouts kept")
            points = len(first["history"]) + 2
            daemon.wait_until(lambda: len(live(daemon)["history"]) >= points, "two points of this start are whole")
            # From here on no value changes, and the page can be compared with the metrics.
            for name in ("rollout-0", "trainer-0"):
                daemon.signal(signal.SIGSTOP, name)
            still = wait_still(daemon)
            # Last, and so the newest that is shown.
            keep_markup(daemon.run_dir)
            yield Seen(daemon, browser, still, first["history"][0]["start_s"], len(first["history"]))
            for name in ("rollout-0", "trainer-0"):
                daemon.signal(signal.SIGCONT, name)
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0


def keep_markup(run_dir: Path) -> None:
    """Keep a rollout as a worker would whose tokenizer knows more than digits."""
    response = SampledResponse([MARKUP, UNSEEN], [-0.5] * 2, [], [1.0], 2, True, 1.0, {MARKUP: 1.0, "b": 0.0})
    writer = SampleWriter(folder_of(run_dir), 7, 1 << 20)
    writer.write(Sample(4e9, 7, 0, 0, 0, MARKUP, 9, json.dumps(MARKUP), 1, [response]))
    writer.close()


def sampled(daemon: Daemon) -> set[str]:
    """The prompts of the rollouts that are shown."""
    return {sample["prompt"] for sample in json.loads(daemon.get("/api/samples")[1])["samples"]}


def live(daemon: Daemon) -> dict[str, Any]:
    return dict(json.loads(daemon.get("/api/live")[1]))


def wait_still(daemon: Daemon) -> Metrics:
    """Wait until scrapes before and behind the end of a point of history say the same of rows and steps."""
    names = ("rlhfd_buffer_items", "rlhfd_train_steps_total", "rlhfd_policy_version", "rlhfd_reward_mean")

    def twice() -> Metrics | None:
        first, since_s = daemon.metrics(), time.time()
        # Times of points are rounded to a tenth.
        wait_until(
            lambda: live(daemon)["history"][-1]["end_s"] > since_s + 0.1, 30.0, "a point of history ends behind it"
        )
        second = daemon.metrics()
        return second if all(second[key] == value for key, value in first.items() if key[0] in names) else None

    found = wait_until(twice, 30.0, "nothing moves")
    assert found is not None
    return found


@pytest.fixture
def page(seen: Seen) -> Iterator[Page]:
    """The page as a desktop shows it; at the end it must have no error, and no request to another host."""
    with seen.browser.page() as page:
        opened(page, seen)
        yield page
    assert_clean(page, seen)


def opened(page: Page, seen: Seen) -> None:
    page.open(f"{seen.daemon.url}/")
    page.wait("document.querySelectorAll('.rollout').length > 1", "rollouts are shown")


def assert_clean(page: Page, seen: Seen) -> None:
    assert page.problems == []
    assert {urllib.parse.urlsplit(url).netloc for url in page.requested} == {seen.daemon.url.removeprefix("http://")}


def test_the_numbers_are_those_of_metrics(seen: Seen, page: Page) -> None:
    rows = page.each("#processes tr", "[...e.cells].map(c => c.textContent)")

    assert page.text("#step") == f"{seen.value('rlhfd_train_steps_total'):.0f}"
    assert page.text("#version") == f"{seen.value('rlhfd_policy_version', role='trainer'):.0f}"
    # A browser rounds 2.8125 up, Python's own formats to the even digit.
    reward = Decimal(seen.value("rlhfd_reward_mean")).quantize(Decimal("0.001"), ROUND_HALF_UP)
    assert page.text("#reward") == str(reward)
    assert page.text("#ready") == f"{seen.value('rlhfd_buffer_items', state='ready'):.0f}"
    assert page.text("#state") == "ready"
    pids = {"buffer" if name == "buffer-0" else name: pid for name, pid in seen.daemon.pids().items()}
    assert {row[0]: int(row[3]) for row in rows} == pids
    assert [row[5] for row in rows] == ["0", "0", "0"]
    assert "rollout-0" in page.text("#why") and "is stopped" in page.text("#why")


def test_the_values_of_a_step_stand_beside_its_reward_with_named_axes(seen: Seen, page: Page) -> None:
    shown = seen.daemon.status()["learning"]
    gauges = {
        "loss": "rlhfd_loss", "entropy": "rlhfd_entropy_nats", "clipped": "rlhfd_clipped_ratio",
        "response_length": "rlhfd_response_length_mean_tokens", "gradient_norm": "rlhfd_gradient_norm",
        "cut": "rlhfd_cut_ratio", "without_signal": "rlhfd_groups_without_signal_ratio",
    }  # fmt: skip

    for name, gauge in gauges.items():
        labels = {"kind": "total"} if name == "loss" else {}
        # The rank is stopped, its gauges are those of its last step.
        assert shown[name] == seen.value(gauge, **labels), name
        assert page.text(f"#{name}") not in ("", "–")
        assert page.run(f"document.querySelectorAll('#chart-{name} .line').length") >= 1
    # JavaScript rounds 8.25 up, Python down.
    assert abs(float(page.text("#response_length")) - shown["response_length"]) <= 0.05 + 1e-9
    assert page.text("#chart-entropy .top").endswith(" nats") and page.text("#chart-entropy .bottom") == "0"
    assert page.text("#chart-response_length .top").endswith(" tokens")
    assert page.text("#chart-reward .to") == f"now, step {seen.value('rlhfd_train_steps_total'):.0f}"
    assert ", step " in page.text("#chart-reward .from")
    titles = page.each("article h2", "e.textContent")
    assert {"Ratio clipped", "Cut responses", "Groups without signal"} <= set(titles) and "Clipped" not in titles
    means = {
        name: seen.value("rlhfd_reward_function_mean", role="trainer", function=name)
        for name in ("first", "second", "first.length", TINY)
    }
    shown_means = dict(part.split(" ") for part in page.text("#reward-functions").split(", "))
    assert shown_means.keys() == means.keys() and shown_means[TINY] == "2.5e-7"
    assert all(abs(float(shown_means[name]) - mean) <= 0.0005 + 1e-9 for name, mean in means.items())


def test_the_charts_stay_in_place_whatever_the_paragraph_above_says(page: Page) -> None:
    top = "document.querySelector('.chart').getBoundingClientRect().top"
    why = "document.getElementById('why').textContent"
    tops = {page.run(f"({why} = 'x '.repeat({words}), {top})") for words in (0, 1, 400, 4000)}

    assert len(tops) == 1


def test_the_axis_has_time_without_pauses_or_steps(seen: Seen, page: Page) -> None:
    def marks() -> list[float]:
        return page.each("#chart-speed .pause", "parseFloat(e.getAttribute('x1'))")

    def lines() -> list[list[float]]:
        return page.each("#chart-speed .line", "e.getAttribute('d').match(/[\\d.]+(?=,)/g).map(Number)")

    page.run("document.querySelector('input[name=range][value=\"0\"]').click()")
    (mark,), (before, after) = marks(), lines()
    # The daemon was down between its two starts: the lines of both come up to the mark, and leave no room there.
    width = max(b - a for line in (before, after) for a, b in itertools.pairwise(line))
    assert before[-1] < mark < after[0] and after[0] - before[-1] <= 2 * width

    page.run("document.querySelector('input[name=axis][value=step]').click()")
    steps = seen.value("rlhfd_train_steps_total")
    assert page.text("#chart-reward .to") == f"step {steps:.0f}"
    assert page.text("#chart-reward .from").startswith("step ")
    (line,) = lines()
    assert line == sorted(line) and line[-1] == 1000 and marks() == []
    # It is kept over the next answers, and not over a reload.
    asked = len(page.requested)
    wait_until(lambda: page.run("1") and len(page.requested) > asked + 2, 30.0, "the page has asked again")
    assert page.text("#chart-reward .to").startswith("step ")
    opened(page, seen)
    assert page.text("#chart-reward .to").startswith("now, step ")


def test_one_step_is_one_dot(page: Page) -> None:
    # The next answers have a single point, which is longer than the shortest range: that shows it alone.
    page.run("""(() => {
        const ask = window.fetch, at = Date.now() / 1000 + 1e6;
        window.fetch = async (path, options) => {
            const answer = await ask(path, options);
            if (!path.startsWith("/api/live")) return answer;
            const live = await answer.json();
            const one = { start_s: at, end_s: at + 400, seconds: 400, step: 1, reward: 0.5, loss: -0.25, shares: {} };
            return { ok: true, json: async () => ({ ...live, history: [one] }) };
        };
        document.querySelector("input[name=range][value='300']").click();
        return 0;
    })()""")
    page.wait("document.querySelector('#chart-reward .to').textContent === 'now, step 1'", "the one point is drawn")

    for name in ("reward", "loss"):
        place = f"document.querySelector('#chart-{name} .line').getBoundingClientRect()"
        assert page.run(f"document.querySelectorAll('#chart-{name} .line').length") == 1
        page.run(f"document.querySelector('#chart-{name}').scrollIntoView({{ block: 'center' }})")
        # A stroke of 7 pixels around one place: it covers the two pixels beside that place.
        hit = f"(b => document.elementFromPoint(b.left + 2, b.top).getAttribute('class'))({place})"
        assert page.run(hit) == "line dot", name
    assert page.text("#chart-loss .bottom") == "-0.25" and page.text("#chart-loss .top") == "0 loss"


def test_a_text_is_a_text_whatever_stands_in_it(seen: Seen, page: Page) -> None:
    first = ".rollout:first-child"
    assert page.text(f"{first} .prompt") == MARKUP
    assert page.text(f"{first} .mate .text") == MARKUP + "\N{SYMBOL FOR SUBSTITUTE FORM TWO}" * len(UNSEEN)
    assert MARKUP.replace('"', "") in page.text(f"{first} .facts")
    assert page.each("#feed script, #feed img, #feed .prompt *", "e.outerHTML") == []
    assert "rlhfd" in page.run("document.title")

    # Whatever a script of ours might one day try: here the browser itself takes no text for markup.
    attempt = "(() => { try { document.body.innerHTML = '<i>x</i>'; } catch (error) { return error.name; } })()"
    assert page.run(attempt) == "TypeError"
    page.problems.clear()


def test_mates_stand_side_by_side_with_their_rewards_by_part_and_tokens_in_colour(seen: Seen, page: Page) -> None:
    newest = json.loads(seen.daemon.get("/api/samples")[1])["samples"][-2]
    best = max(newest["responses"], key=lambda response: response["reward"])
    # The newest but one is the newest that was sampled.
    card = ".rollout:nth-child(2)"
    shown = page.each(f"{card} .mate > .text", "e.textContent")
    score = page.text(f"{card} .score")

    assert len(shown) == 4
    assert sorted(shown) == sorted("".join(response["pieces"]) for response in newest["responses"])
    assert best["reward"] == sum(best["parts"].values())
    assert score.startswith(f"{best['reward']:g}first {best['parts']['two:first']:g}second ")
    assert f"first.length {best['numbers']['first.length']:g}{TINY} 2.5e\N{MINUS SIGN}7" in score
    advantages = [response["advantages"][0] for response in newest["responses"] for _ in response["pieces"]]
    classes = page.each(f"{card} .token", "e.className.split(' ')[1].slice(0, 1)")
    assert sorted(classes) == sorted("p" if a > 0 else "n" if a < 0 else "" for a in advantages)
    page.fill("#colour", "log_probs")
    assert set(page.each(f"{card} .token", "e.className.split(' ')[1].slice(0, 1)")) <= {"s", ""}


def test_search_and_filter_leave_what_is_asked_for(seen: Seen, page: Page) -> None:
    page.run("document.getElementById('search').focus()")
    page.type("7302")
    assert set(page.each(".prompt", "e.textContent")) == {"7302>"}
    page.fill("#search", "nowhere to be found")
    assert page.each(".rollout", "1") == []
    assert page.text("#feed-note").startswith("None of ")
    page.fill("#search", "")
    page.fill("#least", "3")
    assert all(reward >= 3 for reward in page.each(".rollout .score:first-child b", "parseFloat(e.textContent)")[::4])
    page.fill("#least", "")
    page.fill("#which", "mixed")
    rewards = page.each(".rollout", "[...e.querySelectorAll('.score b')].map(b => b.textContent)")
    assert rewards and all(len(set(of_group)) > 1 for of_group in rewards)


def test_history_is_there_after_a_reload_and_from_before_the_restart(seen: Seen, page: Page) -> None:
    history = live(seen.daemon)["history"]
    page.run("document.querySelector('input[name=range][value=\"0\"]').click()")
    # Each point of a line is a move or a line to it.
    lines = "[...document.querySelectorAll('#chart-reward .line')]"
    points = f"{lines}.flatMap((line) => line.getAttribute('d').match(/[ML]/g)).length"
    drawn = page.run(points)
    opened(page, seen)
    page.run("document.querySelector('input[name=range][value=\"0\"]').click()")

    assert history[0]["start_s"] == seen.first_start_s
    assert len(history) > seen.first_history
    assert page.run(points) >= drawn > 1
    # Nobody watched between the two, and no line says otherwise.
    assert page.run("document.querySelectorAll('#chart-speed .line').length") == 2


def test_the_keyboard_reaches_everything(seen: Seen, page: Page) -> None:
    kinds = "a[href], button, input, select, summary, [tabindex='0']"
    wanted = sum(page.each(kinds, "e.checkVisibility()"))
    reached = []
    page.run("document.body.focus()")
    for _ in range(wanted + 5):
        page.press("Tab", 9)
        reached.append(page.run(FOCUSED))
    assert {"search", "least", "which", "colour", "hold", "chart-reward", "chart-buffer", "SUMMARY"} <= set(reached)
    assert len([name for name in reached if name.startswith("card rollout")]) > 1

    page.run("document.getElementById('chart-reward').focus()")
    page.press("ArrowLeft", 37)
    page.wait("!document.querySelector('#chart-reward .read').hidden")
    assert "step" in page.text("#chart-reward .read")
    assert page.text("#chart-reward ~ [role=status]") == page.text("#chart-reward .read"), "a screen reader says it"
    page.run("document.querySelector('summary').focus()")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelectorAll('details[open] tbody tr').length > 0", "the numbers are shown")
    page.run("document.querySelector('.mate .text').style.maxHeight = '1em'")
    page.run("document.querySelector('.rollout').focus()")
    page.press("Tab", 9)
    assert page.run(FOCUSED) == "text", "a text that is longer than its place is scrolled"


def test_numbers_that_change_each_second_are_not_said(page: Page) -> None:
    assert set(page.each("output", "e.ariaLive")) == {"off"}


def test_a_phone_shows_it_without_scrolling_sideways(seen: Seen) -> None:
    with seen.browser.page(width=360, height=740, phone=True) as page:
        opened(page, seen)
        width = page.run("document.documentElement.scrollWidth")
        right = "e.closest('.scroll, .unseen, .skip, svg, .text') ? 0 : e.getBoundingClientRect().right"
        furthest = max(page.each("body *", right))
    assert width == 360 and furthest <= 361
    assert_clean(page, seen)


def test_it_is_dark_where_that_is_asked_for(seen: Seen) -> None:
    def lightness(*, dark: bool) -> list[float]:
        with seen.browser.page(dark=dark) as page:
            opened(page, seen)
            style = "getComputedStyle(document.documentElement)"
            colours = page.run(f"[{style}.backgroundColor, {style}.color]")
        assert_clean(page, seen)
        return [sum(map(int, colour[4:-1].split(","))) / 765 for colour in colours]

    (dark_paper, dark_ink), (paper, ink) = lightness(dark=True), lightness(dark=False)
    assert dark_paper < 0.15 and dark_ink > 0.8
    assert paper > 0.85 and ink < 0.2


def test_rlhfd_samples_prints_them_too(seen: Seen) -> None:
    newest = json.loads(seen.daemon.get("/api/samples")[1])["samples"][-2]

    shown = seen.daemon.ask("samples", "--last", "1", "--worker", "0")
    lines = seen.daemon.ask("samples", "--json", "--last", "3", "--min-reward", "1").stdout.splitlines()

    assert newest["prompt"] in shown.stdout and MARKUP in shown.stdout
    assert len(shown.stdout.strip().splitlines()) == 2 + 3 * 4, "a line a response, its parts, its numbers"
    assert len(lines) <= 3
    assert all(max(response["reward"] for response in json.loads(line)["responses"]) >= 1 for line in lines)


def test_no_text_of_a_rollout_is_logged(seen: Seen) -> None:
    assert "7302" not in seen.daemon.errors + seen.daemon.output


def test_a_run_has_its_page_before_and_after_its_end(tmp_path: Path, task: Path, seen: Seen) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(line + "\n" for line in (task / "prompts.jsonl").read_text().splitlines()[:4]))
    settings = (
        *SMALL, 'rewards=["telling:score"]', "rollout.reward_timeout_s=0", "samples.per_minute=600",
        "trainer.max_steps=400", f"evaluation.files=['{held_out}']", "evaluation.every=6", "evaluation.pass_reward=2.0",
    )  # fmt: skip
    (tmp_path / "telling.py").write_text(_NUMBERED)
    numbers = ("reward", "loss", "cut", "without_signal", "entropy", "response_length", "gradient_norm")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(2)
        refused = daemon.ask("page")
        assert (refused.returncode, refused.stderr) == (
            1, f"run {daemon.run_dir.name} is running: its page is {daemon.url}/\n",
        )  # fmt: skip
        with seen.browser.page() as page:
            page.open(f"{daemon.url}/")
            page.wait("document.querySelectorAll('#chart-loss .line').length > 0", "a step is drawn")
            assert page.text("#chart-loss .to").startswith("now, step ") and page.text("#since") == "up"
            before = {name: page.text(f"#{name}") for name in numbers}
            assert page.run("document.querySelectorAll('#processes tr').length") == 3
            assert page.text("#reward-functions").startswith("score.length ")
            daemon.ask("pause")
            # No point is added while the run rests.
            daemon.wait_until(lambda: time.time() - live(daemon)["history"][-1]["end_s"] > 3 * SPAN_S, "the run rests")
            page.wait("!document.querySelector('#chart-loss .to').textContent.startsWith('now')", "it is paused")
            daemon.ask("resume")
            daemon.wait_step(int(page.text("#step")) + 1)
            daemon.wait_until((daemon.run_dir / "evaluations.jsonl").exists, "held-out prompts are evaluated")
            # It ends here and not at a step, which a slow browser would be too late for.
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0, daemon.errors
            page.wait("document.getElementById('state').textContent === 'no answer'", "the daemon is gone")
        run = daemon.run_dir
    (tmp_path / "run.toml").write_text(f'[daemon]\nstate_dir = "{daemon.state_dir}"\n')
    command = [str(DAEMON_PROGRAM), "page", "--runtime-dir", str(daemon.runtime_dir), "--config", "run.toml"]
    *_, last = (line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line)
    *_, evaluated = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    step = str(last["step"])
    assert "–" not in before.values()

    with (
        subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as ends,
        seen.browser.page() as page,
    ):
        # A failed assertion would wait for it without end.
        ends.callback(process.kill)
        assert process.stdout is not None
        url = process.stdout.readline().partition(" ")[0]
        page.open(url)
        page.wait("document.querySelectorAll('.rollout').length > 1", "rollouts are shown")
        shown = {name: page.text(f"#{name}") for name in numbers}
        assert (page.text("#state"), page.text("#step"), page.text("#step-of")) == ("ended", step, "steps")
        assert page.text("#since") == "ended"
        assert page.text("#checkpoint") == f"checkpoint {run / 'checkpoints' / f'step-{step:0>6}'}"
        assert abs(float(shown["reward"]) - last["reward_mean"]) <= 0.0005 + 1e-9
        assert "–" not in shown.values()
        name, _, mean = page.text("#reward-functions").partition(" ")
        assert name == "score.length" and abs(float(mean) - last[f"reward/{name}"]) <= 0.0005 + 1e-9
        assert "score.length " in page.text(".rollout:first-child .score")
        assert f"right at version {evaluated['version']}" in page.text("#held-out-of")
        to = page.text("#chart-loss .to")
        assert to.endswith(f", step {step}") and not to.startswith("now")
        assert len(page.each("#chart-loss .pause", "1")) == 1, "the pause is left out"
        assert all(page.run(f"document.querySelectorAll('#chart-{name} .line').length") for name in (*numbers, "speed"))
        assert page.run("document.querySelector('#all-processes, #links').checkVisibility()") is False
        page.run("document.querySelector('input[name=axis][value=step]').click()")
        assert page.text("#chart-loss .to") == f"step {step}"
        assert page.problems == []
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_the_page_says_why_it_has_no_rollouts(tmp_path: Path, task: Path) -> None:
    with Daemon(tmp_path, *SMALL, "samples.per_minute=0", task=task) as daemon:
        daemon.wait_answering()
        daemon.wait_until(daemon.answers_http, "it answers")
        answer = json.loads(daemon.get("/api/samples")[1])
    assert "samples" not in answer and answer["hidden"] == "No rollouts are kept: samples.per_minute is 0."


def test_rollouts_are_shown_elsewhere_only_if_that_is_asked_for(tmp_path: Path, task: Path) -> None:
    for remote, is_shown in ((False, False), (True, True)):
        folder = tmp_path / str(remote)
        folder.mkdir()
        with Daemon(
            folder, *SMALL, "metrics.host=0.0.0.0", f"samples.remote={str(remote).lower()}", task=task
        ) as daemon:
            daemon.wait_answering()
            daemon.wait_until(daemon.answers_http, "it answers")
            answer = json.loads(daemon.get("/api/samples")[1])
        assert ("samples" in answer) is is_shown
        assert ("hidden" in answer) is not is_shown
