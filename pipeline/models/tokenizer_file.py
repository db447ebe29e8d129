"""The tokenizer of a model's folder as its files are: the tokens of tokenizer.json, and byte for byte in checkpoints.

transformers builds the pipeline of many classes anew, from the vocabulary of tokenizer.json alone. The class is that of
tokenizer_config.json, or that of the model's type. Where it and the file disagree, its tokens are others than those the
model was trained with, or texts lose their spaces, silently. So both are compared on some texts, and the file's
pipeline is taken where they differ.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FILE: Final = "tokenizer.json"
_COPIED: Final = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*.json", "vocab*.txt", "merges.txt",
    "*.model", "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates/*.jinja",
    "*preprocessor_config.json", "processor_config.json", "normalizer.json", "bpe.codes",
)  # fmt: skip
_TEXTS: Final = {
    "spaces": "one two  three   four ",
    "a space at the start": " start",
    "newlines": "one\ntwo\n\nthree\r\n\tfour\n",
    "digits": "1234567890 12 + 3.14 = 007",
    "words": "don't I'll HTTPServer snake_case x1y2 e.g. (a) [b] {c};",
    "accents": "naïve café e\u0301 Ünïcödé ﬁ",
    "other scripts": "日本語 한국어 русский العربية ไทย",
    "emoji": "\N{GRINNING FACE} \N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}",
    "code": "def f(x):\n    return x ** 2  # <b>&amp;</b> https://a.b/c?d=e\n",
}
_MOST_ADDED: Final = 64
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def as_in_file(tokenizer: PreTrainedTokenizerBase | None, path: Path, field: str) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer whose tokens are those of the folder's tokenizer.json.

    Args:
        tokenizer: As transformers built it; None if its class cannot be built from the file.
        path: The folder. Without a tokenizer.json there is nothing to compare.
        field: The configuration field that names it, for the error message.

    Returns:
        The same tokenizer, or one with the file's own pipeline.

    Raises:
        ConfigError: If tokenizer.json cannot be read, or transformers reads it otherwise in any way.
    """
    from tokenizers import Tokenizer

    if not (path / _FILE).is_file():
        return tokenizer
    try:
        file = Tokenizer.from_file(str(path / _FILE))
    # The library's errors have no class of their own.
    except Exception as error:
        raise ConfigError(f"{field}: {path / _FILE} cannot be read as a tokenizer: {error}") from error
    described = json_object(path / "tokenizer_config.json")
    # Where tokenizer_config.json has a say in the tokens at the ends of a text, the file alone does not decide on them.
    with_ends = "add_bos_token" not in described and "add_eos_token" not in described
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is not None and backend is None:
        return tokenizer
    different = "any text" if backend is None else _difference(backend, file, with_ends=with_ends)
    if not different:
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    built: Any = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    if still := _difference(built.backend_tokenizer, file, with_ends=with_ends):
        raise ConfigError(
            f"{field}: transformers does not make the tokenizer that {path / _FILE} describes: it reads {still} "
            "otherwise, also without the class that tokenizer_config.json names; compare both with the model's own"
        )
    _take_names(built, tokenizer)
    name = described.get("tokenizer_class") if tokenizer is None else type(tokenizer).__name__
    log.warning("the tokenizer is that of tokenizer.json, the class that transformers takes reads it otherwise: "
                "class=%s differs_in=%s path=%s", name, different, path)  # fmt: skip
    result: PreTrainedTokenizerBase = built
    return result


def _difference(built: Any, file: Any, *, with_ends: bool) -> str:
    """Return the kind of text that two pipelines read otherwise; empty if there is none."""
    for kind, text in _texts(file):
        ids = _ids(file, text, with_ends=False)
        if _ids(built, text, with_ends=False) != ids:
            return kind
        if ids is None:
            continue
        if built.decode(ids, skip_special_tokens=False) != file.decode(ids, skip_special_tokens=False):
            return f"the decoding of {kind}"
        if with_ends and _ids(built, text, with_ends=True) != _ids(file, text, with_ends=True):
            return "tokens at the ends of a text"
    return ""


def _ids(pipeline: Any, text: str, *, with_ends: bool) -> list[int] | None:
    """Return the ids of a text; None if the pipeline cannot read it: a vocabulary of few letters, no unknown token."""
    try:
        ids: list[int] = pipeline.encode(text, add_special_tokens=with_ends).ids
    # The library's errors have no class of their own.
    except Exception:  # noqa: BLE001
        return None
    return ids


def _texts(file: Any) -> Iterator[tuple[str, str]]:
    yield from _TEXTS.items()
    for added in list(file.get_added_tokens_decoder().values())[:_MOST_ADDED]:
        yield f"the token {added.content}", f"a {added.content} b{added.content}c\n{added.content}\n"


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file cannot be read, or holds anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _take_names(built: Any, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Give special tokens the names that only the class has, if the file has such tokens."""
    vocabulary = built.get_vocab()
    for name in _SPECIAL:
        token = getattr(tokenizer, name, None)
        if getattr(built, name) is None and token in vocabulary:
            setattr(built, name, token)


class TokenizerFiles:
    """The files of a model's folder that make its texts: of tokenizer, chat templates and image processor.

    They are read now, and written as they were: a trainer never loads an image processor, and rlhfd's own padding is no
    part of the model.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        found = {file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()}
        self._files = {file.relative_to(folder): file.read_bytes() for file in sorted(found)}

    def save_pretrained(self, path: str | Path) -> None:
        """Write the files into a folder."""
        for name, content in self._files.items():
            file = Path(path) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
