"""The environment of a child process."""

import os

import pytest

from pipeline import serial
from pipeline.config.schema import Config
from pipeline.runtime.child_process import child_environment
from pipeline.supervisor.fleet import ChildSettings

VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


@pytest.mark.parametrize(("preferred", "expected"), [(False, "1"), (True, None)])
def test_cudnn_comes_last_among_attention_kernels_unless_it_is_wanted(monkeypatch, tmp_path, preferred, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    config = Config.model_validate({"daemon": {"cudnn_attention": preferred}, "prompts": {"path": str(prompts)}})

    settings = ChildSettings.of(config)
    environment = child_environment(gpu="0", threads=1, cudnn_attention=settings.cudnn_attention)

    assert environment.get(VARIABLE) == expected


def test_a_setting_of_ones_own_stays_where_cudnn_is_wanted(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")

    assert child_environment(gpu="0", threads=1, cudnn_attention=True)[VARIABLE] == "0"


@pytest.mark.parametrize(("preferred", "expected"), [(False, "1"), (True, None)])
def test_cudnn_comes_last_in_a_serial_run_too(monkeypatch, preferred, expected):
    # First set, so that what the run sets is undone.
    for name in (VARIABLE, "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    serial._set_environment(Config.model_validate({"daemon": {"cudnn_attention": preferred}}))

    assert os.environ.get(VARIABLE) == expected
