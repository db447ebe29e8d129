"""Ways to sample the same prompts: a daemon, and engines without one.

`Instance` is a whole daemon whose trainer is the benchmark, which takes batches and computes nothing. `Bare` is vLLM's
own `LLM.generate` in a process of its own, and `plain_generate` the ``generate`` of transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benches.chain import LONGEST_PROMPT, VOCABULARY
from benches.measure import end_process
from benches.rollout_peers import EOS, PAD, tokenizer
from benches.run import rlhfd_command
from pipeline import connect
from pipeline.errors import RlhfdError
from pipeline.prompts.source import PromptSource
from pipeline.rollout.generation.interface import row_seed
from pipeline.rollout.roller import seed_of
from pipeline.runtime import control, lock
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab

GROUP = 2
RUN_SEED = 0
_BATCH_ROWS = 32
_START_S, _TURN_S = 300.0, 600.0
_POLL_S = 0.002
_ASK_S = 10.0
_REWARD = """def score(input_ids, attention_mask, *, response_start, response_end, **_):
    return float(response_end - response_start)
"""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement.

    Attributes:
        first: Position of the first prompt.
        prompts: Number of prompts.
        tokens: Tokens of all responses.
        seconds: From the first ticket or call to the end of the last response.
        rows_per_s: Rows sealed a second while tickets were issued, the begin left out; 0 without a daemon.
    """

    first: int
    prompts: int
    tokens: int
    seconds: float
    rows_per_s: float = 0.0

    def __str__(self) -> str:
        """Tokens a second, with the prompts."""
        return f"{self.tokens / self.seconds:.0f} tokens/s, {self.prompts} prompts, {self.seconds:.1f} s"


def _until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return value


