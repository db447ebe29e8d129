"""Images through a real daemon: prompt file, rollout, arena, trainer; the arriving pixels are those of the files."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.loading import load_actor, load_tokenizer
from pipeline.models.log_probs import action_log_probs
from pipeline.prompts.types import Prompt
from pipeline.rollout.vision_prompts import VisionPrompts
from tests.support import tiny_vision
from tests.support.daemon import Daemon, only_run, total

pytestmark = pytest.mark.integration

PATCH = 16
"""Patches of 16 x 16 pixels in three colours at two times: 6 KiB each, so that few tokens make megabytes."""

IMAGES: dict[str, tuple[int, int]] = {
    "small.png": (32, 32),
    "tall.png": (32, 96),
    "wide.png": (64, 32),
    "large.png": (512, 288),
}
PROMPTS: list[tuple[str, list[str]]] = [
    ("a small one?", ["small.png"]),
    ("which of two?", ["tall.png", "wide.png"]),
    ("none at all?", []),
    ("a large one?", ["large.png"]),
    ("gone?", ["gone.png"]),
]
SETTINGS = (
    "rollout.algorithm=grpo",
    "rollout.num_generations=4",
    "rollout.max_length=176",
    "rollout.batch_size=2",
    'rewards=["seen:even_share"]',
    "buffer.sample_batch_size=8",
    # Less than the pixels of the large image, which four rows share: 3.4 MiB.
    "buffer.row_bytes=1MiB",
    "buffer.arena_bytes=128MiB",
    "buffer.max_staleness=0",
)
REWARD = """
def even_share(input_ids, attention_mask, *, response_start, response_end, raw_images, **_):
    share = (input_ids[response_start:response_end] % 2 == 0).float().mean()
    return float(share) + len(raw_images or [])
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model, images and prompts."""
    folder = tmp_path_factory.mktemp("vision-task")
    tiny_vision.save(folder / "model", patch=PATCH)
    write_prompts(folder)
    return folder


def write_prompts(folder: Path) -> None:
    """Write images and prompts; one image is missing."""
    for seed, (name, (width, height)) in enumerate(IMAGES.items()):
        tiny_vision.picture(folder / name, width, height, seed)
    lines = [{"prompt": prompt, "images": images} for prompt, images in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def settings(folder: Path, task: Path, *more: str) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "seen.py").write_text(REWARD)
    return (*SETTINGS, f"model.actor={task / 'model'}", f"prompts.path={task / 'prompts.jsonl'}", *more)


@pytest.mark.timeout(400)
def test_steps_with_images_are_those_of_a_serial_run_bit_for_bit(tmp_path: Path, task: Path) -> None:
    with Daemon(tmp_path / "run", *settings(tmp_path / "run", task, "trainer.max_steps=4")) as daemon:
        daemon.wait_step(3)
        metrics = daemon.metrics()
        apart = daemon.ended()
    with Daemon(
        tmp_path / "serial", *settings(tmp_path / "serial", task, "trainer.max_steps=4"), arguments=("--serial",)
    ) as daemon:
        serial = daemon.ended()

    checkpoint = only_run(tmp_path / "run" / "state") / "checkpoints" / "step-000004"
    load_actor(checkpoint, dtype="float32", device="cpu")
    image = str(task / "small.png")
    assert VisionPrompts(checkpoint, load_tokenizer(checkpoint)).render(Prompt(0, 0, 0, "a", None, (image,))).vision
    assert apart[0] == "4"
    assert apart == serial
    assert total(metrics, "rlhfd_items_trained_total") >= 3 * 8
    assert total(metrics, "rlhfd_items_unaccounted") == 0


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_an_own_trainer_gets_the_pixels_of_each_rows_files(tmp_path: Path, task: Path) -> None:
    model = load_actor(task / "model", dtype="float32", device="cpu")
    vision = VisionPrompts(task / "model", load_tokenizer(task / "model"))
    pixels = {
        name: vision.render(Prompt(0, 0, 0, "a", None, (str(task / name),))).vision["pixel_values"] for name in IMAGES
    }
    seen: Counter[str] = Counter()
    with Daemon(tmp_path, *settings(tmp_path, task, "trainer.kind=external")) as daemon:
        daemon.wait_ready()
        with pipeline.connect(tmp_path / "run") as connection:
            for experience in connection.experiences(timeout_s=60.0):
                assert isinstance(experience, pipeline.ExperienceVL)
                seen.update(checked(experience, model, pixels))
                if sum(seen.values()) >= 32:
                    break
                connection.publish(actor=model.state_dict())
        metrics = daemon.metrics()
        assert re.search(
            r"prompt set aside: position=\d+ line=5 reason=image \S+/gone.png: No such file", daemon.errors
        )
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors

    assert pixels["large.png"].nbytes > 3 << 20
    assert set(seen) == {"small.png", "tall.png wide.png", "", "large.png"}
    assert total(metrics, "rlhfd_items_unaccounted") == 0


def checked(experience: Any, model: torch.nn.Module, pixels: dict[str, torch.Tensor]) -> list[str]:
    """Check each row's pixels against its files, and log-probs against the model; return the rows' images."""
    rows = VisionRows.of(experience)
    names = [[Path(path).name for path in paths or []] for paths in experience.raw_images or [None] * len(rows)]
    for row, images in enumerate(names):
        found, grids = rows.pixel_values[row], rows.image_grid_thws[row]
        assert experience.info["image_num"][row] == len(images)
        assert (found is None) == (grids is None) == (not images)
        if found is not None:
            assert torch.equal(found, torch.cat([pixels[name] for name in images]))
    mask = experience.action_mask
    with torch.no_grad():
        log_probs = action_log_probs(model, experience.sequences, experience.attention_mask, mask.shape[1], vision=rows)
    torch.testing.assert_close(log_probs[mask], experience.action_log_probs[mask], atol=1e-4, rtol=0)
    return [" ".join(images) for images in names]
