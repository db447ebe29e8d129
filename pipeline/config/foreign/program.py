"""The options of a Python program of TRL: the arguments of its `GRPOConfig`, and of the calls beside it.

Nothing is executed: a value is read where the program writes it out, at its place or under a name that it sets once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError

_OPTIONS: Final = ("GRPOConfig", "ModelConfig", "ScriptArguments", "GRPOScriptArguments", "DatasetMixtureConfig")
_TRAINER: Final = "GRPOTrainer"
_OF_TRAINER: Final = {"model": "model_name_or_path", "reward_funcs": "reward_funcs"}
_READ_ELSEWHERE: Final = ("args", "train_dataset", "processing_class", "peft_config")
_OF_ADAPTERS: Final = {
    name: name if name.startswith(("use_", "lora_")) else f"lora_{name}"
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "modules_to_save",
                 "use_rslora", "use_dora")
}  # fmt: skip
_PEFT_DEFAULTS: Final = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_NO_CHANGE: Final = {"bias": ("none",), "task_type": ("CAUSAL_LM", "peft.TaskType.CAUSAL_LM")}
_OF_DATA: Final = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
_CHANGES_OF_DATA: Final = ("map", "filter", "select", "rename_column", "remove_columns", "cast")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


class Computed(str):
    """The text of a value that is known only to the program that computes it.

    Attributes:
        reason: Why it is not carried.
    """

    reason = "the program computes it: write the value into the file"


class _OfTraining(Computed):
    reason = "an import of this program would train: move its functions to a module of their own"


def of_program(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a program, with the names that they have as options of `trl grpo`.

    Args:
        path: Its file, the module of the functions that it defines.
        text: Its text.

    Raises:
        ConfigError: If it is no Python, or calls another trainer alone.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # Some errors of syntax have no place, such as a byte of 0.
        place = f":{error.lineno}:{error.offset}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{path}{place}: {getattr(error, 'msg', error)}") from error
    values = _Values(path.stem, tree)
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda call: call.lineno)
    called = {_called(call) for call in calls}
    others = [name for name in sorted(called) if name.endswith("Trainer")]
    if others and called.isdisjoint(("GRPOConfig", _TRAINER)):
        raise ConfigError(f"{path}: a run of `{others[0]}`; of TRL those of `{_TRAINER}` are converted")
    data = [call for call in calls if _called(call) == "load_dataset"]
    for call in calls:
        name = _called(call)
        given = {one.arg or f"**{ast.unparse(one.value)}": one.value for one in call.keywords}
        if name in _OPTIONS:
            # The first parameter of all training arguments.
            yield from (("output_dir", values.of(value)) for value in call.args[:1] if name == "GRPOConfig")
            yield from ((arg, values.of(value)) for arg, value in given.items())
        elif name == "LoraConfig":
            yield from _PEFT_DEFAULTS.items()
            for arg, value in given.items():
                if values.of(value) not in _NO_CHANGE.get(arg, ()):
                    yield _OF_ADAPTERS.get(arg, f"LoraConfig.{arg}"), values.of(value)
        elif name == _TRAINER:
            given = dict(zip(_OF_TRAINER, call.args, strict=False)) | given
            yield from ((_OF_TRAINER.get(arg, f"{name}.{arg}"), values.of(value))
                        for arg, value in given.items() if arg not in _READ_ELSEWHERE)  # fmt: skip
        elif name in _CHANGES_OF_DATA and data and isinstance(call.func, ast.Attribute):
            # The files are read as they are.
            yield ast.unparse(call), None
    if data:
        yield from _of_data(data[0], values)


def _of_data(call: ast.Call, values: _Values) -> Iterator[tuple[str, Any]]:
    found = {name: values.of(value) for name, value in zip(_OF_DATA, call.args, strict=False)}
    found |= {one.arg or f"**{ast.unparse(one.value)}": values.of(one.value) for one in call.keywords}
    if "data_files" in found:
        yield "datasets", [found]
        return
    yield from ((f"load_dataset.{name}", value) for name, value in found.items() if name not in _OF_DATA)
    yield from ((option, found[name]) for name, option in _OF_DATA.items() if name in found)


class _Values:
    """The values of a program's expressions."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self._assigned: dict[str, list[ast.expr]] = {}
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self._assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.ImportFrom):
                of = f"{node.module}." if node.module else ""
                self._names |= {one.asname or one.name: f"{of}{one.name}" for one in node.names}
            elif isinstance(node, ast.Import):
                self._names |= {one.asname: one.name for one in node.names if one.asname}
        self._own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, _FUNCTIONS)}
        self._trains = any(
            isinstance(inner, ast.Call) and _called(inner) == _TRAINER
            for node in tree.body
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.If))
            for inner in ast.walk(node)
        )

    def of(self, node: ast.expr) -> Any:
        """Return a value, the dotted name of an imported thing, or else the text of the expression."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.of(one) for one in node.elts]
            case ast.Dict() if all(key is not None for key in node.keys):
                return {
                    str(self.of(key)): self.of(one)
                    for key, one in zip(node.keys, node.values, strict=True)
                    if key is not None
                }
            case ast.Name(id=name) if name in self._own:
                return (_OfTraining if self._trains else str)(self._own[name])
            case ast.Name(id=name) if len(self._assigned.get(name, ())) == 1:
                # Once: a name that is set by itself has no value.
                (value,) = self._assigned.pop(name)
                found = self.of(value)
                self._assigned[name] = [value]
                return found
            case ast.Name() | ast.Attribute() if dotted := self._dotted(node):
                return dotted.removeprefix("torch.")
            case ast.Call(args=[folder, *_]) if _called(node) == "from_pretrained":
                return self.of(folder)
            case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr="to" | "cuda" | "eval" | "train")):
                return self.of(made)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Computed(ast.unparse(node))

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            of = self._dotted(node.value)
            return f"{of}.{node.attr}" if of else ""
        if not isinstance(node, ast.Name) or node.id in self._assigned:
            return ""
        return self._names.get(node.id, node.id if node.id == "torch" else "")


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
