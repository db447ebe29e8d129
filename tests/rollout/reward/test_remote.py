"""The rewards `remote` and `judge` against a real server: slow, wrong, dead, too talkative."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.rewards import JudgeReward, RemoteReward
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.given_rows import GivenRows
from pipeline.rollout.reward.remote import remote_reward
from pipeline.rollout.reward.service import Breaker
from tests.support.daemon import wait_until

Reply = Callable[["Server", int, dict[str, Any]], Any]


class Letters:
    """A tokenizer whose tokens are code points; 0 is special."""

    eos_token_id = 0

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in ids if token or not skip_special_tokens)


class NoGzip(bytes):
    """Content that is sent as gzip."""


class Server:
    """Counts requests; `reply` gives the answer to each: a value sent as JSON, bytes, or an HTTP status.

    It listens on the socket `bound`, which it closes, or on one of its own.
    """

    def __init__(self, reply: Reply, bound: socket.socket | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.closing = threading.Event()
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                # Counted down before the client can send the next one.
                try:
                    answer = reply(outer, number, body)
                finally:
                    with lock:
                        outer.at_once -= 1
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with suppress(OSError):
                    self.send_response(answer if type(answer) is int else 200)
                    self.send_header("content-length", str(len(content)))
                    self.send_header("location", "http://127.0.0.1:1/")
                    if isinstance(answer, NoGzip):
                        self.send_header("content-encoding", "gzip")
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        bound = bound or socket.create_server(("127.0.0.1", 0))
        self._server = ThreadingHTTPServer(bound.getsockname(), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = bound
        self._server.server_activate()
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}/score"

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()


@contextmanager
def served(reply: Reply, bound: socket.socket | None = None) -> Iterator[Server]:
    with closing(Server(reply, bound)) as server:
        yield server


LIMITS = {"request_timeout_s": 30.0, "deadline_s": 60.0}


def settings(url: str, **options: Any) -> RemoteReward:
    return RemoteReward(name="remote", url=url, **(LIMITS | options))


def judge(url: str, **options: Any) -> JudgeReward:
    return JudgeReward(name="judge", url=url.removesuffix("/score"), model="m", **(LIMITS | options))


def results(
    options: RemoteReward | JudgeReward,
    responses: list[str],
    reward: Any = None,
    *,
    prompts: list[str] | None = None,
    answers: list[Any] | None = None,
    columns: dict[str, Any] | None = None,
    attempts: int | None = None,
) -> list[Any]:
    """Return the score of each response, or its error."""
    made = remote_reward(options, attempts=attempts) if attempts else load_reward_function(options)
    reward = reward or FunctionReward([made], Letters())
    prompts = prompts or ["?!"] * len(responses)
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    ids = torch.full((len(responses), max(map(len, texts))), ord(" "))
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor([*map(ord, text)])
    found = reward.results(
        [0],
        GivenRows(
            ids, torch.ones_like(ids), torch.tensor([len(prompt) for prompt in prompts]),
            torch.tensor([len(text) for text in texts]), answers or [f"a{row}" for row in range(len(responses))],
            None, [{"level": row, **(columns or {})} for row in range(len(responses))],
        ),
    )  # fmt: skip
    return [one if isinstance(one, RewardError) else one.reward for (one,) in found]


def lengths(server: Server, number: int, body: dict[str, Any]) -> Any:
    return {"scores": [len(row["response"]) for row in body["rows"]]}


def test_rows_are_sent_in_batches_at_the_same_time_and_come_back_in_order() -> None:
    three = threading.Barrier(3, timeout=60)

    def reply(server: Server, number: int, body: dict[str, Any]) -> Any:
        if number < 3:
            three.wait()
            # A fourth one would come within this time.
            server.closing.wait(0.2)
        return lengths(server, number, body)

    with served(reply) as server:
        options = settings(server.url, batch_size=2, concurrency=3, request_timeout_s=60)

        scores = results(options, ["x" * row for row in range(1, 12)])

    assert scores == [float(row) for row in range(1, 12)]
    assert sorted(len(body["rows"]) for body in server.requests) == [1, 2, 2, 2, 2, 2]
    assert server.most_at_once == 3
    first = next(row for body in server.requests for row in body["rows"] if row["answer"] == "a0")
    assert first == {"prompt": "?!", "response": "x", "answer": "a0", "columns": {"level": 0}}


def test_each_row_has_its_own_prompt_without_special_tokens() -> None:
    with served(lengths) as server:
        results(settings(server.url), ["x", "yy"], prompts=["\0a", "bcd"])

    assert [row["prompt"] for row in server.requests[0]["rows"]] == ["a", "bcd"]


def test_a_failure_is_tried_again_after_a_random_delay_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, delays = [503, 429, 408, 500, 502, 504], []
    monkeypatch.setattr("pipeline.rollout.reward.service.random.uniform", lambda *of: delays.append(of) or 0.0)

    def reply(server: Server, number: int, body: dict[str, Any]) -> Any:
        return statuses[number] if number < len(statuses) else lengths(server, number, body)

    with served(reply) as server:
        assert results(settings(server.url), ["ab"], attempts=7) == [2.0]
    assert len(server.requests) == 7
    assert delays == [(0, 0.2 * 2**attempt) for attempt in range(6)]


def test_the_last_attempt_is_followed_by_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[Any] = []
    monkeypatch.setattr("pipeline.rollout.reward.service.random.uniform", lambda *of: delays.append(of) or 0.0)

    with served(lambda server, number, body: 503) as server:
        (found,) = results(settings(server.url), ["ab"], attempts=2)

    assert "the service failed 2 times, the last time with HTTP 503" in str(found)
    assert (len(server.requests), len(delays)) == (2, 1)


def test_a_service_that_answers_is_not_dead_whatever_it_says() -> None:
    with served(lambda server, number, body: 404) as server:
        options = settings(server.url, batch_size=1, concurrency=1)
        found = results(options, ["a"] * 7)

    assert len(server.requests) == 7 and all("HTTP 404" in str(error) for error in found)


def test_a_service_that_is_late_five_times_is_not_asked() -> None:
    with served(lambda server, number, body: server.closing.wait(30) and {}) as server:
        options = settings(server.url, batch_size=1, deadline_s=0.4)
        reward = FunctionReward([load_reward_function(options)], Letters())
        late = results(options, ["a"] * 5, reward)
        after = results(options, ["a"], reward)

    assert all("no answer of the service within 0.4 s" in str(error) for error in late)
    assert "the service is not asked: 5 requests in a row had no answer" in str(after[0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"no JSON", "the service answered in another form: JSONDecodeError"),
        ({"scores": [1.0]}, "the service answered in another form: .*not a list of 2 scores"),
        ({"score": [1.0, 2.0]}, "the service answered in another form: KeyError"),
        ([], "the service answered in another form: TypeError"),
        (404, "the service answered with HTTP 404"),
        (302, "the service answered with HTTP 302"),
        (b'{"scores": [' + b" " * (2 << 20) + b"1, 2]}", "the service answered with more than 1,048,576 B"),
    ],
    ids=["text", "count", "key", "list", "missing", "redirect", "bytes"],
)
def test_a_wrong_answer_is_an_error_of_its_rows_at_once(answer: Any, message: str) -> None:
    with served(lambda server, number, body: answer) as server:
        found = results(settings(server.url), ["ab", "c"])

    assert all(isinstance(error, RewardError) for error in found)
    with pytest.raises(RewardError, match=rf"^reward:remote: {message}"):
        raise found[1]
    assert len(server.requests) == 1
    # What the service said may hold a prompt: it is in no log.
    assert "scores" not in found[1].bare and "not a list" not in found[1].bare


def test_a_score_that_is_no_number_costs_its_row_alone() -> None:
    with served(lambda server, number, body: {"scores": [None, "1", True, 1e999, 10**400, 2]}) as server:
        found = results(settings(server.url), ["a"] * 6)

    # null: the service says that it does not apply to the row.
    assert math.isnan(found[0]) and found[5] == 2.0
    assert all(isinstance(error, RewardError) for error in found[1:5])


@pytest.mark.parametrize(
    ("answer", "reason"), [(b"[" * (1 << 19), ".*"), (NoGzip(b'{"scores": [1]}'), "DecodingError.*")],
    ids=["nested without end", "not encoded as it says"],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_costs_the_rows_of_its_request_alone(answer: bytes, reason: str) -> None:
    def reply(server: Server, number: int, body: dict[str, Any]) -> Any:
        return answer if body["rows"][0]["response"] == "bad" else lengths(server, number, body)

    with served(reply) as server:
        found = results(settings(server.url, batch_size=1), ["bad", "fine"])

    assert found[1] == 4.0 and len(server.requests) == 2
    with pytest.raises(RewardError, match=rf"^reward:remote: the service answered in another form: {reason}$"):
        raise found[0]


def test_a_column_that_utf_8_cannot_encode_is_sent_and_a_number_that_json_lacks_is_said() -> None:
    with served(lengths) as server:
        sent = results(settings(server.url), ["é"], columns={"note": "half \ud83d"})
        refused = results(settings(server.url, batch_size=1), ["a", "b"], answers=[1e999, 1])

    assert sent == [1.0] and refused[1] == 1.0
    assert server.requests[0]["rows"][0]["response"] == "é"
    assert server.requests[0]["rows"][0]["columns"]["note"] == "half \ud83d"
    with pytest.raises(RewardError, match=r"the service is not asked: the prompt's row has a number that JSON lacks"):
        raise refused[0]


def test_a_slow_service_ends_at_the_deadline_and_the_rows_in_time_are_kept() -> None:
    def reply(server: Server, number: int, body: dict[str, Any]) -> Any:
        if body["rows"][0]["response"] == "slow":
            server.closing.wait(30)
        return lengths(server, number, body)

    began_s = time.monotonic()
    with served(reply) as server:
        options = settings(server.url, batch_size=1, deadline_s=6, request_timeout_s=5)
        found = results(options, ["slow", "fast", "good"])

    assert found[1:] == [4.0, 4.0]
    assert isinstance(found[0], RewardError) and "reward:remote: " in str(found[0])
    assert time.monotonic() - began_s < 25


def test_a_service_that_sends_a_byte_now_and_then_is_late_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        ended = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while not ended.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        began_s = time.monotonic()
        found = results(settings(url, request_timeout_s=0.5), ["a"], attempts=1)
        ended.set()
        thread.join(60)

    assert not thread.is_alive()
    assert isinstance(found[0], RewardError) and "failed 1 times, the last time with TimeoutError" in str(found[0])
    assert time.monotonic() - began_s < 15


def test_a_dead_service_is_not_asked_after_five_requests_and_found_again() -> None:
    with socket.socket() as bound:
        # It does not listen: no other process gets the port, and a connection is refused.
        bound.bind(("127.0.0.1", 0))
        options = settings(
            f"http://127.0.0.1:{bound.getsockname()[1]}/",
            batch_size=1,
            concurrency=1,
        )
        reward = FunctionReward([remote_reward(options, attempts=2)], Letters())

        found = [str(error) for error in results(options, ["a"] * 8, reward)]
        with served(lengths, bound) as server:
            wait_until(lambda: results(options, ["abc"], reward) == [3.0], 60, "the service is asked again")
            again = results(options, ["a", "bc"], reward)

    assert all("the service failed 2 times, the last time with ConnectError" in error for error in found[:5])
    assert all("the service is not asked: 5 requests in a row had no answer" in error for error in found[5:])
    assert (again, len(server.requests)) == ([1.0, 2.0], 3)


def test_an_open_circuit_admits_one_request_after_its_time_and_doubles_it() -> None:
    now_s = [0.0]
    breaker = Breaker(lambda: now_s[0])
    for _ in range(5):
        breaker.admit()
        breaker.failed()
    # Those that were under way when the circuit opened.
    for _ in range(20):
        breaker.failed()
    now_s[0] = 0.9
    with pytest.raises(RewardError):
        breaker.admit()

    now_s[0] = 1.0
    breaker.admit()
    with pytest.raises(RewardError):
        breaker.admit()
    for _ in range(20):
        breaker.failed()
    now_s[0] = 2.9
    with pytest.raises(RewardError):
        breaker.admit()
    now_s[0] = 3.0
    breaker.admit()
    breaker.answered()

    breaker.admit()
    for _ in range(4):
        breaker.failed()
    breaker.admit()
    # The time of an open circuit begins at 1 s again, and ends at 60 s.
    waits_s = []
    for _ in range(8):
        breaker.failed()
        opened_s = now_s[0]
        while True:
            try:
                breaker.admit()
                break
            except RewardError:
                now_s[0] += 0.5
        waits_s.append(now_s[0] - opened_s)
    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_key_comes_from_the_environment_and_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(lengths) as server:
        options = settings(server.url, api_key_variable="KEY_OF_TEST")
        with pytest.raises(ConfigError, match=r"rewards.remote.api_key_variable: KEY_OF_TEST is not set in"):
            load_reward_function(options)
        monkeypatch.setenv("KEY_OF_TEST", "secret")

        assert results(options, ["a"]) == [1.0]
    assert {name.lower(): value for name, value in server.headers[0].items()}["authorization"] == "Bearer secret"
    # The bound of bytes is that of the bytes on the wire.
    assert {name.lower(): value for name, value in server.headers[0].items()}["accept-encoding"] == "identity"


def judged(server: Server, number: int, body: dict[str, Any]) -> Any:
    text = body["messages"][0]["content"]
    said = "It says Score: 1. So:\n**Score:** 7.5" if "good" in text else "Score: 11" if "much" in text else "no idea"
    said = "Score: -1" if "minus" in text else said
    return {"choices": [{"message": {"content": said}}]}


def test_a_judge_scores_each_response_from_0_to_1(tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text("{prompt} {response} {answer} {level} {best} {unknown}")
    with served(judged) as server:
        options = judge(server.url)
        options = options.model_copy(update={"url": f"{options.url}/v1/"})
        found = results(options, ["good", "much", "what", "minus"])
        results(judge(server.url, template_file=template), ["good"], answers=[None])
        assert server.requests[-1]["messages"][0]["content"] == "?! good (none) 0 10.0 {unknown}"
        results(judge(server.url, template_file=template), ["good"], columns={"prompt": "x", "best": 3})
        assert server.requests[-1]["messages"][0]["content"] == "?! good a0 0 10.0 {unknown}"
        results(judge(server.url, template_file=template), ["good {answer}"])

    assert found[0] == 0.75
    assert set(server.paths) == {"/v1/chat/completions", "/chat/completions"}
    assert "score -1 is not within 0 and 10" in str(found[3])
    assert "score 11 is not within 0 and 10" in str(found[1]) and 'no line "Score: N"' in str(found[2])
    assert all(math.isnan(error) if isinstance(error, float) else error for error in found[1:])
    body = server.requests[-1]
    # Braces of a response are text, not places of the template.
    assert body["messages"] == [{"role": "user", "content": "?! good {answer} a0 0 10.0 {unknown}"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 256)


def test_a_judges_template_has_the_response(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("{prompt}")
    for name, message in (("empty.txt", r"has no \{response\}"), ("none.txt", "cannot read")):
        with pytest.raises(ConfigError, match=rf"rewards.judge.template_file: .*{message}"):
            load_reward_function(judge("http://h/", template_file=tmp_path / name))


def test_rows_whose_request_was_never_sent_do_not_make_a_service_dead() -> None:
    def reply(server: Server, number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            server.closing.wait(30)
        return lengths(server, number, body)

    with served(reply) as server:
        options = settings(server.url, batch_size=1, concurrency=1, deadline_s=2.0)
        reward = FunctionReward([load_reward_function(options)], Letters())
        late = results(options, ["a"] * 10, reward)
        sent = len(server.requests)
        after = results(options, ["abc"], reward)

    assert all("no answer of the service within 2 s" in str(error) for error in late)
    assert sent == 1
    assert after == [3.0]
