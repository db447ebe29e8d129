"""The choice among a card's attention kernels: what is made for the card and computes as rows by themselves do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from pipeline.models import card_attention
from pipeline.models.card_attention import BY_ROWS, candidates, fault_of, first_sound, kernel_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16
ARGUMENTS = (
    "q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, "
    "window_size=(-1, -1)"
)
EXACT = f"""
    import torch
    from torch.nn import functional

    def flash_attn_varlen_func({ARGUMENTS}):
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == 129
        outputs = []
        for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
            row = [each[start:end].transpose(0, 1)[None] for each in (q, k, v)]
            place = torch.arange(end - start)
            age = place[:, None] - place
            before = window_size[0] if window_size[0] >= 0 else 999
            mask = (age >= 0) & (age <= before)
            outputs.append(functional.scaled_dot_product_attention(
                *row, mask, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outputs)
"""


class Packages:
    """A folder of installed packages, before all others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, module: str, code: str) -> None:
        file = self._folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(code))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Packages(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]


def test_a_kernel_of_a_card_is_for_its_16_bit_types_and_sizes_alone() -> None:
    assert kernel_of(GPU, torch.float32, 128) == kernel_of(CPU, HALF, 64) == kernel_of(GPU, HALF, 512) == BY_ROWS


def test_candidates_are_what_is_installed_for_the_cards_generation(packages: Packages) -> None:
    assert candidates(9) == ["torch varlen"]

    packages.add("flash_attn_interface", EXACT)
    packages.add("flash_attn.cute", EXACT)
    packages.add("flash_attn.__init__", EXACT)

    assert candidates(8) == ["flash-attn 2", "torch varlen"]
    assert candidates(9) == ["flash-attn 3", "flash-attn 4", "flash-attn 2", "torch varlen"]
    assert candidates(10) == ["flash-attn 4", "flash-attn 2", "torch varlen"]


def test_a_kernel_that_computes_the_same_is_taken(packages: Packages, caplog: pytest.LogCaptureFixture) -> None:
    packages.add("flash_attn_interface", EXACT)
    packages.add("flash_attn.cute", EXACT.replace("return torch.cat(outputs)", "return torch.cat(outputs), None"))

    assert first_sound(["flash-attn 3", "torch varlen"], CPU, HALF, 64) == "flash-attn 3"
    assert first_sound(["flash-attn 4", "torch varlen"], CPU, HALF, 64) == "flash-attn 4", "it returns two tensors"
    assert not caplog.text


def test_the_folder_that_two_releases_share_is_not_taken_for_the_other(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    """Of flash-attn 4 alone `flash_attn` can be imported too, and has no kernel."""
    packages.add("flash_attn.cute", "raise OSError('libcute.so: no such file')\n")

    assert candidates(9)[:2] == ["flash-attn 4", "flash-attn 2"]
    assert first_sound(["flash-attn 4", "flash-attn 2"], CPU, HALF, 64) == BY_ROWS
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "attention kernel left out: kernel=flash-attn 4 reason=OSError: libcute.so: no such file"
    assert second.startswith("attention kernel left out: kernel=flash-attn 2 reason=AttributeError")


def test_a_package_that_does_not_load_is_left_out_with_the_modules_below_it(
    packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as flash-attn 2 that was built for another torch: a look for `flash_attn.cute` imports it."""
    packages.add("flash_attn.__init__", "raise ImportError('flash_attn_2_cuda.so: undefined symbol')\n")

    found = candidates(9)

    assert found == ["flash-attn 4", "flash-attn 2", "torch varlen"]
    assert first_sound(found[:2], CPU, HALF, 64) == BY_ROWS
    assert [record.getMessage() for record in caplog.records] == [
        f"attention kernel left out: kernel={name} reason=ImportError: flash_attn_2_cuda.so: undefined symbol"
        for name in found[:2]
    ]


def test_faults_of_a_kernel_are_named() -> None:
    """Torch's own has no implementation for CPUs."""
    fault = fault_of("torch varlen", CPU, HALF, 64)
    assert fault is not None and "CPU" in fault and "\n" not in fault


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("(age >= 0)", "(age >= -1)", "its output differs"),
        ("scale=softmax_scale", "scale=0.2", "its output differs"),
        ("[start:end]", "[: end - start]", "its output differs"),
        ("return torch.cat(outputs)", "return torch.cat(outputs) * float('nan')", "its output differs"),
        ("for each in (q, k, v)", "for each in (q.detach(), k, v)", "RuntimeError"),
        (
            "return torch.cat(outputs)",
            "found = torch.cat(outputs); return 2 * found - found.detach()",
            "its gradient of query differs",
        ),
        ("for each in (q, k, v)", "for each in (q, k, 2 * v - v.detach())", "its gradient of value differs"),
    ],
    ids=["sees later tokens", "scale", "rows mixed", "NaN", "without gradient", "twice the gradient", "of values"],
)
def test_a_kernel_that_computes_something_else_is_left_out(
    packages: Packages, before: str, after: str, fault: str
) -> None:
    assert before in EXACT
    packages.add("flash_attn_interface", EXACT.replace(before, after))

    found = fault_of("flash-attn 3", CPU, HALF, 64)

    assert found is not None and fault in found


@pytest.mark.parametrize("wrong", ["window_size[0] - 1", "window_size[0] + 1", "999"])
def test_a_kernel_with_another_window_is_left_out_for_layers_that_slide_one(packages: Packages, wrong: str) -> None:
    assert "window_size[0] if" in EXACT
    packages.add("flash_attn_interface", EXACT.replace("window_size[0] if", f"{wrong} if"))

    assert fault_of("flash-attn 3", CPU, HALF, 64) is None
    assert "its output differs" in str(fault_of("flash-attn 3", CPU, HALF, 64, slides=True))


@pytest.mark.gpu
def test_each_installed_kernel_for_this_card_passes_the_trial() -> None:
    generation, _ = torch.cuda.get_device_capability()
    state = torch.cuda.get_rng_state()

    found = {
        (name, dtype, size): fault_of(name, GPU, dtype, size, slides=True)
        for name in candidates(generation)
        for dtype in (HALF, torch.float16)
        for size in (64, 128)
    }

    assert found and set(found.values()) == {None}, found
    assert torch.equal(torch.cuda.get_rng_state(), state), "a trial takes no random number of the run"
    assert kernel_of(GPU, HALF, 64) != BY_ROWS
    assert card_attention.attend_by(kernel_of(GPU, HALF, 64))
