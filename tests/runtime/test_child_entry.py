"""The start of a child process before its role runs."""

from __future__ import annotations

import os

import pytest

from pipeline.runtime.child_entry import keep_to


def test_a_process_whose_cores_were_taken_away_runs_on_others_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)

    keep_to([])
    keep_to(sorted(allowed))
    assert not caplog.text
    keep_to([max(allowed) + 900])

    assert os.sched_getaffinity(0) == allowed
    assert f"cores=[{max(allowed) + 900}] reason=Invalid argument" in caplog.text
