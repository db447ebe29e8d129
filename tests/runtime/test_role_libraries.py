"""The roles' libraries: their table is made, packages of no use stay out; a thread that an import starts has a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipeline.runtime.role_libraries import UNUSED, model_type

LOADS = """
import gc, importlib, sys
from pipeline.runtime import role_libraries

collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
role_libraries.load(role_libraries.ROLES.values(), "")
# Some import asks for one itself; by themselves they would come a thousand times.
print(len(collections) < 10, gc.isenabled())
print(sorted(set(role_libraries.UNUSED) & set(sys.modules)))
print([importlib.import_module(name).HERE for name in role_libraries.UNUSED])
conversions = importlib.import_module("transformers.conversion_mapping")
conversions._build_checkpoint_conversion_mapping = lambda: print("made again")
conversions.get_checkpoint_conversion_mapping("llama")
"""


def run(code: str, folder: Path, **variables: str) -> str:
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_that_roles_share_is_loaded_and_packages_of_no_use_to_them_stay_importable(tmp_path: Path) -> None:
    for name in UNUSED:
        tmp_path.joinpath(f"{name}.py").write_text("HERE = True\n")

    assert run(LOADS, tmp_path) == f"True True\n[]\n{[True] * len(UNUSED)}\n"


def test_the_type_of_a_model_is_that_of_its_file_and_the_embedded_ones_without(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text('{"model_type": "qwen2"}')

    assert model_type(str(tmp_path)) == "qwen2"
    assert model_type(str(tmp_path / "missing")) == "llama"


WATCHES = """
import importlib, inspect, threading
from pipeline.runtime.forking import threads_lost
from pipeline.runtime.import_watch import ImportWatch

early = threading.Thread(target=threading.Event().wait, daemon=True)
early.start()
with ImportWatch() as watch:
    importlib.import_module("outer.first")
late = set(threads_lost()) - {early.native_id}
print(watch.starter_of(early.native_id) or "nobody", "/", *map(watch.starter_of, late))
import outer.first, middle, tracer
print({type(module.__loader__).__name__ for module in (outer, outer.first, middle, tracer)},
      {module.__spec__.loader is module.__loader__ for module in (outer, outer.first, middle, tracer)},
      inspect.getsource(middle).strip())
import threadless
print(type(threadless.__loader__).__name__)
"""


def test_a_thread_is_that_of_the_module_whose_import_started_it(tmp_path: Path) -> None:
    tmp_path.joinpath("outer").mkdir()
    tmp_path.joinpath("outer", "__init__.py").touch()
    tmp_path.joinpath("outer", "first.py").write_text("import middle, threadless\n")
    tmp_path.joinpath("middle.py").write_text("import tracer\n")
    # An import after the start of the thread, and one before it, are not the cause.
    tmp_path.joinpath("tracer.py").write_text(
        "import wave, threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\nimport calendar\n"
    )
    tmp_path.joinpath("threadless.py").touch()

    assert run(WATCHES, tmp_path) == (
        "nobody / tracer (imported by middle, outer)\n"
        "{'SourceFileLoader'} {True} import tracer\n"
        "SourceFileLoader\n"
    )  # fmt: skip
