"""Modules of the user, such as reward functions: the folders where they are imported from, and a check of them.

Modules that are installed come first. Then the configuration file's folder is searched, then the folder of the start.
The children of an instance get the first of the two by a variable of their environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, cast

from pipeline.errors import ConfigError

FOLDER_VARIABLE = "_RLHFD_MODULES"
REWARD_KEYWORDS: Final = ("gt_answer", "response_start", "response_end", "tokenizer")
"""Keywords that each reward function gets."""
PROMPT: Final = "prompt"
"""Keyword of the prompt, a text or chat messages, for reward functions that name it."""
ANSWER: Final = "answer"
"""Another name of ``gt_answer``, where the prompt's row has no further column of this name."""

RESPONSE: Final = "response"
"""Keyword of the response's text, for reward functions that name it."""
VISION_KEYWORDS: Final = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "raw_images")
"""Keywords of images and videos, for reward functions that name them."""

_IMPORT_TIMEOUT_S = 120.0
_SIGNATURES_ELSEWHERE: Final = (
    (frozenset(("completions",)), "TRL"),
    (frozenset(("solution_str", "ground_truth")), "verl"),
    (frozenset(("queries", "labels")), "OpenRLHF"),
)
"""Parameters by which a reward function of another trainer is known."""
_CALLED_AS_THEY_ARE: Final = ("TRL", "verl")
"""Trainers whose reward functions are called with their own arguments (`pipeline.rollout.reward.foreign`)."""


_GIVEN: Final = {
    "TRL": ("completions", ("prompts", "completions", "completion_ids", "the columns of the row")),
    "verl": ("solution_str", ("data_source", "solution_str", "ground_truth", "extra_info")),
}
"""The keyword of the response and all keywords that a function of another trainer gets."""
_OWN: Final = ("input_ids", "attention_mask")
AUTO: Final = "auto"
FACTORY: Final = "factory"
"""In the place of a style: the function makes an environment."""
ANY: Final = "any"
"""In the place of a style: the caller's own check sees the arguments."""
_TRAINERS: Final = {"rlhfd": "", "trl": "TRL", "verl": "verl"}
"""The trainer of each style of a reward function's table, "" for this project; "auto" goes by the signature."""
RewardStyle = Literal["auto", "rlhfd", "trl", "verl"]


def folders(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders that are searched after the installed modules."""
    return list(dict.fromkeys([*filter(None, [environ.get(FOLDER_VARIABLE)]), os.getcwd()]))


def use_folder_of(config_path: Path | None) -> None:
    """Search the folder of a configuration file in this process and in its children; None: no further folder."""
    if config_path is not None:
        os.environ[FOLDER_VARIABLE] = str(config_path.absolute().parent)


def extend_path(searched: Sequence[str] | None = None) -> None:
    """Append `folders`, or these, to ``sys.path``; last, so that they shadow no installed module."""
    sys.path += [folder for folder in (folders() if searched is None else searched) if folder not in sys.path]


def not_found(error: BaseException, module: str) -> str:
    """Return the searched folders, for the message about a module that does not exist; else an empty text."""
    name = getattr(error, "name", None) or ""
    if not isinstance(error, ModuleNotFoundError) or not (module == name or module.startswith(f"{name}.")):
        return ""
    return f"; looked in {' and '.join(folders())}, and among the installed modules"


def install_command(package: str) -> str:
    """Return the command that installs a package where this program finds it: `pip` alone may be another Python's."""
    return f"{sys.executable} -m pip install {package}"


def missing_package(name: str, module: str, package: str) -> str:
    """Return the line that says what to install for a part that needs a package; empty if its module is there."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    return "" if is_there else f"{name} needs the package {package}: {install_command(package)}"


def no_function(module: ModuleType, function: str) -> str:
    """Return the message about a module without a function, with its file: it may shadow the user's own."""
    file, own = getattr(module, "__file__", None), f"{module.__name__.replace('.', '/')}.py"
    shadowed = [path for folder in sys.path if (path := Path(folder or ".") / own).is_file()]
    text = f"{module.__name__} has no function {function}"
    if file is None or not shadowed or any(path.samefile(file) for path in shadowed):
        return text if file is None else f"{text}: {file}"
    return f"{text}: it is {file}, which comes before {shadowed[-1]}; rename your own"


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        key: The configuration key that names it, for messages; empty for messages without one.
        name: ``module:function``.

    Returns:
        The function.

    Raises:
        ConfigError: If there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    where = f"{key}: " if key else ""
    try:
        module = importlib.import_module(module_name)
    # User code may raise any exception at import, and would again at the next start.
    except Exception as error:
        kind = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
        problem = f"{kind}{error}{not_found(error, module_name)}"
        raise ConfigError(f"{where}cannot import {module_name}: {problem}") from error
    except SystemExit as end:
        # A shutdown of this process may come during the import (`pipeline.runtime.signals.unwind_on_signals`).
        if end.code == 0:
            raise
        raise ConfigError(f"{where}cannot import {module_name}: it calls sys.exit({end.code!r})") from end
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{where}{no_function(module, function_name)}")
    return cast("Callable[..., Any]", function)


def missing(name: str, searched: Sequence[str]) -> str:
    """Return the problem of ``module:function`` if no file is found for its module; nothing is imported."""
    module = name.partition(":")[0]
    path: Sequence[str] | None = [*sys.path, *searched]
    if module.partition(".")[0] in sys.builtin_module_names:
        return ""
    for depth, part in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:depth]) if depth == 1 else part, path)
        if spec is None:
            looked = f"looked in {' and '.join(searched)}, and among the installed modules"
            meant = re.sub(r"\.py$", "", module)
            advice = f"did you mean {meant}:{name.partition(':')[2]}?" if meant != module else looked
            return f"cannot import {module}: there is no module {'.'.join(parts[:depth])}; {advice}"
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            meant = f", did you mean {parts[0]}:{name.partition(':')[2]}?" if parts[depth:] == ["py"] else ""
            return f"cannot import {module}: {'.'.join(parts[:depth])} is a module, no package{meant}"
    return ""


