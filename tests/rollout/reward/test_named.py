"""Reward functions by name, and the limits of the process in which `code` runs tests."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.rewards import REWARD_NAMES, LengthReward, table_of
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.code import passes
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from tests.rollout.reward.test_remote import Letters


def score(
    name: str, response: str, answer: Any = None, /, *, columns: dict[str, Any] | None = None, **options: Any
) -> float:
    limits = {"limit_tokens": 10, "buffer_tokens": 4} if name == "length" else {}
    settings = table_of(name)(name=name, **{**limits, **options})
    reward = FunctionReward([load_reward_function(settings)], Letters())
    ids = torch.tensor([[ord("?"), *map(ord, response), 0]])
    ends = torch.tensor([ids.shape[1]])
    return float(reward(ids, torch.ones_like(ids), torch.tensor([1]), ends, [answer], columns=[columns or {}]))


@pytest.mark.parametrize(
    ("name", "response", "answer", "options", "expected"),
    [
        ("exact", " 42\n", "42", {}, 1),
        ("exact", "42", 42, {}, 1),
        ("exact", "42.", "42", {}, 0),
        ("regex", "so it is 42", None, {"pattern": r"\d+"}, 1),
        ("regex", "so it is", None, {"pattern": r"\d+"}, 0),
        ("regex", "#### 1 no #### 42", "42", {"pattern": r"#### (\d+)"}, 1),
        ("regex", "#### 42 no #### 1", "42", {"pattern": r"#### (\d+)"}, 0),
        ("regex", "42", "42", {"pattern": r"#### (\d+)"}, 0),
        ("format", "<think>a</think>\n<answer>b</answer>", None, {}, 1),
        ("format", "<think>a</think> c <answer>b</answer>", None, {}, 0),
        ("format", "<think>a</think><answer>b</answer> c", None, {}, 0),
        ("format", "<answer>b</answer><think>a</think>", None, {}, 0),
        ("format", "<think> </think><answer>b</answer>", None, {}, 0),
        ("format", "<think><think>a</think><answer>b</answer>", None, {}, 0),
        ("format", "<think>a</think><answer>b", None, {}, 0),
        ("format", "<x>a</x>", None, {"tags": ["x"]}, 1),
        ("format", "<think>a</answer>b</think><answer>c</answer>", None, {}, 0),
        ("exact", '["é"]', ["é"], {}, 1),
        # The stop token counts: 5, 7 and 10 tokens of which the limit is 10 and the buffer 4.
        ("length", "abcd", None, {}, 0),
        ("length", "abcdef", None, {}, -0.25),
        ("length", "abcdefghi", None, {}, -1),
        ("length", "abcdefghijkl", None, {}, -1),
    ],
)  # fmt: skip
def test_a_response_has_the_reward_of_the_name(
    name: str, response: str, answer: Any, options: dict[str, Any], expected: float
) -> None:
    assert score(name, response, answer, **options) == expected


def test_a_column_of_the_row_goes_before_the_option() -> None:
    assert score("regex", "b", columns={"pattern": "b"}, pattern="a") == 1
    assert score("regex", "a", columns={"pattern": "b"}, pattern="a") == 0


@pytest.mark.parametrize(("response", "expected"), [
    ('{"a": 1}', 1), ('{"a": "1"}', 0), ('{"b": 1}', 0), ("no JSON", 0), ('text\n```json\n{"a": 2}\n```\n', 1),
    ('{"a": 1, "b": NaN}', 0), ('{"a": 1, "b": [-Infinity]}', 0), ('{"a": 1, "a": 1}', 0),
    ('{"a": 1, "b": {"c": 1, "c": 2}}', 0),
    ('{"a": 1, "b": 1e999}', 0), ('{"a": 1, "b": "\ud800"}', 0), ('{"a": 1, "b": "\\ud800"}', 1), ('{"a": 1,}', 0),
    ('{"a": ' + "9" * 5000 + "}", 0), ('{"a": ' + "9" * 309 + "}", 0), ('{"a": ' + "9" * 308 + "}", 1),
    ('```\n{"a": 1}\n```\nIt prints\n```text\nok\n```', 1),
    ('<answer>{"a": 1}</answer>', 1),
    ("[" * 100_000, 0), ('```json\n{"b": 1}\n```\n```json\n{"a": 1}\n```', 1),
])  # fmt: skip
def test_json_that_the_schema_admits(tmp_path: Path, response: str, expected: float) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))

    assert score("json_schema", response, schema_file=path) == expected
    assert score("json_schema", response, columns={"schema": schema}) == expected
    assert score("json_schema", response, columns={"schema": json.dumps(schema)}) == expected


def test_json_that_is_nested_too_deeply_for_its_schema_is_0() -> None:
    schema = {"$defs": {"node": {"items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}

    assert score("json_schema", "[" * 5 + "]" * 5, columns={"schema": schema}) == 1
    assert score("json_schema", "[" * 900 + "]" * 900, columns={"schema": schema}) == 0


def test_a_schema_fetches_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]

        with pytest.raises(RewardError, match="json_schema raised"):
            score("json_schema", "1", columns={"schema": {"$ref": f"http://127.0.0.1:{port}/schema.json"}})
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(("name", "columns", "message"), [
    ("exact", {}, "reward:exact: exact needs an answer"),
    ("regex", {}, "reward:regex: regex needs a pattern, or a column named pattern"),
    ("json_schema", {}, "json_schema needs a schema_file, or a column named schema"),
    ("code", {}, "code needs tests: a column of this name"),
    ("code", {"tests": []}, "code needs tests: a column of this name"),
])  # fmt: skip
def test_a_row_without_what_a_reward_needs_is_an_error_and_not_0(
    name: str, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        score(name, "response", columns=columns)


def test_wrong_options_are_configuration_errors(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[")
    (tmp_path / "kind.json").write_text('{"type": "nothing"}')
    (tmp_path / "number.json").write_text('{"maximum": Infinity}')

    with pytest.raises(ConfigError, match=r"rewards.regex.pattern: '\[' is no regular expression"):
        score("regex", "", pattern="[")
    for name, problem in (
        ("list.json", "list.json is not JSON: "), ("kind.json", "kind.json is no JSON schema: "),
        ("number.json", "number.json is not JSON: Infinity is no JSON"), ("none.json", "cannot read .*none.json: "),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"rewards.json_schema.schema_file: .*{problem}"):
            score("json_schema", "", schema_file=tmp_path / name)


def test_a_reward_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(
        ConfigError,
        match=rf"math needs the package math-verify: {re.escape(sys.executable)} -m pip install math-verify$",
    ):
        score("math", "1", "1")


@pytest.mark.parametrize(("response", "answer", "expected"), [
    (r"thus \boxed{\frac{1}{2}}", "0.5", 1), ("The answer is $x^2 + 1$", "1 + x^2", 1), ("It is 41.", "42", 0),
    ("no result", "42", 0), (r"\boxed{42}", 42, 1),
])  # fmt: skip
def test_math_compares_results(response: str, answer: Any, expected: float) -> None:
    assert score("math", response, answer) == expected


def test_an_answer_without_marks_is_read_as_mathematics() -> None:
    assert score("math", r"\boxed{\sqrt{2}}", r"\sqrt{2}") == 1
    assert score("math", r"\boxed{1}", "1 + x^2") == 0


def test_code_is_the_last_block_and_the_tests_of_the_row_go_before_its_answer() -> None:
    first, last = "```py\nvalue = 1\n```\n", "```Python\nvalue = 2\n```\n"

    assert score("code", first + last, "assert value == 1", columns={"tests": "assert value == 2"}) == 1
    assert score("code", last + first, "assert value == 1") == 1


def test_code_is_right_if_the_tests_pass() -> None:
    response = "I define it:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is all."

    assert score("code", response, columns={"tests": "assert double(2) == 4"}) == 1
    assert score("code", response, columns={"tests": ["assert double(2) == 4", "assert double(3) == 7"]}) == 0
    assert score("code", "def double(x): return x + x", "assert double(2) == 4") == 1
    assert score("code", "def double(x: return", "assert double(2) == 4") == 0


def test_code_and_tests_each_begin_with_imports_from_the_future() -> None:
    future = "from __future__ import annotations\n"
    tests = [f"{future}def check(x: Unknown): assert x == 4", f"{future}check(double(2))"]

    assert score("code", "def double(x): return 2 * x", tests[0] + "\ncheck(double(2))") == 1
    assert score("code", f"{future}def double(x: Unknown): return 2 * x", columns={"tests": tests}) == 1
    # The lines of one text.
    assert score("code", "a = 1", columns={"tests": [future.strip(), "if a:", "    b = a", "assert b == 1"]}) == 1
    # Those of the response hold for the response alone.
    assert score("code", future, "def check(x: Unknown): pass") == 0


@pytest.mark.parametrize("tests", ["assert double(2) ==", "assert '\ud800'", "a = 1\0", ["assert (", "1 + 1)", ")"]])
def test_tests_that_are_no_python_are_an_error_and_not_0(tests: Any) -> None:
    with pytest.raises(RewardError, match="code cannot compile the tests: "):
        score("code", "def double(x): return 2 * x", columns={"tests": tests})


def test_code_with_a_lone_surrogate_is_wrong_and_one_in_an_escape_is_a_text() -> None:
    assert score("code", "a = '\ud800'", "assert a") == 0
    assert score("code", "a = '\\ud800'", "assert ord(a) == 0xd800") == 1


def test_every_name_is_known() -> None:
    for name in REWARD_NAMES:
        if name not in ("length", "math", "model", "remote", "judge"):
            assert callable(load_reward_function(name))
    assert callable(load_reward_function(LengthReward(name="length", limit_tokens=2, buffer_tokens=1)))
    assert math.isfinite(score("exact", "a", "b"))


def test_code_that_writes_without_end_fills_no_memory_beyond_its_process() -> None:
    writes = (
        "import os\nchunk = bytes(1 << 16)\nwhile True:\n for n in range(3, 8):\n  try: os.write(n, chunk)\n"
        "  except OSError: pass"
    )
    measures = (
        "import resource, sys\n"
        "from pipeline.rollout.reward.code import passes\n"
        "assert passes([''], timeout_s=20, memory_bytes=512 << 20)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert not passes([sys.argv[1]], timeout_s=1, memory_bytes=512 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )

    done = subprocess.run([sys.executable, "-c", measures, writes], stdout=subprocess.PIPE, timeout=100, check=True)

    assert int(done.stdout) < 16 << 10, "KiB"


@pytest.mark.parametrize(
    ("numbers", "arguments"),
    [
        # prctl takes the signal back by which it dies with its parent.
        ((157,), (1, 0, 0, 0, 0)),
        # Arguments that change nothing where they are not refused by the filter.
        ((160, 303, 304, 159, 163, 164, 167, 168, 170, 171, 172, 173, 227, 305), (-1, -1, -1, -1, -1)),
        ((64, 68, 240), (0x7FFF, 0, 0, 0)),
        ((31, 65, 66, 69, 70, 71, 220, 241), (-1, -1, -1, -1)),
    ],
    ids=["prctl", "limits, handles and the machine", "new queues", "queues of others"],
)
def test_calls_by_which_code_would_reach_beyond_its_limits_are_refused(
    numbers: tuple[int, ...], arguments: tuple[int, ...]
) -> None:
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number in {numbers}:\n"
        f"    done = libc.syscall(number, *map(ctypes.c_long, {arguments}))\n"
        "    assert (done, ctypes.get_errno()) == (-1, 1), number"
    )

    assert passes([source], timeout_s=20, memory_bytes=512 << 20)
