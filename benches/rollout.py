"""Rollouts end to end, `NaiveExperienceMaker.make_experience`, against the other ways to the same experience.

All take the most probable token, so that results can be compared: tokens must be equal, log-probs equal to 1e-5.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benches import rollout_card
from benches import rollout_peers as peers
from benches.measure import Sample, end_process, interleaved
from benches.peers import TRL, NotInstallableError, python_of
from benches.report import Section, Table
from benches.rollout_peers import EOS, PAD, Made, Work
from pipeline.experience.advantages import group_advantages
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import ResponseGenerator, Responses
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import NaiveExperienceMaker

_OURS, _GENERATE, _COATI, _TRL = "rlhfd", "transformers generate", "coati's design", "TRL"
_TEXT = """GRPO with a KL to a reference model, {parameters} parameters in float32, vocabulary {vocabulary:,}.
Threads: {threads}. Responses, rewards, log-probs of actor and reference, advantages. *{ours}* is the daemon's path: a
key-value cache with room, each prompt encoded once, finished rows leave the batch, the sampler's own log-probs.
*{generate}* replaces the engine behind the same interface, and our chunked function computes log-probs. *{coati}* is
written from its description. *{trl}* is `GRPOTrainer._generate_and_score_completions` of {package}, which computes no
log-probs of the actor on fresh experience. Rounds: {rounds}; coati's design has one, beside one more of ours. In every
round tokens were equal and log-probs agreed to 1e-5. A figure is the time of the other way divided by ours, end to end,
then for sampling alone. {note}"""


def run(*, quick: bool) -> Sequence[Section]:
    """Compare the ways on some shapes of work."""
    hidden, layers, vocabulary = (64, 2, 500) if quick else (256, 8, 8000)
    works = [Work(2, 16, 4, 16)] if quick else [Work(4, 64, 2, 64), Work(8, 64, 4, 32), Work(8, 64, 4, 128, False)]
    found = [compared("rollout", (hidden, layers, vocabulary), works, rounds=1 if quick else 3, with_trl=not quick)]
    return [*found, rollout_card.section(quick=quick)] if torch.cuda.is_available() else found


def compared(
    name: str,
    size: tuple[int, int, int],
    works: Sequence[Work],
    *,
    rounds: int,
    with_trl: bool,
    eos_strength: float = 2.6,
    threads: int = 1,
) -> Section:
    """Compare the ways on some shapes of work.

    Args:
        name: Name of the section.
        size: Hidden size, layers and vocabulary of the model.
        works: The shapes.
        rounds: Turns of each way; coati's design has one.
        with_trl: Whether TRL takes part.
        eos_strength: Scale of the probability that a response ends early; see `benches.rollout_peers.model`.
        threads: Threads of each way.
    """
    torch.set_num_threads(threads)
    hidden, layers, vocabulary = size
    actor = peers.model(hidden, layers, vocabulary, seed=0, eos_strength=eos_strength)
    # A separate model equal to the actor, as in TRL.
    reference = peers.model(hidden, layers, vocabulary, seed=0, eos_strength=eos_strength)
    note, rows = "", []
    for work in works:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            ways: dict[str, Callable[[], Made]] = {
                _OURS: lambda work=work: ours(actor, reference, work, vocabulary),
                _GENERATE: lambda work=work: ours(actor, reference, work, vocabulary, plain=True),
            }
            slow: dict[str, Callable[[], Made]] = {}
            if work.with_coati:
                slow[_COATI] = lambda work=work: coati(actor, reference, work, vocabulary)
            if with_trl:
                try:
                    turn = stack.enter_context(trl(actor, work, vocabulary, Path(folder), threads))
                    ways[_TRL] = turn
                except (NotInstallableError, OSError, RuntimeError) as error:
                    note = f"TRL could not be measured here: {error}"
            for way_name, way in ways.items():
                if way_name == _TRL or work is works[0]:
                    way()
            made = interleaved(ways, rounds, report=_report)
            beside = interleaved({_OURS: ways[_OURS], **slow}, 1, report=_report) if slow else {}
        for found in (made, beside):
            if found:
                check(found)
        rows.append(_row(work, made, beside))
    parameters = f"{sum(weight.numel() for weight in actor.parameters()) / 1e6:.1f} M"
    header = (
        "rollout of", "tokens", "rlhfd, s", "x generate", "x TRL", "x coati",
        "its generation, s", "x generate", "x coati",
    )  # fmt: skip
    text = _TEXT.format(
        parameters=parameters, vocabulary=vocabulary, rounds=rounds, threads=threads, ours=_OURS,
        generate=_GENERATE, coati=_COATI, trl=_TRL, package=TRL.packages[0], note=note,
    )  # fmt: skip
    return Section(name, "Rollouts end to end at equal results", " ".join(text.split()), [Table(header, rows)])


def _row(work: Work, made: dict[str, list[Made]], beside: dict[str, list[Made]]) -> tuple[str, ...]:
    def seconds(found: dict[str, list[Made]], way: str) -> Sample:
        return Sample.of(one.seconds for one in found[way])

    def sampling(found: dict[str, list[Made]], way: str) -> Sample:
        return Sample.of(one.generation_s for one in found[way])

    def ratio(way: str, of: Callable[[dict[str, list[Made]], str], Sample] = seconds) -> str:
        found = beside if way in beside else made
        return str(of(found, way).over(of(found, _OURS))) if way in found else "not run"

    lengths = made[_OURS][0].lengths
    label = f"{work.prompts} prompts x {work.group_size}, up to {work.prompt_tokens} + {work.new_tokens} tokens"
    tokens = f"{int(lengths.sum()):,}, {int(lengths.min())} to {int(lengths.max())} a response"
    whole = (str(seconds(made, _OURS)), *map(ratio, (_GENERATE, _TRL, _COATI)))
    return (label, tokens, *whole, str(sampling(made, _OURS)), ratio(_GENERATE, sampling), ratio(_COATI, sampling))


def _report(line: str) -> None:
    print(line.partition(", tokens")[0], file=sys.stderr, flush=True)


def check(made: dict[str, list[Made]]) -> None:
    """Compare all results with ours.

    Raises:
        RuntimeError: If a way made other tokens, or log-probs that differ by more than rounding.
    """
    expected = made[_OURS][0]
    mask = torch.arange(expected.tokens.shape[1]) < expected.lengths.unsqueeze(1)
    for way, turns in made.items():
        for one in turns:
            if not torch.equal(one.lengths, expected.lengths) or not torch.equal(
                one.tokens[mask], expected.tokens[mask]
            ):
                raise RuntimeError(f"{way} made other tokens")
            for name in ("log_probs", "base_log_probs"):
                theirs, mine = getattr(one, name), getattr(expected, name)
                if theirs is not None and (off := float((theirs - mine)[mask].abs().max())) > 1e-5:
                    raise RuntimeError(f"{way}: {name} are off by {off:g}")


class _Timed:
    """An engine with the total time of its sampling."""

    def __init__(self, engine: ResponseGenerator) -> None:
        self._engine = engine
        self.seconds = 0.0

    def generate(self, *arguments: Any, **keywords: Any) -> Responses:
        began_s = time.perf_counter()
        try:
            return self._engine.generate(*arguments, **keywords)
        finally:
            self.seconds += time.perf_counter() - began_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def ours(
    actor: LlamaForCausalLM, reference: LlamaForCausalLM, work: Work, vocabulary: int, *, plain: bool = False
) -> Made:
    """Make experience as a worker of the daemon does, or with transformers' own ``generate`` as the engine."""
    input_ids, mask = work.inputs(vocabulary)
    engine = _Timed(ActorGenerator(actor) if plain else TransformersGenerator(actor))
    maker = NaiveExperienceMaker(
        actor,
        None,
        _score,
        reference,
        SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        use_grpo=True,
        num_generation=work.group_size,
        logits_forward_batch_size=16,
        reuse_sampling_log_probs=not plain,
        generator=engine,
    )
    began_s = time.perf_counter()
    made = maker.make_experience(input_ids, mask, max_length=work.prompt_tokens + work.new_tokens, do_sample=False)
    seconds = time.perf_counter() - began_s
    assert made.action_mask is not None
    assert made.base_action_log_probs is not None
    return Made(
        seconds,
        made.sequences[:, work.prompt_tokens :],
        made.action_mask.sum(dim=1),
        made.base_action_log_probs,
        made.action_log_probs,
        engine.seconds,
    )