class Instance:
    """A daemon, paused between the turns.

    Args:
        folder: Has ``model`` and ``prompts.jsonl`` (`benches.chain.write`).
        longest: Tokens of the longest response.
        name: Name of this daemon, of which there may be several in a folder.
        settings: Further settings.
    """

    def __init__(self, folder: Path, longest: int, name: str, settings: Mapping[str, object]) -> None:
        place = folder / name
        self._runtime = place / "run"
        place.mkdir()
        (place / "lengths.py").write_text(_REWARD)
        own = {
            "model.actor": folder / "model", "prompts.path": folder / "prompts.jsonl", "prompts.template": "none",
            "rewards": '["lengths:score"]', "rollout.reward_timeout_s": 0, "rollout.algorithm": "grpo",
            "rollout.num_generations": GROUP, "rollout.kl_coef": 0, "trainer.kl_coef": 0,
            "rollout.max_prompt_length": LONGEST_PROMPT, "rollout.max_new_tokens": longest, "rollout.temperature": 1.0,
            "samples.per_minute": 0, "trainer.kind": "external", "trainer.publish_every": 1024,
            "buffer.max_staleness": 1024, "buffer.sample_batch_size": _BATCH_ROWS, "buffer.limit": 64, **settings,
        }  # fmt: skip
        self._log = (place / "log").open("wb")
        # Without an end of its own.
        command = rlhfd_command(own, 0)(RUN_SEED, place)
        self._process = subprocess.Popen(command, cwd=place, stdout=self._log, stderr=self._log)
        self._stopped = threading.Event()
        try:
            self._record = _until(self._ready, _START_S, f"{name} is ready")
            self._slab = MetricsSlab.attach(Path(self._record.shm_dir) / "metrics")
            self._trainer = threading.Thread(target=self._take, daemon=True)
            self._trainer.start()
            self._say("pause")
            self._rest()
        except BaseException:
            self._process.kill()
            self._process.wait()
            sys.stderr.write((place / "log").read_text(errors="replace")[-4000:])
            raise

    def turn(self, prompts: int) -> Turn:
        """Roll out at least so many prompts, up to the end of the last one."""
        first, tokens, wanted = self._books().sealed, self._tokens(), prompts * GROUP
        self._say("resume")
        _until(lambda: self._books().writing_items, _TURN_S, "a ticket")
        began_s = time.perf_counter()
        _until(lambda: self._begun_rows() >= first + wanted // 3, _TURN_S, "the first third has begun")
        early_s, early = time.perf_counter(), self._books().sealed
        _until(lambda: self._begun_rows() >= first + wanted, _TURN_S, "the prompts have begun")
        late_s, late = time.perf_counter(), self._books().sealed
        self._say("pause")
        self._rest()
        seconds = time.perf_counter() - began_s
        rows_per_s = (late - early) / (late_s - early_s)
        ended = self._books().sealed - first
        return Turn(first // GROUP, ended // GROUP, self._tokens() - tokens, seconds, rows_per_s)

    def close(self) -> None:
        """End the daemon."""
        self._stopped.set()
        end_process(self._process, _START_S)
        self._slab.close()
        self._log.close()

    def _ready(self) -> lock.InstanceRecord | None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {self._process.returncode}")
        with contextlib.suppress(RlhfdError):
            record = lock.find(self._runtime)
            if control.request(record, "status", _ASK_S)["state"] == "ready":
                return record
        time.sleep(0.2)
        return None

    def _say(self, command: str) -> None:
        control.request(self._record, command, _ASK_S)

    def _take(self) -> None:
        with contextlib.suppress(RlhfdError), connect(self._runtime) as connection:
            while not self._stopped.is_set() and connection.take(timeout_s=None) is not None:
                connection.acknowledge()

    def _books(self) -> Any:
        return _until(self._slab.conservation, _ASK_S, "the buffer's books")

    def _begun_rows(self) -> int:
        books = self._books()
        return int(books.sealed + books.writing_items)

    def _tokens(self) -> int:
        return int(MetricsReader(self._slab).read().value("rlhfd_tokens_total", kind="response") or 0)

    def _rest(self) -> None:
        _until(lambda: not self._books().writing_items, _TURN_S, "no rollout is under way")


class Prompts:
    """The prompts of a folder in the order of the daemons, and the seeds of their rows with tickets of one prompt."""

    def __init__(self, folder: Path) -> None:
        self._source = PromptSource(folder / "prompts.jsonl", RUN_SEED)
        self._tokenizer = tokenizer(VOCABULARY)

    def ids(self, first: int, prompts: int) -> list[list[int]]:
        """Return the tokens of prompts."""
        places = range(first, first + prompts)
        return [self._tokenizer(self._source.at(place).prompt)["input_ids"] for place in places]

    @staticmethod
    def seeds(first: int, prompts: int) -> list[list[int]]:
        """Return the seeds of each prompt's responses."""
        return [
            [row_seed(seed_of(RUN_SEED, place), row) for row in range(GROUP)] for place in range(first, first + prompts)
        ]

    def close(self) -> None:
        """Close the prompt file."""
        self._source.close()


class Bare:
    """vLLM's `LLM.generate`, with its defaults but for rows at a time, cache and threads."""

    def __init__(self, folder: Path, longest: int, max_rows: int, cache_bytes: int, *, dtype: str = "float32") -> None:
        self._room = longest
        arguments = {
            "model": str(folder / "model"), "skip_tokenizer_init": True, "dtype": dtype,
            "max_model_len": LONGEST_PROMPT + longest, "max_num_seqs": max_rows, "generation_config": "vllm",
            "kv_cache_memory_bytes": cache_bytes, "disable_log_stats": True,
        }  # fmt: skip
        if on_cpu := not torch.cuda.is_available():
            arguments["enforce_eager"] = True
        else:
            # What must be free at the start: the engine of a daemon is on the card, too.
            arguments["gpu_memory_utilization"] = 0.2
        variables = {
            "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # On a card vLLM compiles its layers.
            **({"TORCHDYNAMO_DISABLE": "1"} if on_cpu else {}),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benches.engine_bare", json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )  # fmt: skip
        self._answer()

    def turn(self, prompts: Prompts, first: int, count: int) -> Turn:
        """Sample the responses to prompts in one call."""
        assert self._process.stdin is not None
        work = {
            "prompts": prompts.ids(first, count),
            "seeds": prompts.seeds(first, count),
            "eos": EOS,
            "room": self._room,
        }
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return Turn(first, count, found["tokens"], found["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_ASK_S * 6)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # vLLM prints as well.
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError("the process of LLM.generate has ended")


@torch.no_grad()
def plain_generate(actor: Any, prompts: Prompts, first: int, count: int, call_prompts: int, longest: int) -> Turn:
    """Sample the responses to prompts with ``generate`` of transformers, as many prompts a call as a ticket has."""
    ids, tokens, began_s = prompts.ids(first, count), 0, time.perf_counter()
    for start in range(0, count, call_prompts):
        rows = [row for row in ids[start : start + call_prompts] for _ in range(GROUP)]
        width = max(map(len, rows))
        padded = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        torch.manual_seed(start)
        made = actor.generate(
            padded, attention_mask=(padded != PAD).long(), max_new_tokens=longest, do_sample=True, temperature=1.0,
            top_p=1.0, top_k=0, eos_token_id=EOS, pad_token_id=PAD,
        )[:, width:]  # fmt: skip
        tokens += sum(_length(row) for row in made.tolist())
    return Turn(first, count, tokens, time.perf_counter() - began_s)


def _length(row: Sequence[int]) -> int:
    return row.index(EOS) + 1 if EOS in row else len(row)
