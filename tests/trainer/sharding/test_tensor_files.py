"""Safetensors files written a tensor at a time and read by slices: as safetensors' own functions do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.weights.shards import Shard
from pipeline.trainer.sharding.tensor_files import Entry, TensorFiles, sources_of, write_tensors

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "b": torch.arange(8).to(torch.bfloat16).reshape(2, 2, 2),
    "c": torch.tensor(7),
    "d": torch.arange(5, dtype=torch.uint8),
    "e": torch.empty(0, 4),
    "f": torch.tensor([True, False]),
}


def test_a_file_written_a_tensor_at_a_time_is_read_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, [Entry(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()], TENSORS.values())

    found = load_file(path)

    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in TENSORS.items())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    former = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", [], [])
    finally:
        os.umask(former)

    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (3, 2), (5, 0)])
def test_a_shard_is_filled_with_its_own_rows(tmp_path: Path, first: int, rows: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    local = torch.full((rows, 3), -1.0)
    step = torch.zeros((), dtype=torch.int64)
    targets = {
        "a": Shard(local, (5, 3), 3 * first, torch.float32),
        "x": Shard(step, (), 0, torch.int64, split=False),
    }

    with TensorFiles(tmp_path, str(tmp_path)) as files:
        files.fill(targets, {"a": "a", "x": "c"})

    assert torch.equal(local, TENSORS["a"][first : first + rows])
    assert step == 7


def test_a_model_in_several_files_is_found_by_its_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"c": TENSORS["c"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with TensorFiles(tmp_path, str(tmp_path)) as files:
        assert files.names() == {"a", "c"}


def test_a_single_file_goes_before_an_index_that_an_earlier_save_left(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys("abc", "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with TensorFiles(tmp_path, str(tmp_path)) as files:
        assert files.names() == set(TENSORS), "the file that transformers loads, and the workers with it"


def test_a_tensor_that_is_missing_or_of_another_shape_changes_no_shard(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    local = torch.full((5, 3), -1.0)
    good = Shard(local, (5, 3), 0, torch.float32)

    with TensorFiles(tmp_path, str(tmp_path)) as files:
        with pytest.raises(CheckpointError, match="other is missing"):
            files.fill({"a": good, "other": good})
        with pytest.raises(CheckpointError, match=r"b is \(2, 2, 2\), expected \(5, 3\)"):
            files.fill({"a": good, "b": good})

    assert (local == -1).all()


def test_a_folder_without_safetensors_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")

    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        TensorFiles(tmp_path, str(tmp_path))


def test_a_lost_or_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "lost.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lost\.safetensors"):
        TensorFiles(tmp_path, str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        TensorFiles(tmp_path, str(tmp_path))


def test_names_are_found_with_and_without_the_head_and_for_tied_tensors(tmp_path: Path) -> None:
    save_file({"model.layers.0.w": TENSORS["a"], "lm_head.weight": TENSORS["b"]}, tmp_path / "model.safetensors")

    with TensorFiles(tmp_path, str(tmp_path)) as files:
        twins = {"embed.weight": "lm_head.weight"}
        assert sources_of(["layers.0.w", "embed.weight"], files, "model", twins, "model.critic") == {
            "layers.0.w": "model.layers.0.w",
            "embed.weight": "lm_head.weight",
        }
        with pytest.raises(ConfigError, match=r'^model\.critic: its files have no tensor other.*sharding = "none"'):
            sources_of(["other"], files, "model", {}, "model.critic")
