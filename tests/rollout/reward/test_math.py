"""The reward `math`: results as people and models write them, and its limits."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RewardError
from pipeline.rollout.reward.math_text import prepared, quantity_of
from pipeline.rollout.reward.mathematics import MathProcess
from pipeline.rollout.reward.pool import RewardPool
from tests.support.byte_tokens import byte_tokenizer

TAGS = ["think", "answer"]
ENDLESS = r"\boxed{2^{10^{10}}}"


RESULTS = [
    # The last tag, and nothing else.
    ("<think>6*12=72</think><answer>71</answer>", "72", False),
    ("<think>6*12=71</think><answer>72</answer>", "72", True),
    ("<answer>72</answer>", "72", True),
    (r"<answer> $\frac{144}{2}$ </answer>", "72", True),
    (r"<answer>\frac{1}{2}</answer>", "0.5", True),
    (r"<answer>\boxed{72}</answer>", "72", True),
    ("<answer>71</answer> no, <answer>72</answer>", "72", True),
    ("<answer>The total is 72 dollars.</answer>", "72", True),
    ("<answer>No solution</answer>", "no solution exists", False),
    ("<answer>No solution.</answer>", "No solution", True),
    ("<answer></answer>", "72", False),
    (r"<think>\boxed{71}</think> Thus 72", "72", True),
    ("72</answer>", "72", True),
    # Units.
    (r"\boxed{18 dollars}", "18", True),
    (r"\boxed{18 dollars}", "19", False),
    (r"\boxed{18 apples and pears}", "18", True),
    (r"\boxed{18~\text{km}}", "18", True),
    (r"\boxed{12 cm^2}", "12", True),
    (r"\boxed{5 km/h}", "5", True),
    (r"\boxed{3/4 cup}", "0.75", True),
    (r"\boxed{12\pi cm^2}", r"12\pi", True),
    (r"\boxed{x = 18 dollars}", "18", True),
    (r"\boxed{\text{about }5}", "5", True),
    (r"\boxed{5}", "5 dollars", True),
    (r"\boxed{3.5 million}", "3,500,000", True),
    (r"\boxed{3.5 million}", "3.5", False),
    (r"\boxed{3 \text{ million dollars}}", "3000000", True),
    (r"\boxed{3 \text{ million dollars}}", "3", False),
    (r"\boxed{3000000}", r"3 \text{ million dollars}", True),
    (r"\boxed{5 \text{ dozen eggs}}", "60", True),
    (r"\boxed{6 \text{ eggs per dozen}}", "6", True),
    (r"\boxed{6 \text{ eggs per dozen}}", "72", False),
    (r"\boxed{50 \text{ percent of the class}}", "0.5", True),
    (r"\boxed{50\text{\%}}", "0.5", True),
    (r"\boxed{6 inches squared}", "6", True),
    (r"\boxed{6 \text{ inches squared}}", "6", True),
    (r"\boxed{5 \text{ times}}", "5", True),
    (r"\boxed{5 \text{ more apples}}", "5", True),
    (r"\boxed{8 \text{ quarters}}", "8", True),
    (r"\boxed{12 \text{ fifth graders}}", "12", True),
    (r"\boxed{90 \text{ two-digit numbers}}", "90", True),
    (r"\boxed{5 \text{ wrong answers}}", "5", True),
    (r"\boxed{3 \text{ negative integers}}", "3", True),
    (r"\boxed{18 \text{ dollars for the two days}}", "18", True),
    # Words that change the number.
    (r"\boxed{2 \text{ and a half hours}}", "2", False),
    (r"\boxed{2}", r"2 \text{ and a half hours}", False),
    (r"$2 \text{ and a half hours}$", "2", False),
    (r"<answer>2 \text{ and a half hours}</answer>", "2", False),
    ("<answer>2 and a half</answer>", "2", False),
    (r"\boxed{2 and a half}", "2", False),
    (r"\boxed{2 \text{ and two-thirds}}", "2", False),
    (r"\boxed{3 and three quarters}", "3", False),
    (r"\boxed{3 \text{ tenths}}", "3", False),
    (r"\boxed{1 half}", "1", False),
    (r"\boxed{5 squared}", "5", False),
    (r"\boxed{5 \text{ factorial}}", "5", False),
    (r"\boxed{20 \text{ degrees below zero}}", "20", False),
    (r"\boxed{7 \text{ or negative seven}}", "7", False),
    (r"\boxed{12 \text{ minus something}}", "12", False),
    (r"\boxed{5 \text{ is wrong, maybe six}}", "5", False),
    (r"\boxed{6 dollars and fifty cents}", "6", False),
    # No units: another result.
    (r"\boxed{2x}", "2", False),
    (r"\boxed{2 x}", "2", False),
    (r"\boxed{2 pi}", "2", False),
    (r"\boxed{3i}", "3", False),
    (r"\boxed{3 or 4}", "3", False),
    (r"\boxed{3 \text{ or } 4}", "3", False),
    (r"\boxed{3 cm \times 4 cm}", "3", False),
    (r"\boxed{10 minutes 30 seconds}", "10", False),
    (r"\boxed{5!}", "120", True),
    (r"\boxed{5!}", "5", False),
    (r"\boxed{5²}", "25", True),
    # Powers of ten.
    (r"\boxed{1e5}", "100000", True),
    (r"\boxed{1e5}", "10000", False),
    ("It is 1e5.", "100000", True),
    (r"\boxed{1e-3}", "0.001", True),
    (r"\boxed{2.5e3 m/s}", "2500", True),
    ("The answer is 5 × 10^4.", "50000", True),
    (r"\boxed{2^5 \times 10^2}", "3200", True),
    (r"\boxed{2e}", "2", False),
    # Currency.
    (r"\boxed{5}", r"\$5", True),
    (r"\boxed{5}", "$5.00", True),
    (r"\boxed{5}", "€5", True),
    (r"\boxed{USD 5}", "5", True),
    (r"\boxed{-\$5}", "-5", True),
    (r"\boxed{€5.50}", "5.5", True),
    (r"\$5", "5", True),
    ("I pay $5 and $6, so $11.", "11", True),
    ("I pay $5 and $6, so $11.", "6", False),
    # Other notations.
    (r"\boxed{90°}", "90", True),
    (r"\boxed{-40 °C}", "-40", True),
    (r"\boxed{50 percent}", r"50\%", True),
    (r"\boxed{1,000}", "1000", True),
    (r"\boxed{1 000}", "1000", True),
    (r"\boxed{\boxed{5}}", "5", True),
    (r"\boxed{\frac{\boxed{1}}{2}}", "1/2", True),
    (r"\fbox{5}", "5", True),
    (r"\textbf{18}", "18", True),
    ("", "5", False),
]  # fmt: skip


def test_a_result_is_read_as_it_is_written() -> None:
    process = MathProcess(timeout_s=20, memory_bytes=1 << 30)

    found = [(response, answer, process.is_right(answer, response, TAGS)) for response, answer, _ in RESULTS]

    process.close()
    assert found == RESULTS


NUMBERS = st.decimals(min_value=0, max_value=10**9, places=2).map(lambda value: f"{value.normalize():f}")
UNITS = st.sampled_from([
    "", " dollars", " km", r"\text{ cm}^2", r"\,\mathrm{kg}", " m/s", " square feet", "°", r"^\circ", " USD", "€",
])  # fmt: skip


@given(NUMBERS, UNITS, st.sampled_from(["", "-"]), st.sampled_from(["", "$", r"\$", "€", "USD "]))
def test_a_quantity_is_its_number(number: str, unit: str, sign: str, currency: str) -> None:
    assert quantity_of(f"{sign}{currency}{number}{unit}") == sign + number
    assert prepared(rf"so \boxed{{{sign}{currency}{number}{unit}}}.") == rf"so \boxed{{{sign}{number}}}."


@given(st.text(alphabet=r"\boxed{}$()[] .,0123456789eE+-^*/x°%€ textfrac", max_size=60))
def test_any_text_is_prepared(text: str) -> None:
    assert isinstance(prepared(text) + quantity_of(text), str)


def test_a_response_without_end_is_0_and_the_next_one_is_read() -> None:
    process = MathProcess(timeout_s=0.5, memory_bytes=1 << 30)
    for response in (
        ENDLESS, r"\boxed{9^{9^{9^9}}}", r"\boxed{100000000!}", r"\boxed{\sum_{i=1}^{10^9} \sin(i)}",
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", "1 " * 20_000,
    ):  # fmt: skip
        assert not process.is_right("1", response, TAGS)
        assert process.is_right("1", r"\boxed{1}", TAGS)
    process.close()


def test_an_answer_that_has_no_result_or_no_end_is_an_error_and_not_0() -> None:
    process = MathProcess(timeout_s=0.5, memory_bytes=1 << 30)
    for answer in ("", " ", "1 " * 20_000):
        with pytest.raises(RewardError, match="math cannot read the answer"):
            process.is_right(answer, r"\boxed{1}", TAGS)
    process.close()


def test_the_limit_holds_in_a_reward_process(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rows = tokenizer(["?" + ENDLESS, r"?\boxed{1}"], padding=True, return_tensors="pt")
    ends = rows["attention_mask"].sum(dim=1)

    with RewardPool(["math"], str(tmp_path), timeout_s=60) as pool:
        scores = pool(rows["input_ids"], rows["attention_mask"], torch.ones_like(ends), ends, ["1", "1"])

    assert scores.tolist() == [0.0, 1.0]


def test_a_row_needs_no_more_memory_than_it_may() -> None:
    measures = (
        "import resource, sys\n"
        "from pipeline.rollout.reward.mathematics import MathProcess\n"
        "process = MathProcess(timeout_s=60, memory_bytes=256 << 20)\n"
        "assert not process.is_right('1', sys.argv[1], ['answer'])\n"
        "process.close()\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )

    done = subprocess.run([sys.executable, "-c", measures, ENDLESS], stdout=subprocess.PIPE, timeout=200, check=True)

    assert int(done.stdout) < 256 << 10, "KiB"


def test_a_row_is_read_beside_more_than_a_thousand_open_files() -> None:
    """As those of prompts, which a worker that calls its functions itself holds open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            opened.enter_context(open(os.devnull))
        process = MathProcess(timeout_s=20)
        opened.callback(process.close)

        assert process.is_right("1", r"\boxed{1}", TAGS)


def test_the_process_ends_with_its_owner_at_any_end() -> None:
    starts = (
        "import os, signal\n"
        "from pipeline.rollout.reward.mathematics import MathProcess\n"
        "process = MathProcess(timeout_s=5, memory_bytes=1 << 30)\n"
        "assert process.is_right('1', '1', ['answer'])\n"
        "print(process._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    done = subprocess.run([sys.executable, "-c", starts], stdout=subprocess.PIPE, timeout=200)

    deadline_s = time.monotonic() + 20
    while group_is_running(int(done.stdout)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def group_is_running(pid: int) -> bool:
    """Return whether a process or a fork of it runs: zombies aside."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z" and pid in (int(entry), int(parent)):
                return True
    return False
