"""Make the pictures of the page in docs/ again, from a real run: `.venv/bin/python -m tests.support.screenshots`."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import Browser
from tests.support.daemon import Daemon

DOCS = Path(__file__).parents[2] / "docs"
SHOTS = {
    "page-light": {"width": 1180, "height": 2160},
    "page-dark": {"width": 1180, "height": 2160, "dark": True},
    "page-phone": {"width": 390, "height": 844, "phone": True},
}


def main(steps: int) -> None:
    """Run the embedded task for so many steps, then look at it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Daemon(Path(folder), "samples.per_minute=60") as daemon,
        Browser() as browser,
    ):
        daemon.wait_step(steps, timeout_s=900.0)
        for name, size in SHOTS.items():
            with browser.page(**size) as page:
                page.open(f"{daemon.url}/")
                page.wait("document.querySelectorAll('.rollout').length > 3")
                page.fill("#which", "mixed")
                # The newest come in softly.
                page.wait("document.getAnimations().every(one => one.playState === 'finished')")
                page.screenshot(Path(folder) / "shot.png", height=size["height"])
            picture = Image.open(io.BytesIO((Path(folder) / "shot.png").read_bytes())).convert("RGB")
            picture.quantize(128).save(DOCS / f"{name}.png", optimize=True)
        daemon.signal(signal.SIGTERM)
        daemon.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
