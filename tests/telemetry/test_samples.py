"""Rollouts kept for people: whole or not shown, bounded, private, and what they show is what was sampled."""

from __future__ import annotations

import itertools
import json
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli.samples import Filter, render, visible
from pipeline.config.schema import Config
from pipeline.experience.ragged import RaggedRows
from pipeline.rollout.roller import Rolled, RolledPrompt
from pipeline.rollout.sample_recorder import RolloutSamples, pieces
from pipeline.runtime.messages import Ticket
from pipeline.runtime.run_folder import RunNote, write_note
from pipeline.telemetry.samples import Sample, SampledResponse, SampleReader, SampleWriter
from tests.support.daemon import PROGRAM, clean_environment, wait_until
from tests.support.experiences import made_up

MOST_BYTES = 1 << 16


def sample(number: int = 0, worker: int = 0, prompt: str = "7302>", rewards: tuple[float, ...] = (1.0, 0.0)) -> Sample:
    responses = [
        SampledResponse(["02", "37"], [-0.5, -0.25], [0.1, -0.1], [1.0], 2, True, reward, {"m:f": reward})
        for reward in rewards
    ]
    return Sample(float(number), worker, number, number, 3, prompt, 5, '"0237"', len(rewards), responses)


def kept(folder: Path, count: int, worker: int = 0, **fields: Any) -> None:
    writer = SampleWriter(folder, worker, MOST_BYTES)
    for number in range(count):
        assert writer.write(sample(number, worker, **fields))
    writer.close()


def test_what_is_kept_is_read_again_and_by_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    kept(folder, 3)

    found = SampleReader(folder).read()

    assert found == [sample(0), sample(1), sample(2)]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


def test_no_folder_is_no_samples(tmp_path: Path) -> None:
    assert SampleReader(tmp_path / "nowhere").read() == []


@pytest.mark.parametrize("cut", [1, 15, 16, 17, -1])
def test_a_torn_record_is_not_shown_and_cut_off_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    kept(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    kept(tmp_path, 1)
    grown = path.read_bytes()
    path.write_bytes(grown[: len(whole) + cut] if cut > 0 else grown[:cut])
    reader = SampleReader(tmp_path)

    before = [one.ticket for one in reader.read()]
    kept(tmp_path, 1)
    after = [one.ticket for one in reader.read()]

    assert (before, after) == ([0, 1], [0])
    assert path.read_bytes() == grown


def test_a_damaged_record_ends_what_is_shown_and_what_is_behind_it_never_comes_back(tmp_path: Path) -> None:
    kept(tmp_path, 3)
    (path,) = tmp_path.iterdir()
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)

    assert [one.ticket for one in SampleReader(tmp_path).read()] == [0]
    kept(tmp_path, 1)
    assert [one.ticket for one in SampleReader(tmp_path).read()] == [0, 0]


def test_a_file_of_anything_is_no_samples(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.samples").write_bytes(random.Random(1).randbytes(5000))
    (tmp_path / "rollout-1.samples").symlink_to("/etc/passwd")
    reader = SampleReader(tmp_path)

    assert reader.read() == []
    kept(tmp_path, 1)
    assert [one.ticket for one in reader.read()] == [0]


def test_both_files_together_stay_below_the_bound_and_the_newest_are_there(tmp_path: Path) -> None:
    kept(tmp_path, 900)

    found = [one.ticket for one in SampleReader(tmp_path).read()]

    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert nbytes <= MOST_BYTES
    assert len(list(tmp_path.iterdir())) == 2
    # The older file has half of the room but for one sample.
    assert found == list(range(900 - len(found), 900)) and nbytes * (len(found) + 1) / len(found) >= MOST_BYTES / 2


def test_a_sample_that_is_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, 0, MOST_BYTES)

    assert not writer.write(sample(prompt="x" * MOST_BYTES))
    assert writer.write(sample())
    writer.close()


