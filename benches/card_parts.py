"""The parts of `bin/card`. A further part is a function that yields rows, and its line in `PARTS`."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import random
import signal
import statistics
import string
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from benches.card_row import Place, Row
from benches.card_run import CardRun, proportional_bytes, used_of_card
from benches.card_sleep import PhaseMemory, rows_of
from benches.measure import Sample, end_process, figure, interleaved, once
from benches.report import ROOT
from benches.sleeping_engine import HELD_BYTES
from pipeline.config.plan import ENGINE_TERMS
from pipeline.supervisor.capacity.budgets import phases

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from pipeline.experience.types import Experience

MODEL = "model"
NEW_TOKENS = 16, 256
LONGEST_ROW = 64, 1024
"""Tokens of a response and of the longest row of a batch: of `SMALL=1`, and on a card."""

_QWEN_05B = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip
_TINY = _QWEN_05B | {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_QWEN_15B = _QWEN_05B | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
}  # fmt: skip
_QWEN_7B = _QWEN_15B | {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
_PAD, _EOS = 0, 1
_PROMPT_TOKENS = 64
_TESTS_S, _TESTS_VLLM_S = 150.0, 560.0
_STOP_S = 14.0
"""Seconds in which pytest ends its processes and writes its report."""
_KILLED = ("rollout", "trainer", "buffer", "rollout")
# A quarter of 60 steps of 256 rows has a mean reward with a deviation of .02; it rises by .15.
_LEARNS_BY = 0.03
_REWARD = """def score(input_ids, attention_mask, *, response_start, **_):
    return float(input_ids[response_start] % 5)
"""


class Part(NamedTuple):
    """A part.

    Attributes:
        rows: Runs it; yields a row as soon as it is known.
        deadline_s: Most seconds that it may take on a card; all of them together are below ten minutes.
        is_timed: Whether it needs the card for itself.
        needs_model: Whether it uses the random model.
    """

    rows: Callable[[Place], Iterator[Row]]
    deadline_s: float
    is_timed: bool = True
    needs_model: bool = True


def tests(place: Place) -> Iterator[Row]:
    """Run the tests that need a GPU and no vLLM; without one all are skipped."""
    yield from _tests(place, "gpu and not vllm", "--numprocesses=4", _TESTS_S)


def tests_vllm(place: Place) -> Iterator[Row]:
    """Run the tests that need a GPU and vLLM, one after the other: each starts engines, and some read the memory."""
    yield from _tests(place, "gpu and vllm", "--numprocesses=0", _TESTS_VLLM_S)


def _tests(place: Place, marks: str, processes: str, most_s: float) -> Iterator[Row]:
    if importlib.util.find_spec("pytest") is None:
        yield Row("tests that need a GPU", failed="pytest is not installed here")
        return
    listed = subprocess.run(
        ["grep", "--recursive", "--files-with-matches", "--include=test_*.py", r"mark\.gpu", "tests"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    report = place.folder / "report.xml"
    # Of the options of pyproject.toml those stay that need no plugin; a library's warning on a card is no failure.
    command = [sys.executable, "-m", "pytest", "-m", marks, "-q", "--override-ini=filterwarnings=default"]
    command += ["--override-ini=timeout=120"] if importlib.util.find_spec("pytest_timeout") else []
    command += [processes] if place.device and importlib.util.find_spec("xdist") else []
    yield from of_tests([*command, f"--junitxml={report}", *listed.stdout.split()], report, place.deadline_s(most_s))


def of_tests(command: Sequence[str], report: Path, most_s: float) -> Iterator[Row]:
    """Run pytest; return the rows of its report, also where it is ended before the last test."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(most_s)
        if late := process.poll() is None:
            yield Row("tests that need a GPU", failed=f"not done within {most_s:g} s")
    finally:
        # It writes the report of the tests that were done.
        end_process(process, _STOP_S, signal.SIGINT)
    if report.exists() or not late:
        yield from of_report(report, process.returncode)


