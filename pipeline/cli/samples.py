"""`rlhfd samples`: recorded rollouts, filtered and printed on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import unicodedata
from collections.abc import Iterator
from typing import Final

import click
import msgspec

from pipeline.telemetry.samples import Sample, SampledResponse, SampleReader

_UP: Final = (153, 75, 33)
_DOWN: Final = (223, 215, 208)
_LARGE: Final = (0.5, 1.0)
_POLL_S: Final = 0.5
_SIGNS: Final = {"\n": "⏎", "\t": "→"}


@dataclasses.dataclass(frozen=True)
class Filter:
    """Conditions that samples must meet; None and the empty text are no condition.

    Attributes:
        min_reward: Least reward of the best response.
        max_reward: Largest reward of the worst response.
        text: Part of prompt, answer or a response, regardless of case.
        worker: Number of the worker.
    """

    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    worker: int | None = None

    def matches(self, sample: Sample) -> bool:
        """Return whether a sample meets all conditions."""
        rewards = [response.reward for response in sample.responses]
        if self.worker is not None and sample.worker != self.worker:
            return False
        if self.min_reward is not None and max(rewards, default=-1e308) < self.min_reward:
            return False
        if self.max_reward is not None and min(rewards, default=1e308) > self.max_reward:
            return False
        texts = [sample.prompt, sample.answer, *("".join(response.pieces) for response in sample.responses)]
        return any(self.text.lower() in text.lower() for text in texts)


def show(reader: SampleReader, chosen: Filter, *, last: int, follow: bool, as_json: bool) -> None:
    """Print samples, the newest last.

    Args:
        reader: Reader of the recorded samples.
        chosen: Conditions of the samples to print.
        last: Number of present samples to print, the newest.
        follow: Whether to wait for more until Ctrl-C.
        as_json: Whether to print one JSON object a line, in place of text.
    """
    found = [sample for sample in reader.read() if chosen.matches(sample)]
    found = found[len(found) - min(last, len(found)) :]
    if not found and not follow:
        click.echo("no rollouts are recorded (samples.per_minute), or none matches", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for sample in found:
                click.echo(msgspec.json.encode(sample) if as_json else f"{render(sample)}\n")
            if not follow:
                return
            time.sleep(_POLL_S)
            found = [sample for sample in reader.read() if chosen.matches(sample)]


def render(sample: Sample) -> str:
    """Return a sample as lines: its origin, the prompt, then its responses, the best first."""
    rewards = [response.reward for response in sample.responses]
    facts = [
        time.strftime("%H:%M:%S", time.localtime(sample.unix_s)),
        f"worker {sample.worker}",
        f"ticket {sample.ticket}",
        f"version {sample.policy_version}",
        *([f"mean reward {sum(rewards) / len(rewards):.3g}"] if len(rewards) > 1 else []),
        *([f"{len(rewards)} of {sample.group_size} responses"] if len(rewards) < sample.group_size else []),
    ]
    answer = f"   answer {visible(sample.answer)}" if sample.answer else ""
    lines = [click.style("  ".join(facts), dim=True), f"  {click.style(visible(sample.prompt), bold=True)}{answer}"]
    for response in sorted(sample.responses, key=lambda response: -response.reward):
        lines += _response(response)
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return a text with a visible sign for each control or invisible character."""
    return "".join(_sign(character) for character in text)


def _sign(character: str) -> str:
    # Cc and Cf: control characters, and those that change the writing direction.
    if unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp"):
        return character
    return _SIGNS.get(character) or (
        chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\N{REPLACEMENT CHARACTER}"
    )


def _response(response: SampledResponse) -> Iterator[str]:
    whole = len(response.advantages) == 1
    advantage = sum(response.advantages) / max(1, len(response.advantages))
    text = "".join(
        _observed(response.pieces[start:end])
        if is_observed
        else "".join(
            _coloured(visible(piece), advantage if whole else response.advantages[at])
            for at, piece in enumerate(response.pieces[start:end], start)
        )
        for is_observed, start, end in _stretches(response)
    )
    notes = "" if response.stopped else click.style("  cut at the limit", dim=True)
    if response.stop:
        notes += click.style(f"  ended with {response.stop!r}", dim=True)
    if len(response.pieces) < response.tokens:
        notes += click.style(f"  the first {len(response.pieces)} of {response.tokens} tokens", dim=True)
    yield f"  {response.reward:>8.4g}  {advantage:>+6.2f}  {text}{notes}"
    if len(response.parts) > 1:
        parts = ", ".join(f"{name.rpartition(':')[2]} {value:.4g}" for name, value in response.parts.items())
        yield click.style(f"{'':20}{parts}", dim=True)
    if response.numbers:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in response.numbers.items())
        yield click.style(f"{'':20}{numbers}", dim=True)


def _stretches(response: SampledResponse) -> Iterator[tuple[bool, int, int]]:
    """Yield the stretches of tokens of the model and of the environment: whether they are the latter's, first, end."""
    start = 0
    for is_observed, tokens in itertools.groupby(response.observed or [False] * len(response.pieces)):
        end = start + len(list(tokens))
        yield is_observed, start, end
        start = end


def _observed(texts: list[str]) -> str:
    return click.style(
        f"\N{MATHEMATICAL LEFT ANGLE BRACKET}{visible(''.join(texts))}\N{MATHEMATICAL RIGHT ANGLE BRACKET}", dim=True
    )


def _coloured(text: str, value: float) -> str:
    if not value:
        return text
    depth = sum(abs(value) > large for large in _LARGE)
    return click.style(text, fg=(_UP if value > 0 else _DOWN)[depth])