def test_samples_go_to_a_new_file_where_another_program_has_moved_or_removed_it(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    writer = SampleWriter(folder, 0, MOST_BYTES)
    assert writer.write(sample(0))

    folder.rename(tmp_path / "moved")
    assert writer.write(sample(1)) and writer.write(sample(2))
    writer.close()

    assert SampleReader(folder).read() == [sample(1), sample(2)]


def test_a_writer_that_could_open_no_file_writes_again_once_it_can(tmp_path: Path) -> None:
    writer, numbers = SampleWriter(tmp_path, 0, MOST_BYTES), itertools.count()
    while not (tmp_path / "rollout-0.samples.1").exists():
        assert writer.write(sample(next(numbers)))
    for _ in range(len(SampleReader(tmp_path).read()) - 2):
        assert writer.write(sample(next(numbers)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    # The file is full: the next sample needs another one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            writer.write(sample(next(numbers)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    last = sample(next(numbers))
    assert writer.write(last)
    writer.close()

    assert SampleReader(tmp_path).read()[-1] == last


def test_a_reader_that_follows_gets_each_sample_once_however_often_files_are_turned(tmp_path: Path) -> None:
    writers = [SampleWriter(tmp_path, worker, MOST_BYTES) for worker in range(2)]
    reader, rng, found = SampleReader(tmp_path), random.Random(0), []

    for number in range(1500):
        writers[number % 2].write(sample(number, number % 2))
        if rng.random() < 0.1:
            found += reader.read()
    found += reader.read()
    for writer in writers:
        writer.close()

    assert [one.ticket for one in found] == list(range(1500))


def test_of_many_only_the_newest_are_read_at_first_and_all_that_come_after(tmp_path: Path) -> None:
    kept(tmp_path, 50)
    reader = SampleReader(tmp_path, newest=4)

    first = [one.ticket for one in reader.read()]
    kept(tmp_path, 6)

    assert first == [46, 47, 48, 49]
    assert [one.ticket for one in reader.read()] == [0, 1, 2, 3, 4, 5]


def test_a_writer_killed_at_any_moment_leaves_whole_records_only(tmp_path: Path) -> None:
    program = (
        "import itertools, pathlib, sys; from pipeline.telemetry.samples import Sample, SampleWriter\n"
        f"writer = SampleWriter(pathlib.Path({str(tmp_path)!r}), 0, {MOST_BYTES})\n"
        "for number in itertools.count(int(sys.argv[1])): writer.write(\n"
        "    Sample(float(number), 0, number, 0, 0, 'x' * (number % 3000), 0, '', 1, []))\n"
    )
    found = [-1]
    for _ in range(2):
        # The second one goes on behind what the first has left, which may still be there at its end.
        command = [sys.executable, "-c", program, str(found[-1] + 1)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
            wait_until(lambda: (tmp_path / "rollout-0.samples.1").exists(), 60.0, "a file was turned")
            process.send_signal(signal.SIGKILL)

        found = [one.ticket for one in SampleReader(tmp_path).read()]
        assert found and found == list(range(found[0], found[-1] + 1))
        (tmp_path / "rollout-0.samples.1").unlink()


# The samples that a worker keeps.


class Letters:
    """A tokenizer of bytes: a character may be several tokens."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode(errors="replace")


def worker_samples(tmp_path: Path, clock: Any, **changes: Any) -> RolloutSamples:
    settings = {"group_size": 2, "per_minute": 6.0, **changes}
    return RolloutSamples(SampleWriter(tmp_path, 4, 1 << 20), Letters(), worker=4, clock=clock, **settings)


def keep(
    samples: RolloutSamples, experience: Any, answers: list[Any], *, ticket: int = 0, left_out: tuple[int, ...] = ()
) -> None:
    """Pass the rows of a ticket whose prompts have these answers, without those of prompts that are left out."""
    stopped = torch.tensor([True, False] * (len(experience.sequences) // 2))
    rows = RaggedRows.of(experience).with_info("cut", ~stopped.numpy())
    prompts = [RolledPrompt(10 + at, answer) for at, answer in enumerate(answers) if at not in left_out]
    samples.sealed(Ticket(0, ticket, 10, len(answers), 1, 0, 0, 0, 0.0), Rolled(rows, 0, prompts=prompts), 3)


@pytest.mark.parametrize("ppo", [True, False])
def test_a_sample_holds_the_very_values_of_its_rows(tmp_path: Path, ppo: bool) -> None:
    parts = {"m:exact": ("exact", 2.0), "m:short": ("short", 1.0)}
    samples, experience = worker_samples(tmp_path, lambda: 0.0, parts=parts), made_up(rows=6, ppo=ppo)
    experience.info["reward.exact"] = torch.arange(6.0)
    experience.info["reward.short"] = torch.full((6,), 0.1)

    keep(samples, experience, ["a", "b", None])
    samples.closing()

    (one,) = SampleReader(tmp_path).read()
    first = (one.position - 10) * 2
    assert (one.worker, one.policy_version, one.group_size) == (4, 3, 2)
    assert one.answer == ['"a"', '"b"', ""][first // 2]
    assert [response.stopped for response in one.responses] == [True, False]
    for row, response in enumerate(one.responses, first):
        mask = experience.action_mask[row]
        ids = experience.sequences[row, 5:][mask]
        prompt = experience.sequences[row, :5][experience.attention_mask[row, :5] != 0]
        ratios = (experience.action_log_probs - experience.base_action_log_probs)[row][mask]
        advantages = experience.advantages[row][mask] if ppo else experience.advantages[row : row + 1]
        assert "".join(response.pieces) == bytes(ids.tolist()).decode()
        assert one.prompt == bytes(prompt.tolist()).decode() or row > first
        assert response.tokens == len(response.pieces) == int(mask.sum())
        assert response.log_probs == pytest.approx(experience.action_log_probs[row][mask].tolist(), abs=6e-5)
        assert response.log_ratios == pytest.approx(ratios.tolist(), abs=6e-5)
        assert response.advantages == pytest.approx(advantages.tolist(), abs=6e-5)
        assert response.reward == pytest.approx(float(experience.info["score"][row]), abs=1e-6)
        assert response.parts == {"m:exact": 2.0 * row, "m:short": 0.1}


def test_groups_that_errored_are_left_out_of_answers_as_of_the_experience(tmp_path: Path) -> None:
    samples, experience = worker_samples(tmp_path, lambda: 0.0, only="m:exact"), made_up(rows=4, ppo=False)
    experience.info["score"] = torch.arange(4.0)

    keep(samples, experience, ["a", "errored", "c"], left_out=(1,))
    samples.closing()

    (one,) = SampleReader(tmp_path).read()
    exact = [response.parts["m:exact"] for response in one.responses]
    assert (one.answer, one.position, exact) in [('"a"', 10, [0.0, 1.0]), ('"c"', 12, [2.0, 3.0])]


def test_each_reward_model_has_its_weighted_part_and_the_environment_the_rest(tmp_path: Path) -> None:
    parts = {"m:exact": ("exact", 1.0), "helpful": ("helpful", 0.5), "harmless": ("harmless", -2.0)}
    samples, experience = worker_samples(tmp_path, lambda: 0.0, parts=parts, has_turns=True), made_up(rows=2)
    experience.info["score"] = torch.tensor([1.25, 3.0])
    experience.info["reward.exact"] = torch.tensor([1.0, 0.0])
    experience.info["reward.helpful"] = torch.tensor([0.5, 4.0])
    experience.info["reward.harmless"] = torch.tensor([0.125, -0.5])

    keep(samples, experience, [None])
    samples.closing()

    (one,) = SampleReader(tmp_path).read()
    assert [response.parts for response in one.responses] == [
        {"m:exact": 1.0, "helpful": 0.25, "harmless": -0.25, "environment": 0.25},
        {"m:exact": 0.0, "helpful": 2.0, "harmless": 1.0, "environment": 0.0},
    ]  # fmt: skip


def test_so_many_a_minute_are_kept_and_fewer_where_it_takes_long(tmp_path: Path) -> None:
    class Clock:
        now_s, step_s = 0.0, 0.0

        def __call__(self) -> float:
            self.now_s += self.step_s
            return self.now_s

    clock = Clock()
    samples = worker_samples(tmp_path, clock)

    def tickets(seconds: int) -> int:
        before = len(SampleReader(tmp_path).read())
        for _ in range(seconds):
            clock.now_s += 1.0
            keep(samples, made_up(rows=2, ppo=False), [None])
        return len(SampleReader(tmp_path).read()) - before

    assert tickets(60) == 6
    # A look at the clock takes 0.1 s now, and so does a sample: 20 s have to pass until that is a two-hundredth.
    clock.step_s = 0.1
    assert 30 <= tickets(600) <= 34
    samples.closing()


def test_nothing_is_kept_where_none_are_asked_for_or_nothing_can_be_written(tmp_path: Path) -> None:
    off = Config.model_validate({"daemon": {"state_dir": tmp_path}, "samples": {"per_minute": 0.0}})
    (tmp_path / "file").touch()
    nowhere = Config.model_validate({"daemon": {"state_dir": tmp_path / "file"}})

    assert RolloutSamples.of(off, Letters(), 0) is None
    assert RolloutSamples.of(nowhere, Letters(), 0) is None
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_of_a_group_too_large_for_a_workers_file_some_responses_are_kept(tmp_path: Path, caplog: Any) -> None:
    experience = made_up(rows=8)

    def kept_in(name: str, most_bytes: int) -> list[Sample]:
        samples = worker_samples(tmp_path, lambda: 0.0, group_size=8)
        samples.writer.close()
        # Each of the two files of a worker has half of its bytes.
        samples.writer = SampleWriter(tmp_path / name, 4, 2 * most_bytes)
        keep(samples, experience, [None])
        samples.closing()
        return SampleReader(tmp_path / name).read()

    (whole,) = kept_in("whole", 1 << 20)
    (part,) = kept_in("part", (tmp_path / "whole" / "rollout-4.samples").stat().st_size - 1)

    assert (len(whole.responses), len(part.responses), part.group_size) == (8, 4, 8)
    assert not caplog.messages
    assert kept_in("none", 1) == [] and caplog.messages == ["sample too large: ticket=0"]


def test_a_sample_that_is_written_in_part_is_taken_back_and_costs_nothing_else(tmp_path: Path, caplog: Any) -> None:
    minutes = itertools.count()
    samples = worker_samples(tmp_path, lambda: 60.0 * next(minutes))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    # A full disk, as the kernel shows it: some of the bytes are written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        for _ in range(3):
            keep(samples, made_up(rows=2), [None])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    samples.closing()

    assert "samples are not kept: ticket=0 error=[Errno 27] File too large" in caplog.text
    assert caplog.text.count("not kept") == 1, "once: a disk may be full for days"
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=12))
def test_pieces_are_the_text_cut_at_characters(text: str) -> None:
    ids = list(text.encode())

    found = pieces(lambda some: bytes(some).decode(errors="replace"), ids)

    if "\ufffd" not in text:
        assert len(found) == len(ids)
        assert "".join(found) == text
        assert [piece for piece in found if piece] == list(text)


def test_a_long_run_of_one_token_of_a_prompt_is_counted(tmp_path: Path) -> None:
    samples, experience = worker_samples(tmp_path, lambda: 0.0), made_up(rows=2, prompt=40)
    experience.attention_mask[:, :40] = 1
    experience.sequences[:, :40] = torch.tensor([*b"ab", *(b"#" * 37), *b"c"])

    keep(samples, experience, [None])
    samples.closing()

    (one,) = SampleReader(tmp_path).read()
    assert (one.prompt, one.prompt_tokens) == ("ab# \u00d737 c", 40)


def test_parts_are_named_by_function_and_model(tmp_path: Path) -> None:
    of_models = [{"name": "model", "path": "r"}, {"name": "model", "path": "s", "label": "kind", "weight": 0.25}]

    def names(model: str | None = None, **sections: Any) -> tuple[dict[str, tuple[str, float]], str, bool]:
        sections["daemon"] = {"state_dir": tmp_path}
        samples = RolloutSamples.of(Config.model_validate({"model": {"reward": model}, **sections}), Letters(), 0)
        assert samples is not None
        samples.closing()
        return dict(samples.parts), samples.only, samples.has_turns

    exact = "pipeline.sort_digits:exact_answer"
    model = {"model": ("model", 1.0)}
    assert names() == ({}, exact, False)
    assert names("models/r") == ({exact: ("exact_answer", 1.0), **model}, "", False)
    assert names("models/r", rewards=[]) == names(rewards=of_models[1:]) == ({}, "", False)
    assert names("models/r", rewards=[], rollout={"environment": "a:B"}) == (model, "", True)
    assert names(rewards=[], rollout={"environment": "a:B"}) == ({}, "", True)
    assert names(rewards=[*of_models, "length"]) == (
        {"length": ("length", 1.0), **model, "kind": ("kind", 0.25)},
        "",
        False,
    )
    twice = [{"name": "regex", "pattern": "a", "weight": 2.0}, {"name": "regex", "pattern": "b"}]
    assert names(rewards=twice) == ({"regex": ("regex", 2.0), "regex-2": ("regex-2", 1.0)}, "", False)


# How they look.


@pytest.mark.parametrize(
    ("wanted", "tickets"),
    [
        (Filter(), [0, 1, 2]),
        (Filter(min_reward=1.0), [0, 2]),
        (Filter(max_reward=0.0), [0, 1]),
        (Filter(text="ABC"), [1]),
        (Filter(text="0237"), [0, 1, 2]),
        (Filter(worker=1), [2]),
        (Filter(min_reward=2.0), []),
    ],
)
def test_a_filter_takes_what_it_says(wanted: Filter, tickets: list[int]) -> None:
    all_of_them = [sample(0), sample(1, prompt="xabcx", rewards=(0.0, 0.5)), sample(2, worker=1, rewards=(1.0, 1.0))]

    assert [one.ticket for one in all_of_them if wanted.matches(one)] == tickets


def test_a_sample_reads_as_prompt_and_responses_the_best_first() -> None:
    lines = click.unstyle(render(sample(7, rewards=(0.0, 1.0)))).splitlines()

    assert lines[0].endswith("worker 0  ticket 7  version 3  mean reward 0.5")
    assert lines[1:] == ['  7302>   answer "0237"', "         1   +1.00  0237", "         0   +1.00  0237"]


def test_a_sample_tells_of_responses_that_were_cut_or_have_no_result_and_of_the_parts_of_rewards() -> None:
    one = sample(rewards=(0.5,))
    cut = msgspec.structs.replace(one.responses[0], stopped=False, parts={"a:form": 0.0, "a:answer": 1.0})

    lines = click.unstyle(render(msgspec.structs.replace(one, group_size=4, responses=[cut]))).splitlines()

    assert lines[0].endswith("version 3  1 of 4 responses")
    assert lines[-2].endswith("0237  cut at the limit")
    assert lines[-1].strip() == "form 0, answer 1"


def test_samples_of_a_folder_that_could_not_be_read_for_a_time_come_once(tmp_path: Path) -> None:
    folder, aside = tmp_path / "samples", tmp_path / "aside"
    kept(folder, 3)
    reader = SampleReader(folder)
    assert len(reader.read()) == 3

    # As of a file system that answers each call with EACCES.
    folder.rename(aside)
    assert reader.read() == []
    aside.rename(folder)
    kept(folder, 1)

    assert [one.ticket for one in reader.read()] == [0]


def test_nothing_in_a_text_reaches_the_terminal_as_a_command() -> None:
    told = click.unstyle(render(sample(prompt="\x1b[2J\x1b]0;owned\x07\r\u202egnp\x9b5m")))

    assert visible("a\nb\t\x1b\x7f\u202e") == "a⏎b→␛\ufffd\ufffd"
    assert not [character for character in told if ord(character) < 32 and character != "\n"]
    assert "\x9b" not in told and "\u202e" not in told


def test_rlhfd_samples_follows_without_a_daemon_until_it_is_interrupted(tmp_path: Path) -> None:
    folders = {"RLHFD_DAEMON__STATE_DIR": str(tmp_path), "RLHFD_DAEMON__RUNTIME_DIR": str(tmp_path / "run")}
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    write_note(folder, RunNote("mine", "", 0.0, 0.0, "grpo", "model", {}))
    kept(folder / "samples", 3)
    command = [str(PROGRAM), "samples", "--json", "--follow", "--last", "1", "--min-reward", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment() | folders, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = json.loads(process.stdout.readline())
        kept(folder / "samples", 1, rewards=(0.5,))
        kept(folder / "samples", 1, worker=1)
        second = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()

    assert (first["ticket"], second["worker"], second["responses"][0]["reward"]) == (2, 1, 1.0)
    assert (rest, errors, process.returncode) == (b"", b"", 0)
