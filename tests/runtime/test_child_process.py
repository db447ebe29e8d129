"""The environment of a child process."""

import os

import pytest

from pipeline import serial
from pipeline.config.schema import Config
from pipeline.runtime.child_process import child_environment
from pipeline.supervisor.fleet import ChildSettings, Fleet
from pipeline.supervisor.placement import Place
from pipeline.supervisor.restarts import RestartLimits
from pipeline.telemetry.metric import SlotName
from pipeline.telemetry.slab import MetricsSlab

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


@pytest.mark.parametrize(("preferred", "expected"), [(False, "1"), (True, None)])
def test_each_role_is_started_with_the_runs_choice_of_attention(monkeypatch, tmp_path, preferred, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), SlotName("trainer")])
    slab.begin("supervisor")
    started = []
    monkeypatch.setattr(
        "pipeline.supervisor.fleet.executed", lambda module, words, variables: started.append(variables)
    )
    fleet = Fleet(
        str(tmp_path), slab, clock=lambda: 0.0, on_reaped=print, on_end=print, on_change=print, on_line=print,
        limits=RestartLimits(), settings=ChildSettings(cudnn_attention=preferred),
    )  # fmt: skip

    fleet._starter(fleet.add("trainer", 0, Place("0", ())), forked=False)

    assert [(variables["CUDA_VISIBLE_DEVICES"], variables.get(VARIABLE)) for variables in started] == [("0", expected)]
    slab.close()


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
