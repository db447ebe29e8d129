"""The words of rlhfd's own are explained where a user meets them first."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main

ROOT = Path(__file__).parents[2]
WORDS = ("ticket", "extent", "sealed", "leased", "settled", "spool")


@pytest.mark.parametrize("page", ["README.md", "docs/metrics.md"])
def test_a_page_explains_each_word_once(page: str) -> None:
    text = (ROOT / page).read_text()

    assert {word: text.count(f"*{word}*") for word in WORDS} == dict.fromkeys(WORDS, 1)


@pytest.mark.parametrize("command", ["status", "top"])
def test_the_help_explains_each_word(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"]).stdout

    explained = shown[shown.index("Words:") : shown.index("Examples:")]
    assert [word for word in WORDS if word not in explained] == []


def test_the_page_explains_rows_and_tickets_in_tooltips() -> None:
    static = ROOT / "pipeline/supervisor/web/static"

    assert (
        'id="ready-of" title="A ready row waits for a trainer; a leased one is in'
        in (static / "index.html").read_text()
    )
    assert "A ticket permits a worker to roll out some prompts" in (static / "rollouts.js").read_text()
