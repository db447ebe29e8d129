"""The environment of a child process, and its reports."""

import asyncio
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from pipeline.runtime.child_process import LocalChild, cache_variables, child_environment, remove_older_caches

VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


def test_no_variable_chooses_the_kernels_of_attention_but_ones_own(monkeypatch):
    """A pass chooses them (tests/models/test_attention_kernels.py), in whatever process it is."""
    monkeypatch.delenv(VARIABLE, raising=False)

    without = child_environment(gpu="0", threads=1)
    monkeypatch.setenv(VARIABLE, "0")

    assert VARIABLE not in without
    assert child_environment(gpu="0", threads=1)[VARIABLE] == "0"


def test_compiled_code_of_these_versions_is_kept_and_that_of_others_is_removed(tmp_path: Path) -> None:
    own = {"TRITON_CACHE_DIR": "/fast/triton", "VLLM_CACHE_ROOT": ""}

    variables = cache_variables(tmp_path, own)
    (current,) = {Path(place).parent for place in variables.values()}
    assert remove_older_caches(tmp_path) == []
    # Of an older torch, and as they lay before versions had folders.
    for folder in (current / "vllm", tmp_path / "compiled/torch-2.0.0/vllm", tmp_path / "compiled/triton"):
        folder.mkdir(parents=True)
    removed = remove_older_caches(tmp_path)

    assert {name: Path(place).name for name, place in variables.items()} == {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
    }
    assert current.parent == tmp_path / "compiled" and f"torch-{importlib.metadata.version('torch')}" in current.name
    assert removed == ["torch-2.0.0", "triton"]
    assert list((tmp_path / "compiled").iterdir()) == [current] and (current / "vllm").is_dir()


REPORTS = """
import sys
from pipeline.runtime.role import Report, reporter
reporter(int(sys.argv[1]))(Report(error="Missing keys: " + "\u00e9" * 300_000))
"""


def test_an_error_of_any_length_is_reported_with_its_beginning() -> None:
    reports, lines = [], []

    def start(reports_end: int, lines_end: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", REPORTS, str(reports_end)], stderr=lines_end, pass_fds=[reports_end]
        )

    async def ended() -> int:
        exited = asyncio.get_running_loop().create_future()
        LocalChild(start, on_report=reports.append, on_line=lines.append, on_exit=exited.set_result)
        return await asyncio.wait_for(exited, 60)

    assert asyncio.run(ended()) == 0 and lines == []
    (report,) = reports
    assert report.error.startswith("Missing keys: é") and report.error.endswith("é ... (300,014 characters)")
    assert len(report.error) < 5000
