"""The environment of a child process."""

import os
from types import SimpleNamespace

import pytest
import torch

from pipeline import serial
from pipeline.config.schema import Config
from pipeline.runtime.child_process import child_environment
from pipeline.supervisor.fleet import ChildSettings, Fleet
from pipeline.supervisor.placement import Place
from pipeline.supervisor.restarts import RestartLimits
from pipeline.telemetry.metric import SlotName
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.recording import replay

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


@pytest.mark.parametrize(("preferred", "expected"), [(False, "1"), (True, None)])
@pytest.mark.parametrize("command", ["replay a step", "train on rows"])
def test_cudnn_comes_last_in_a_replay_too(monkeypatch, tmp_path, command, preferred, expected):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    config = Config.model_validate({"daemon": {"cudnn_attention": preferred}})
    cpu = torch.device("cpu")
    recorded = SimpleNamespace(steps=[1], has_rows=lambda step: True, start_of=lambda step: None)
    taken = SimpleNamespace(config=config, begin="its start", device=cpu, steps=lambda debug: iter(()))
    seen = []

    def new(*_):
        seen.append(os.environ.get(VARIABLE))
        return None, SimpleNamespace(update=lambda batches: None, step=1)

    for name, value in (
        ("Replay", lambda *_: taken), ("recording_of", lambda run: recorded), ("_device", lambda name: cpu),
        ("_new", new), ("batches_of", lambda *_: ()), ("line_of", lambda *_: b""),
    ):  # fmt: skip
        monkeypatch.setattr(replay, name, value)

    if command == "replay a step":
        assert replay.report(tmp_path, 1, "", debug=False, write=print)
        assert os.environ.get(VARIABLE) == expected
    else:
        replay.train(config, tmp_path, "", write=print)
        assert seen == [expected], "before the models are there"