def file_of(name: str) -> Path | None:
    """Return the file of the module of ``module:function``; None if none is found. Nothing is imported."""
    path: Sequence[str] | None = [*sys.path, *folders()]
    spec = None
    for part in name.partition(":")[0].split("."):
        spec = None if path is None else PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return None if spec is None or spec.origin is None or not Path(spec.origin).is_file() else Path(spec.origin)


def problem_of_call(function: Callable[..., Any], style: str = AUTO) -> str:
    """Return the reason why a reward function cannot be called by its signature, else an empty text.

    Args:
        function: The function.
        style: `RewardStyle` of its table.
    """
    if inspect.isbuiltin(function):
        # Functions written in C have no reliable signature.
        return ""
    if (signature := _signature(function)) is None:
        return ""
    if (trainer := trainer_of(function, style)) in _CALLED_AS_THEY_ARE:
        return _problem_of_style(function, signature, trainer, style)
    location = _location(function)
    if trainer:
        return (
            f"has the signature of {trainer}{location}, {', '.join(signature.parameters)}: here it is (input_ids, "
            "attention_mask, *, response, gt_answer, **_), a call a row, which returns a number"
        )
    # A keyword in the place of the tokens or their mask is given twice.
    twice = {PROMPT, RESPONSE, *VISION_KEYWORDS} & set(named_in(signature.parameters))
    by_name = [*keywords_of(signature.parameters), *twice]
    try:
        signature.bind(None, None, **dict.fromkeys([*REWARD_KEYWORDS, *by_name]))
    except TypeError as error:
        form = f"(input_ids, attention_mask, *, {', '.join(REWARD_KEYWORDS)})"
        return (
            f"cannot be called{location}, {error}: its parameters are {form}, and **_ takes those that it does not use"
        )
    return ""


def _problem_of_style(function: Callable[..., Any], signature: inspect.Signature, trainer: str, style: str) -> str:
    """Return why a function cannot be called as one of a style that its table names, else an empty text."""
    kinds, parameters = inspect.Parameter, signature.parameters
    takes_any = any(one.kind is kinds.VAR_KEYWORD for one in parameters.values())
    response, given = _GIVEN[trainer]
    needed = [name for name, one in parameters.items()
              if one.default is kinds.empty and one.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]  # fmt: skip
    # Any column of the prompt's row may be a further argument of TRL's; tokens and mask are of this project's alone.
    unknown = [name for name in needed if name not in given and (trainer == "verl" or name in _OWN)]
    if style == AUTO or not (unknown or not (takes_any or response in parameters)):
        return ""
    found = f"needs {', '.join(unknown)}" if unknown else f"does not take {response}"
    return (
        f'does not fit style = "{style}"{_location(function)}: {trainer} gives {", ".join(given)}, and it {found}; '
        f'its parameters are ({", ".join(parameters)}), style = "{AUTO}" goes by them'
    )


