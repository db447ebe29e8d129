"""`rlhfd page`: the page of a run that is not running, served from its folder until Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import REQUEST_TIMEOUT_S, finding
from pipeline.cli.runs import run_folder_of
from pipeline.errors import RlhfdError

if TYPE_CHECKING:
    from pipeline.supervisor.ended_page import EndedPage


@click.command(short_help="Serve the page of a run that has ended; Ctrl-C ends it.")
@finding
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port on 127.0.0.1; 0 takes a free one."
)
@click.argument("run", default="", metavar="[RUN]")
def page(path: Path | None, runtime_dir: Path | None, port: int, run: str) -> None:
    """Serve the page of a run that is not running, from its folder, until Ctrl-C.

    RUN is its name, as `rlhfd runs` has it; left out: the run that was started last. A running run has a page of its
    own, at the address that `rlhfd start` and `rlhfd status` name. Every user of this machine reaches the page.

    \b
    Examples:
      rlhfd page
      rlhfd page grpo-model-3f9c1a2b --port 8080
    """
    import asyncio

    from pipeline.runtime.run_folder import read_note
    from pipeline.supervisor.ended_page import EndedPage

    folder = run_folder_of(runtime_dir, path, run)
    if (note := read_note(folder)) is None:
        raise RlhfdError(f"no run in {folder.parent}")
    _refuse_running(folder)
    asyncio.run(_serve(EndedPage(folder, note), port, note.name))


def _refuse_running(folder: Path) -> None:
    """Raise RlhfdError if a daemon runs the run of a folder, with the address of its page."""
    from pipeline.runtime import control, lock

    user = lock.user_of(folder.parent.parent)
    if user is None or user.run != folder.name:
        return
    try:
        status = control.request(lock.find(Path(user.runtime_dir)), "status", REQUEST_TIMEOUT_S)
        url = str(status["metrics_url"]).removesuffix("/metrics")
    except RlhfdError:
        url = ""
    where = f": its page is {url}/" if url else f", by pid {user.pid}"
    raise RlhfdError(f"run {folder.name} is running{where}")


async def _serve(data: EndedPage, port: int, name: str) -> None:
    import asyncio

    from pipeline.supervisor.web.server import HttpServer, page_routes

    server, ended = HttpServer.bind("127.0.0.1", port, key="--port"), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start(page_routes(data))
    click.echo(f"{server.url}/ shows run {name} until Ctrl-C")
    await ended.wait()
    await server.stop()