def of_report(report: Path, code: int) -> Iterator[Row]:
    """Return the rows of a report of pytest (``--junitxml``) and its exit code."""
    if not report.exists():
        yield Row("tests that need a GPU", failed=f"pytest ended with {code} before its report")
        return
    suite = ElementTree.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite[0]
    # A test that fails, and once more at its teardown, is two errors of the suite, with xdist two cases too.
    kinds: dict[tuple[str | None, str | None], set[str]] = {}
    for case in suite.iter("testcase"):
        kinds.setdefault((case.get("classname"), case.get("name")), set()).update(problem.tag for problem in case)
    bad = sum(bool(found & {"failure", "error"}) for found in kinds.values())
    skipped = sum("skipped" in found and not found & {"failure", "error"} for found in kinds.values())
    counts = f"{len(kinds) - bad - skipped} passed, {bad} failed, {skipped} skipped"
    # 5: pytest found none.
    reason = f"pytest ended with {code}" if bad or code not in (0, 5) or not kinds else ""
    yield Row("tests that need a GPU", counts, failed=reason)
    for case in suite.iter("testcase"):
        found = [problem for kind in ("failure", "error") for problem in case.findall(kind)]
        if found:
            said = (found[0].get("message") or "").splitlines() or [""]
            yield Row(f"`{case.get('name')}`", failed=said[0][:200])