def needed_columns(function: Callable[..., Any], style: str = AUTO) -> list[str]:
    """Return the columns of a prompt's row without which a reward function cannot be called.

    Args:
        function: The function.
        style: `RewardStyle` of its table.
    """
    if (signature := _signature(function)) is None:
        return []
    trainer, parameters = trainer_of(function, style), signature.parameters
    if trainer:
        # verl's are empty without a column.
        given, named = {*_GIVEN[trainer][1], ANSWER}, named_in(parameters) if trainer == "TRL" else []
    else:
        given, named = {*REWARD_KEYWORDS, RESPONSE, PROMPT, ANSWER, *VISION_KEYWORDS}, keywords_of(parameters)
    return [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in given]


def named_in(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the parameters that can be given by name."""
    kinds = inspect.Parameter
    return [name for name, one in parameters.items() if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]


def keywords_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the parameters that a call gives by name: all but the first two positional ones, tokens and mask."""
    kinds = inspect.Parameter
    positional = [
        name for name, one in parameters.items() if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    return [name for name in named_in(parameters) if name not in positional[:2]]


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function or module; None if it has none, as some functions written in C."""
    try:
        return inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        return None


def _location(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def trainer_of(function: Callable[..., Any], style: str = AUTO) -> str:
    """Return the trainer as whose a reward function is called: TRL, verl, OpenRLHF; empty for this project's.

    Args:
        function: The function.
        style: `RewardStyle` of its table: "auto" goes by the signature.
    """
    if style != AUTO:
        return _TRAINERS[style]
    names = set(signature.parameters if (signature := _signature(function)) else ())
    if "input_ids" in names:
        return ""
    return next((trainer for theirs, trainer in _SIGNATURES_ELSEWHERE if theirs <= names), "")


def problem_of_factory(factory: Callable[..., Any]) -> str:
    """Return the reason why the factory of an environment cannot be called without arguments, else an empty text."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        return f"cannot be called without arguments: {error}"
    except ValueError:
        # Some callables written in C have no signature.
        return ""
    return ""


def problems_of_import(
    functions: Sequence[tuple[str, str]], searched: Sequence[str], columns: Sequence[str] | None = None
) -> list[str]:
    """Import each ``module:function`` in a process of its own, with its output discarded; return the problems.

    Args:
        functions: The functions, each with the `RewardStyle` by which its parameters are checked, `FACTORY` or `ANY`.
        searched: Folders that are searched after the installed modules.
        columns: The further columns of the first prompts, for reward functions; None: they are not known.
    """
    names = ", ".join(name for name, _ in functions)
    wanted = json.dumps([functions, searched, columns])
    # Standard output is the modules': they print what they like, at their end too, or start a program that keeps it.
    with tempfile.TemporaryFile() as file:
        command = [sys.executable, "-P", "-m", __name__, wanted, str(file.fileno())]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[file.fileno()], timeout=_IMPORT_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [f"{names}: not imported within {_IMPORT_TIMEOUT_S:g} s"]
        file.seek(0)
        answer = file.read()
    if not answer:
        return [f"{names}: the import ended the process with exit code {done.returncode}"]
    problems: list[str] = json.loads(answer)
    return problems


def _problem_of(name: str, style: str, columns: Sequence[str] | None) -> str:
    try:
        found = load_function("", name)
    except ConfigError as error:
        return str(error)
    if style == ANY:
        return ""
    problem = problem_of_factory(found) if style == FACTORY else problem_of_call(found, style)
    if not problem and columns is not None:
        missing = [column for column in needed_columns(found, style) if column not in columns]
        known = ", ".join(columns) or "no further columns"
        problem = (
            f"needs the column {missing[0]!r}{_location(found)}, the first prompts have {known}" if missing else ""
        )
    return f"{name} {problem}" if problem else ""


if __name__ == "__main__":
    wanted, searched, known = json.loads(sys.argv[1])
    extend_path(searched)
    found = [problem for each, style in wanted if (problem := _problem_of(each, style, known))]
    os.write(int(sys.argv[2]), json.dumps(found).encode())
