"""Fixtures and rules for every test: one thread, own random state, nothing left behind, needs that CI must meet."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import warm
from tests.support.daemon import task
from tests.support.leaks import Holdings, mark_descendants, open_cuda, own_folder
from tests.support.vllm_engines import forkserver

__all__ = ["forkserver", "task"]

mark_descendants()
# As at a terminal, though a shell that runs the tests in the background, or nohup, has these ignored: what a test
# starts is sent them, and would ignore them as well.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler)
# Before torch is imported, and inherited by every process that a test starts: two cores, many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# As each command of ours that loads models sets it.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# How long an example takes is the machine's affair: no test fails because others are busy beside it.
settings.register_profile("rlhfd", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Tests of many examples take a multiple of `settings.default.max_examples`.
settings.register_profile("variants", settings.get_profile("rlhfd"), max_examples=400)
settings.load_profile("rlhfd")


LONG = {
    "chaos": "kill processes of real daemons 1,360 times, with vLLM 1,565 (tests/chaos)",
    "soak": "run a daemon for 20 minutes and watch what each process holds (tests/chaos)",
    "fuzz": "a million messages to the sockets, 100,000 configurations (tests/fuzz)",
}
"""Kinds of test that are short in a usual run; the option of the same name runs them, and only them, in full."""

LONGEST = (
    "test_kills", "test_hangs", "test_recipes", "test_ray", "test_ray_ranks", "test_damaged_checkpoints", "test_resume",
    "test_limits", "test_environment", "test_footprint", "test_replay", "test_bad_input", "test_examples",
    "test_recording", "test_metrics", "test_stream", "test_bootstrap", "test_operations", "test_coming_from",
    "test_epochs", "test_determinism", "test_systemd", "test_evaluation", "test_vision", "test_models", "test_chaos",
    "test_sharding", "test_forkserver", "test_rank_endings", "test_reference_device", "test_wheel", "test_runs",
    "test_detached", "test_page_in_chromium",
)  # fmt: skip
"""Files that take the most time. They come first: of files in parallel, none of them is left alone at the end."""

ASYNC_TIMEOUT_S = 60.0
"""The deadline of a test that is a coroutine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for each kind of long run, and the seed that repeats one."""
    for kind, meaning in LONG.items():
        parser.addoption(f"--{kind}", action="store_true", help=f"{meaning}; nothing else is run")
    parser.addoption(
        "--variants", action="store_true", help="also slow variants of other tests, which a usual run leaves out"
    )
    parser.addoption("--chaos-seed", type=int, default=0, help="seed of whom the chaos tests kill when")


def pytest_configure(config: pytest.Config) -> None:
    """Take four times the examples with --variants."""
    if config.getoption("--variants"):
        settings.load_profile("variants")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hide the modules and items from the garbage collector: each of its full runs would walk them all, for 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of a kind that was asked for in full, or of no use but in full."""
    asked = [kind for kind in LONG if config.getoption(kind)]
    if asked:
        kept = [item for item in items if any(item.get_closest_marker(kind) for kind in asked)]
    else:
        left_out = ["full", *([] if config.getoption("--variants") else ["variant"])]
        kept = [item for item in items if not any(item.get_closest_marker(name) for name in left_out)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    for word, finder in (("integration", "bin/test"), ("vllm", ".ci/run")):
        for path in {item.path for item in kept if item.get_closest_marker(word)}:
            if word not in path.read_text():
                raise pytest.UsageError(f"{path}: {finder} finds the files of this kind by the word {word} in them")
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items[:] = sorted(kept, key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), ASYNC_TIMEOUT_S))
    return True


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print past pytest's capture, for runs whose figures are their point."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def printed(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n{text}\n")
            sys.stdout.flush()

    return printed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have recorded as "shown" (record_property), from every process of a run in parallel."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    for text in [value for report in reports for name, value in report.user_properties if name == "shown"]:
        terminalreporter.write_line(str(text))


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Catch what fixtures of a wider scope than one test leave."""
    own_folder(tmp_path_factory.getbasetemp())
    before = Holdings.now()
    yield
    warm.end()
    _fail_on(before, descriptors=False)


@pytest.fixture(scope="session", autouse=True)
def _zmq_context(_session_leaves_nothing: None) -> Iterator[None]:
    """Let ZeroMQ open what it keeps for the life of a process, so that no test is blamed for it."""
    import zmq

    # Open to the end: a closed socket gives its descriptors back later, and would hide a leak of as many.
    with zmq.Context.instance().socket(zmq.PULL):
        yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _zmq_context: None) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        # What CUDA keeps open for the life of a process is no leak of the first test that uses a card.
        open_cuda()
    before = Holdings.now()
    yield
    if (signatures := sys.modules.get("pipeline.rollout.reward.signatures")) and vars(signatures._loops):
        # It is kept for the life of a process.
        signatures.event_loop().close()
        vars(signatures._loops).clear()
    _fail_on(before)


def _fail_on(before: Holdings, *, descriptors: bool = True) -> None:
    if leaks := before.leaks(descriptors=descriptors):
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def _seeded_torch(request: pytest.FixtureRequest) -> None:
    """Seed torch as pytest-randomly seeds the others, where a test module has imported it."""
    if torch := sys.modules.get("torch"):
        seed = request.config.getoption("randomly_seed", 0)
        # torch.manual_seed takes 1.5 ms: of each kind of device that is not in use it notes the call and its stack.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or in CI fail, a test whose needs this machine does not meet."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        # In the environment that is made for it, its absence is a failure.
        wanted = os.environ.get("RLHFD_EXTRAS") == "vllm"
        (pytest.fail if wanted else pytest.skip)("vLLM is not installed: RLHFD_EXTRAS=vllm bin/test -m vllm")
    missing = [
        name
        for marker in item.iter_markers("needs")
        for name in marker.args
        if shutil.which(name) is None and importlib.util.find_spec(name) is None
    ]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not on this machine: {', '.join(missing)}")
    # Where processes hold a card or vLLM, or are watched for hours, they are the program's own.
    executed = any(map(item.get_closest_marker, ("gpu", "vllm"))) or any(map(item.config.getoption, LONG))
    has_ranks = item.get_closest_marker("ranks") is not None
    is_allowed = (item.get_closest_marker("integration") is not None and not executed) or has_ranks
    warm.allow(is_allowed, begins=has_ranks or "task" in getattr(item, "fixturenames", ()))