def embedded(place: Place) -> Iterator[Row]:
    """Run the embedded task, with kills: it learns, but for a small run, its books balance, it ends with 0."""
    steps = place.size(20, 60)
    # In the first three quarters: a start takes some steps.
    kills = {round(steps * (1 + number) * 0.75 / len(_KILLED)): role for number, role in enumerate(_KILLED)}
    run = CardRun(place.folder, {"trainer.max_steps": steps, "daemon.restart_delay_s": 0.1}, kills)
    run.to_end()
    yield run.ended()
    yield Row("SIGKILL in this run", ", ".join(run.killed) or "none", failed=_missing(run.left))
    rewards = [line["reward_mean"] for line in run.lines]
    if len(rewards) < 4:
        yield Row("steps", str(len(rewards)), str(steps), failed="too few to learn from")
        return
    first, last = (statistics.fmean(part) for part in (rewards[: steps // 4], rewards[-(steps // 4) :]))
    reason = "" if place.small or last > first + _LEARNS_BY else "it has not learned"
    yield Row("mean reward, first and last quarter of the steps", f"{first:.3f} to {last:.3f}", failed=reason)
    yield Row("steps, each once", str(len(rewards)), str(steps), failed="" if len(rewards) == steps else "steps differ")
    yield run.books()


def transformers(place: Place) -> Iterator[Row]:
    """Run the random model with rollouts by transformers."""
    yield from _engine(place, {"rollout.engine": "transformers"})


def vllm(place: Place) -> Iterator[Row]:
    """Run the random model with rollouts by vLLM, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        yield Row("a run with vLLM", "not installed here")
        return
    cache = place.size("64MiB", "8GiB")
    yield from _engine(place, {"rollout.engine": "vllm", "rollout.cache_bytes": cache})


def _engine(place: Place, settings: dict[str, object]) -> Iterator[Row]:
    run = CardRun(place.folder, {**_random_run(place, place.model), **settings})
    run.to_end()
    yield run.ended()
    yield from run.speeds()
    yield from run.memory(on_card=bool(place.device))
    yield run.books()


def _random_run(place: Place, model: Path) -> dict[str, object]:
    """Return the settings of a run on a random model, by GRPO."""
    steps, rows = place.size(4, 14), place.size(16, 128)
    place.folder.joinpath("telling.py").write_text(_REWARD)
    return {
        "model.actor": model, "prompts.path": model / "prompts.jsonl", "prompts.template": "none",
        "rollout.algorithm": "grpo", "rollout.num_generations": place.size(4, 8),
        "rollout.max_prompt_length": _PROMPT_TOKENS, "rollout.max_new_tokens": place.size(*NEW_TOKENS),
        "rewards": '["telling:score"]', "rollout.reward_timeout_s": 0, "trainer.max_steps": steps,
        "buffer.sample_batch_size": rows, "buffer.arena_bytes": place.size("16MiB", "256MiB"),
        "daemon.startup_timeout_s": 150,
    }  # fmt: skip


def rollouts(place: Place) -> Iterator[Row]:
    """Roll out ragged rows by vLLM, where it is installed: in a daemon whose trainer computes nothing, and alone."""
    if importlib.util.find_spec("vllm") is None:
        yield Row("rollouts with vLLM", "not installed here")
        return
    from benches.engines import on_card

    daemon, bare = on_card(place.folder / "vllm", small=place.small)
    against = f"{bare} by LLM.generate alone, {daemon.over(bare)} of it"
    yield Row("rollouts with vLLM, ragged rows, no KL", f"{daemon} tokens/s", against)


def colocated(place: Place) -> Iterator[Row]:
    """Run a random model of Qwen2.5-1.5B's shape whose engine sleeps while the trainer steps."""
    yield from _colocated(place, _QWEN_15B, {})


def colocated_lora(place: Place) -> Iterator[Row]:
    """Run a random model of Qwen2.5-7B's shape with LoRA, whose engine sleeps while the trainer steps."""
    yield from _colocated(place, _QWEN_7B, {"model.lora_rank": place.size(4, 32)})


def _colocated(place: Place, shape: Mapping[str, object], settings: dict[str, object]) -> Iterator[Row]:
    if place.device and importlib.util.find_spec("vllm") is None:
        yield Row("a run with rollout.sleep", "vLLM is not installed here")
        return
    model = place.folder / "model"
    _write(model, place.size(_TINY, shape), place)
    # vLLM sleeps on a card alone.
    engine: dict[str, object] = {"rollout.engine": "benches.sleeping_engine:new_engine"}
    if place.device:
        engine = {"rollout.engine": "vllm", "rollout.cache_bytes": "8GiB"}
    own = {
        **_random_run(place, model), **engine, **settings, "rollout.sleep": "true", "buffer.max_staleness": 0,
        "trainer.max_steps": place.size(4, 6), "daemon.startup_timeout_s": 240,
    }  # fmt: skip
    read_bytes = (lambda _: used_of_card()) if place.device else proportional_bytes
    run, memory = CardRun(place.folder, own), PhaseMemory(place.folder / "run", read_bytes)
    with memory.watched():
        run.to_end()
    yield run.ended()
    terms = run.card_terms
    freed = sum(nbytes for name, nbytes in terms.items() if name.partition(": ")[2] in ENGINE_TERMS) or HELD_BYTES
    yield from rows_of(memory.readings, phases(terms) if terms else {}, before_bytes=run.used_before_bytes, freed=freed)
    for phase, name in (("sleep", "to fall asleep"), ("wake", "to wake, without weights")):
        mean_s = run.seconds_of("rlhfd_engine_sleep_duration_seconds", phase=phase)
        yield Row(
            f"the engine {name}", f"{mean_s:.2f} s" if mean_s is not None else "", failed="" if mean_s else "never"
        )
    yield from run.speeds()
    yield run.books()


def kills(place: Place) -> Iterator[Row]:
    """Run the embedded task undisturbed and with SIGKILL of each role, and so TRL where it is installed."""
    from benches.kills import on_card

    yield from on_card(place.folder, device=place.device, every=place.size(4, 12))


def kills_vllm(place: Place) -> Iterator[Row]:
    """Run the embedded task with rollouts by vLLM, where it is installed, undisturbed and with SIGKILL of each role."""
    from benches.kills import on_card

    if importlib.util.find_spec("vllm") is None:
        yield Row("a run with vLLM", "not installed here")
        return
    yield from on_card(place.folder, device=place.device, every=place.size(4, 12), engine="vllm")


def train(place: Place) -> Iterator[Row]:
    """Take steps on ragged rows and on long ones, packed, on a card with compiled layers too, and padded."""
    import torch

    from benches.packing import ragged
    from benches.sharding import Shape

    vocabulary = place.size(_TINY, _QWEN_05B)["vocab_size"]
    rows = ragged(Shape(0, 0, 0, vocabulary, place.size(16, 128), place.size(*LONGEST_ROW)), seed=0)
    batches = {"": rows, f", rows of {_LONG_ROW[not place.small]:,} tokens": _long_rows(place, vocabulary)}
    steps = _Steps(place)
    yield steps.row("packed", place.model, {"packing": True}, rows)
    for kind, batch in batches.items():
        for how in steps.hows:
            yield steps.row(f"packed, no checkpoints{how}{kind}", place.model, _KEPT, batch)
    yield steps.row("padded", place.model, {"packing": False}, rows)
    steps.forget()
    yield from _head(place, torch.device("cuda:0" if place.device else "cpu"), vocabulary)


def train_large(place: Place) -> Iterator[Row]:
    """Take steps of larger models on long rows, packed, on a card with compiled layers too."""
    steps = _Steps(place)
    for name, shape, rank in (("1.5 B, all weights", _QWEN_15B, 0), ("7 B, LoRA", _QWEN_7B, place.size(4, 32))):
        model, shape = place.folder / f"rank-{rank}", place.size(_TINY, shape)
        _write(model, shape, place)
        for how in steps.hows:
            batch = _long_rows(place, shape["vocab_size"])
            yield steps.row(f"{name}{how}", model, {"packing": True}, batch, {"lora_rank": rank})


_KEPT = {"packing": True, "activation_checkpointing": False}
_LONG_ROW = 96, 16_384
"""Tokens of a long row: of `SMALL=1`, and on a card."""


def _long_rows(place: Place, vocabulary: int) -> Experience:
    import torch

    from benches.sharding import PROMPT_TOKENS, made_up

    mask = torch.ones(8, place.size(*_LONG_ROW), dtype=torch.int64)
    return made_up(mask, PROMPT_TOKENS, vocabulary, torch.Generator())


class _Steps:
    """Takes steps one way after the other, each with a model that is loaded for it.

    Attributes:
        hows: The ways of the layers; packed rows are compiled with the kernel of a card alone.
    """

    def __init__(self, place: Place) -> None:
        import torch

        self.hows = ["", ", compiled"] if place.device else [""]
        self._place, self._first = place, 0.0
        self._device = torch.device("cuda:0" if place.device else "cpu")
        self._peak = _product_operations_per_s(place, self._device)

    def forget(self) -> None:
        """Free the memory of the way before."""
        import torch

        gc.collect()
        if self._place.device:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def row(
        self,
        name: str,
        model: Path,
        way: Mapping[str, object],
        batch: Experience,
        settings: Mapping[str, object] = MappingProxyType({}),
    ) -> Row:
        """Return the row of a way: settings of the trainer, and of the model."""
        import torch

        from benches.sharding import Shape, configured
        from pipeline.models.fused_kernels import fuse
        from pipeline.trainer.learner import Learner
        from pipeline.trainer.process import compile_passes, whole_models

        place, device = self._place, self._device
        assert batch.attention_mask is not None
        tokens, (count, longest) = int(batch.attention_mask.sum()), batch.attention_mask.shape
        shape = Shape(0, 0, 0, 0, count, longest)
        of_model = {"dtype": place.size("float32", "bfloat16"), "compile": "compiled" in name, **settings}
        config = configured(model, shape, of_model=of_model, learning_rate=1e-6, **way)
        self.forget()
        actor = whole_models(config, device)["actor"]
        fuse([actor], device)
        learner = Learner(config.trainer, "grpo", actor, kl_coef=0.01)
        most_tokens = learner.largest_pass(config.lengths.row)
        compile_passes(config, {"actor": actor}, None, device, packed=learner.packs_rows, tokens=most_tokens)
        stats = learner.update([batch])

        def step() -> float:
            return tokens / once(lambda: learner.update([batch]), on_card=bool(place.device))

        found = Sample.of(interleaved({name: step}, place.size(1, 3))[name])
        self._first = self._first or found.median
        # Forward and backward, of weights that are not trained forward and through; without those of attention, and of
        # a layer that is computed again.
        operations = found.median * sum(
            (6 if parameter.requires_grad else 4) * parameter.numel() for parameter in actor.parameters()
        )
        held = f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if place.device else ""
        finite = all(value == value for value in (stats.loss, stats.gradient_norm))
        failed = "" if finite else f"loss {stats.loss}, gradient norm {stats.gradient_norm}"
        if config.model.compile:
            failed = failed or _uncompiled(actor)
        return Row(
            f"a step, {name}",
            f"{found} tokens/s, padding {stats.padding_ratio:.0%}{held}",
            f"{figure(found.median / self._first)} times the first; {operations / 1e12:.3g} TFLOP/s, "
            f"{operations / self._peak:.1%} of a product's",
            failed=failed,
        )


def _uncompiled(model: torch.nn.Module) -> str:
    """Return whether passes of a model's layers were not compiled, in words; empty if all were."""
    from pipeline.models.layer_streaming import decoder_layers

    code = vars(decoder_layers(model)[0]).get("rlhfd_code")
    if code is None:
        return "its layers are not compiled"
    return f"{code.missed} passes of its layers are not compiled" if code.missed else ""


def _product_operations_per_s(place: Place, device: torch.device) -> float:
    """Return the operations a second of a product of two large matrices."""
    import torch

    side, dtype = place.size(256, 8192), place.size(torch.float32, torch.bfloat16)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def work() -> None:
        for _ in range(10):
            torch.mm(one, other)

    return 10 * 2 * side**3 / min(once(work, on_card=bool(place.device)) for _ in range(4))


def _head(place: Place, device: torch.device, vocabulary: int) -> Iterator[Row]:
    """Time log-probs from hidden states, forward and backward, and with each chunk of the head checkpointed."""
    import torch
    from torch import nn

    from pipeline.models.chunked_log_probs import CHUNK_ELEMENTS, head_log_probs

    tokens, hidden = place.size((256, 128), (16_384, _QWEN_05B["hidden_size"]))
    dtype, found = place.size(torch.float32, torch.bfloat16), {}
    labels = torch.randint(vocabulary, (tokens,), device=device)
    for name in ("one backward pass", "each chunk checkpointed"):
        head = nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=dtype)
        if len(found):
            # A hook: the head is called for each chunk, and again in the backward pass.
            head.register_forward_hook(lambda _module, _inputs, output: output)
        states = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)

        def work(head: nn.Linear = head, states: torch.Tensor = states) -> None:
            most = place.size(100, CHUNK_ELEMENTS // vocabulary)
            head_log_probs(head, states, labels, temperature=1.0, chunk_tokens=most)[0].sum().backward()
            head.zero_grad()

        def step(work: Callable[[], None] = work) -> float:
            return 1e3 * once(work, on_card=bool(place.device))

        step()
        if place.device:
            torch.cuda.reset_peak_memory_stats()
        found[name] = Sample.of(interleaved({name: step}, place.size(1, 5))[name])
        peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if place.device else ""
        times = figure(found[name].median / found["one backward pass"].median)
        yield Row(f"head of {tokens:,} tokens, {name}", f"{found[name]} ms{peak}", f"{times} times one backward pass")


def publish(place: Place) -> Iterator[Row]:
    """Publish and fetch weights, against page-locked memory of the card; on a CPU against a plain copy."""
    from benches import pinned, weights

    sections = (pinned if place.device else weights).run(quick=place.small)
    for table in sections[0].tables:
        for first, second, speed, share in table.rows:
            yield Row(f"{first}: {second}", f"{speed} GB/s" if share else speed, share and f"share {share}")


PARTS = {
    "tests": Part(tests, _TESTS_S + 15, is_timed=False, needs_model=False),
    "embedded": Part(embedded, 150.0, is_timed=False, needs_model=False),
    "train": Part(train, 130.0),
    "vllm": Part(vllm, 150.0),
    "transformers": Part(transformers, 110.0),
    "publish": Part(publish, 45.0, needs_model=False),
}
"""In the order of the table: what a run that is killed midway has not measured is of the least use. The first two run
together: 600 s at most."""

KILLS = {"kills": Part(kills, 580.0, needs_model=False), "kills-vllm": Part(kills_vllm, 580.0, needs_model=False)}
SLEEP = {
    "colocated": Part(colocated, 280.0, needs_model=False),
    "colocated-lora": Part(colocated_lora, 300.0, needs_model=False),
}
ALL = {
    **PARTS, **KILLS, **SLEEP,
    "rollouts": Part(rollouts, 300.0, needs_model=False),
    "train-large": Part(train_large, 300.0, needs_model=False),
    "tests-vllm": Part(tests_vllm, _TESTS_VLLM_S + 15, needs_model=False),
}  # fmt: skip
"""Those of `PARTS` run by default."""


def write_model(place: Place) -> Iterator[Row]:
    """Write a random model of Qwen2.5-0.5B's shape with a tokenizer of words, and prompts; no row unless it fails."""
    _write(place.folder, place.size(_TINY, _QWEN_05B), place)
    yield from ()


def _write(folder: Path, shape: Mapping[str, object], place: Place) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**shape, bos_token_id=None, eos_token_id=_EOS, pad_token_id=_PAD, use_cache=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0" if place.device else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    del model
    if place.device:
        # The part may go on with a run that is to have the card for itself.
        torch.cuda.empty_cache()
    _byte_tokenizer().save_pretrained(folder)
    draws = random.Random(0)
    with folder.joinpath("prompts.jsonl").open("w") as file:
        for _ in range(4096):
            prompt = "".join(
                draws.choices(string.ascii_lowercase, k=draws.randint(_PROMPT_TOKENS // 2, _PROMPT_TOKENS))
            )
            file.write(json.dumps({"prompt": prompt}) + "\n")


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of single bytes: with a Qwen2 transformers takes no other class."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters = sorted(ByteLevel.alphabet())
    words = {"<pad>": _PAD, "<|endoftext|>": _EOS} | {letter: 2 + place for place, letter in enumerate(letters)}
    return Qwen2Tokenizer(words, [], pad_token="<pad>", padding_side="left")


def _missing(left: Sequence[str]) -> str:
    return f"not reached: {', '.join(left)}" if left else ""
