"""`rlhfd record` and `rlhfd replay` without a recording, and with options that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.errors import FieldError
from pipeline.storage import sealed_json
from pipeline.storage.recording import Origin, RecordedBatch, RecordLine, Taken


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --step N or --rows"),
        (["--step", "3", "--rows"], "give either --step N or --rows"),
        (["--step", "3", "--set", "trainer.learning_rate=1"], "--set needs --rows"),
        (["--rows", "--debug"], "--debug needs --step"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["replay", *words])

    assert result.exit_code == 2 and message in result.output


def test_a_run_without_a_recording_is_told_the_key_that_keeps_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["record", "--run", f"{tmp_path}/"])

    assert result.exit_code == 78
    assert 'trainer.record = "rows" or "steps" keeps one' in result.output


def test_the_list_shows_what_each_step_was_made_of(tmp_path: Path) -> None:
    import msgspec

    folder = tmp_path / "recording"
    folder.mkdir()
    origins = [Origin(4, 8, 2, 5, [(0, 16)]), Origin(5, 10, 2, 6, [(0, 16)])]
    lines = [
        RecordLine(7, taken=Taken(1.0, 6, "aa", [RecordedBatch(9, 32, origins)])),
        RecordLine(8, taken=Taken(2.0, 7, "bb", [RecordedBatch(10, 32, origins[:1])])),
    ]
    (folder / "steps.jsonl").write_bytes(b"".join(sealed_json.encode(line, indent=-1) for line in lines))

    shown = CliRunner().invoke(main, ["record", "--run", f"{tmp_path}/"])
    last = CliRunner().invoke(main, ["record", "--run", f"{tmp_path}/", "--last", "1", "--json"])

    assert shown.exit_code == 0 and "2 steps recorded, 0 with their rows" in shown.output
    assert [line.split() for line in shown.output.splitlines()[2:]] == [
        ["7", "32", "5-6", "–", "aa", "–", "–"],
        ["8", "32", "5", "–", "bb", "–", "–"],
    ]
    (entry,) = map(msgspec.json.decode, last.output.splitlines())
    assert (entry["step"], entry["replayed_from"], entry["batches"][0]["lease"]) == (8, None, 10)
    assert entry["batches"][0]["origins"] == [
        {"ticket": 4, "position": 8, "prompts": 2, "version": 5, "rows": [[0, 16]]}
    ]


def test_rows_without_a_reference_are_told_with_the_key_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise FieldError("base_action_log_probs is missing")

    monkeypatch.setattr("pipeline.trainer.recording.replay.train", train)
    monkeypatch.setattr("pipeline.trainer.setup.prepare", lambda folder: None)

    refused = CliRunner().invoke(main, ["replay", "--rows", "--run", f"{tmp_path}/"])

    assert refused.exit_code == 1
    assert "base_action_log_probs is missing" in refused.output and "trainer.kl_coef = 0" in refused.output