def coati(actor: LlamaForCausalLM, reference: LlamaForCausalLM, work: Work, vocabulary: int) -> Made:
    """Make the same in coati's way."""
    input_ids, mask = (tensor.repeat_interleave(work.group_size, dim=0) for tensor in work.inputs(vocabulary))
    began_s = time.perf_counter()
    tokens = peers.coati_generate(actor, input_ids, mask, work.new_tokens)
    generation_s = time.perf_counter() - began_s
    lengths = peers.lengths_of(tokens)
    actions = torch.arange(work.new_tokens) < lengths.unsqueeze(1)
    sequences, whole = torch.cat([input_ids, tokens], dim=1), torch.cat([mask, actions.long()], dim=1)
    log_probs, base_log_probs = (
        peers.all_logits_log_probs(model, sequences, whole, work.new_tokens) for model in (actor, reference)
    )
    scores = lengths.float()
    kl = ((log_probs - base_log_probs) * actions * -0.01).sum(dim=1) / lengths
    group_advantages(scores + kl, work.group_size)
    return Made(time.perf_counter() - began_s, tokens, lengths, base_log_probs, log_probs, generation_s)


@contextlib.contextmanager
def trl(
    actor: LlamaForCausalLM, work: Work, vocabulary: int, folder: Path, threads: int
) -> Iterator[Callable[[], Made]]:
    """Start TRL, installed on first use beside this environment and with its torch and transformers.

    Raises:
        NotInstallableError, OSError: If it cannot be installed or started.
    """
    python = python_of(TRL)
    actor.save_pretrained(folder / "actor")
    peers.tokenizer(vocabulary).save_pretrained(folder / "actor")
    input_ids, mask = work.inputs(vocabulary)
    settings = {
        "folder": str(folder),
        "threads": threads,
        "rows": work.rows,
        "group_size": work.group_size,
        "new_tokens": work.new_tokens,
        "prompts": peers.texts(input_ids, mask),
    }
    script = Path(__file__).with_name("rollout_trl.py")
    command = [python, script, json.dumps(settings)]
    with (folder / "trl.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def turn() -> Made:
            print("go", file=asks, flush=True)
            while (line := answers.readline()) and line != "DONE\n":
                pass
            if not line:
                raise RuntimeError(f"TRL ended: {(folder / 'trl.log').read_text()[-500:]}")
            found = torch.load(folder / "turn.pt", weights_only=True)
            missing = work.new_tokens - found["tokens"].shape[1]
            pad = torch.nn.functional.pad
            lengths = found["mask"].sum(dim=1)
            return Made(
                found["seconds"],
                pad(found["tokens"], (0, missing)),
                lengths,
                pad(found["base_log_probs"], (0, missing)),
            )

        try:
            yield turn
        finally:
            asks.close()
            end_process(process, 10.0)
            answers.close()


def _score(*, response_start: torch.Tensor, response_end: torch.Tensor, **_row: Any) -> torch.Tensor:
    return (response_end - response_start).float()
