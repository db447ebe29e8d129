r"""Text for math-verify: quantities as the library reads them, without currency, units and notations that it misreads.

    \boxed{18 dollars}, \$18, 18\text{ cm}^2 -> 18        1e5, 1 \times 10^5, 100{,}000 -> 100000
    \boxed{5 million} -> 5000000                          50 percent -> 50\%        90° -> 90

Units are left out, never converted: 5 km equals 5 m.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import Final

_CURRENCY: Final = r"(?:US\$|[A-Z]{2}\$|[$€£¥₹₽₩₪฿₫₴₺]|USD|EUR|GBP|JPY|INR|CAD|AUD|CHF|CNY|RMB|Rs\.?)"
_TEXT: Final = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*\{"
_ABOUT: Final = r"(?:\\approx|\\sim|≈|~|=|about|approximately|approx\.?|roughly|around|nearly|exactly|only)"
_NUMBER: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d\d)+,\d{3}|\d{1,3}(?:\ \d{3})+|\d+)(?:\.\d+)?|\.\d+"
_CONSTANT: Final = r"\s*(?:(?:\\pi|π)(?![A-Za-z])|\\sqrt\s*\{\s*\d+\s*\})"
_POWER: Final = (
    r"(?:[eE](?P<e>[+-]?\d+)|\s*(?:\\times|\\cdot|[×·*x])\s*10\s*"
    r"(?:\^\s*\{\s*(?P<braced>[+-]?\d+)\s*\}|\^\s*(?P<bare>[+-]?\d+)))"
)
_FRACTION: Final = r"\\[dt]?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+(?![\d.])"
_QUANTITY: Final = re.compile(
    rf"""(?P<name>[A-Za-z](?:_\{{?\w+\}}?)?\s*=\s*)? (?:{_ABOUT}\s*)?
    (?P<sign>[+-]?)\s* {_CURRENCY}?\s* (?P<inner>-?)\s*
    (?: (?P<fraction>{_FRACTION}) | (?P<number>{_NUMBER}) (?:{_POWER}(?![\d.]))? (?P<constant>{_CONSTANT})? )
    (?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_SCIENTIFIC: Final = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.]*\w)")
_TIMES_TEN: Final = re.compile(
    r"(?<![\w.\\^{},/:÷])(\d+(?:\.\d+)?|\.\d+)\s*(?:\\times|\\cdot|[×·*x])\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
)
_UNIT_PART: Final = re.compile(
    rf"""(?P<space>\s+) | {_TEXT}(?P<text>[^{{}}\d]*)\}} | (?P<circle>\^\s*\{{?\s*\\circ\s*\}}?|\\degree|°)
    | (?P<power>\^\s*(?:\{{\s*-?\d\s*\}}|-?\d)|[²³]) | (?P<percent>\\?%) | (?P<currency>{_CURRENCY}(?![A-Za-z]))
    | (?P<word>[A-Za-zµμΩ]+(?:['’.-][A-Za-z]+)*\.?) | (?P<sign>[/·*,()]|\\cdot|\\times)""",
    re.VERBOSE,
)
_UNITS: Final = re.compile(
    "km|cm|mm|dm|nm|ft|yd|mi|in|kg|mg|lbs?|oz|gal|qt|pt|ml|mL|dL|cl|ms|ns|mins?|secs?|hrs?|yrs?|days?|mph|kph|kmh|rpm|Hz|"
    "kHz|MHz|GHz|kW|kWh|MW|Pa|kPa|MPa|atm|mol|rad|deg|sq|cu|cc|cts?|am|pm|kB|KB|MB|GB|TB|per|of|the|an|and|men|man|boys?|"
    "girl|cups?|cans?|box|cars?|cats?|dogs?|eggs?|toys?|bags?|pies?|hats?|pens?|pigs?|cows?|hens?|bus|tons?|ways?|rows?|"
    "jobs?|kids?|jars?|bill|cent|buck|won|yen"
)
"""Words that are a unit, or part of one, although they are short."""
_LETTERS: Final = frozenset("mgshlLWVAJNKCF")
"""Units of one letter, which beside a number alone may be a variable."""
_NO_UNITS: Final = re.compile(
    "sqrt|frac|theta|alpha|beta|gamma|delta|lambda|sigma|omega|infinity|infty|times|plus|minus|cdot|over|root|choose|"
    "equals|divided|none|false|true|undefined"
)
_FACTORS: Final = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_PERCENT: Final = frozenset(("percent", "percentage", "pct", "pct.", "%", "\\%"))
_PART: Final = "half|third|fifth|tenth|hundredth|thousandth"
_PARTS: Final = "halves|thirds|fifths|tenths|hundredths|thousandths"
_COUNT: Final = (
    "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    r"eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:-\w+)?"
)
_CHANGES: Final = re.compile(
    rf"""^\s* (?: (?:squared|cubed|factorial|{_PARTS})\b | (?:{_PART})\s*$ )
    | (?<![\w-]) (?: or|plus|minus|maybe|is\s+wrong | below\s+(?:zero|sea) | and\s+(?:an?\s+)?(?:quarter|{_PART})
    | (?:and|times|over|choose|point|negative)\s+{_COUNT} ) (?![\w-])""",
    re.VERBOSE | re.IGNORECASE,
)
"""Words that make another number of the one before them; not those of "8 quarters", "5 more", "3 negative roots"."""
_SPACES: Final = re.compile(r"\\[,;:! ]|\\q?quad\b|~|[\u00a0\u2009\u202f]")
_MARKS: Final = re.compile(r"(\$\$|\\\(|\\\[)((?:[^$\\]|\\(?![()\[\]]))+)(\$\$|\\\)|\\\])")
_MOST_EXPONENT: Final = 400
_EXACT: Final = Context(prec=4000)
_MOST_DIGITS: Final = 1000


def quantity_of(text: str) -> str:
    """Return a text that is one number with its currency and units as LaTeX without these; empty for any other text.

    Args:
        text: Such as the content of a box, or an answer; marks around it are left out.
    """
    found = _QUANTITY.fullmatch(_bare(text))
    if found is None:
        return ""
    unit = _unit(found["rest"])
    if unit is None:
        return ""
    factor, percent = unit
    sign = "-" if (found["sign"] == "-") != (found["inner"] == "-") else ""
    name = found["name"] or ""
    if found["fraction"]:
        return f"{name}{sign}{found['fraction']}{percent}" if factor == 1 else ""
    exponent = int((found["e"] or found["braced"] or found["bare"] or "0")[:9])
    if abs(exponent) > _MOST_EXPONENT:
        return ""
    digits = found["number"].replace(",", "").replace(" ", "")
    if len(digits) > _MOST_DIGITS:
        return ""
    value = digits if not exponent and factor == 1 else _scaled(digits, exponent, factor)
    return f"{name}{sign}{value}{found['constant'] or ''}{percent}"


def prepared(text: str) -> str:
    """Return a text with the quantities in its boxes and between its dollars as the library reads them."""
    text = re.sub(r"\\textbf\s*\{([^{}]*)\}", r"\1", text.replace("\\fbox", "\\boxed"))
    text = _dollars(_boxes(text))
    return _TIMES_TEN.sub(_decimal, _SCIENTIFIC.sub(_decimal, text))


def changed_of(text: str) -> str:
    r"""Return a text that is a number and words that make another one of it, as "2 and a half"; empty for any other.

    Its words are plain: in `\text{...}` the library skips them, and reads 2.
    """
    bare = _bare(text)
    found = _QUANTITY.fullmatch(bare)
    is_changed = found is not None and not re.search(r"\d", found["rest"]) and _CHANGES.search(_words(found["rest"]))
    return _words(bare) if is_changed else ""


def is_prose(text: str) -> bool:
    """Return whether a text has two words in a row, commands of LaTeX aside."""
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,},?\s+[A-Za-z]{2,}", text) is not None


def _bare(text: str) -> str:
    r"""Return a text without marks around it: ``$ $``, ``\( \)``, boxes, bold, a full stop; spaces and signs plain."""
    text = _SPACES.sub(" ", text).replace("{,}", ",").replace("\\$", "$").replace("−", "-").replace("–", "-")
    while True:
        before = text
        text = text.strip().rstrip(".,;").rstrip()
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__")):
            inner = text[len(opening) : len(text) - len(closing)]
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = inner if opening not in inner else text
        for command in ("\\boxed{", "\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "{"):
            if text.startswith(command) and _closing(text, len(command)) == len(text) - 1:
                text = text[len(command) : -1]
        # `\text{about }5`
        text = re.sub(rf"^{_TEXT}\s*({_ABOUT}|{_CURRENCY})\s*\}}", r"\1 ", text)
        if text == before:
            return text


def _words(text: str) -> str:
    r"""Return a text with that of each `\text{...}` as plain words."""
    return re.sub(rf"{_TEXT}([^{{}}]*)\}}", r" \1 ", text)


def _unit(rest: str) -> tuple[int, str] | None:
    """Return the factor and the percent sign of the text behind a number; None if it is no unit."""
    factor, percent, at, behind_circle, is_leading = 1, "", 0, False, True
    if _CHANGES.search(_words(rest)):
        return None
    is_compound = re.search(r"[/²³^]", rest) is not None
    while at < len(rest):
        part = _UNIT_PART.match(rest, at)
        if part is None:
            return None
        kind, is_glued = part.lastgroup, at == 0
        words = re.findall(r"\\?%|[A-Za-z]+\.?", part["text"]) if kind == "text" else [part[0]]
        for word in words if kind in ("word", "text", "percent") else ():
            if word.lower() in _PERCENT:
                percent = "\\%"
            # Of "6 eggs per dozen" it is none.
            elif is_leading and word.lower() in _FACTORS:
                factor *= _FACTORS[word.lower()]
            else:
                is_leading = False
                if kind == "word" and not _is_unit(word.rstrip("."), is_compound, is_glued, behind_circle):
                    return None
        if kind == "sign" and is_glued:
            return None
        behind_circle = kind == "circle" or (behind_circle and kind == "space")
        # A power belongs to a unit: the one of a number alone is another number.
        if kind == "power" and not rest[:at].strip():
            return None
        at = part.end()
    return factor, percent


def _is_unit(word: str, is_compound: bool, is_glued: bool, behind_circle: bool) -> bool:
    if _UNITS.fullmatch(word) or _UNITS.fullmatch(word.lower()):
        return True
    if word in _LETTERS and (behind_circle or (is_compound and not is_glued)):
        return True
    return not is_glued and (word == "a" or (len(word) > 3 and not _NO_UNITS.fullmatch(word.lower())))


def _closing(text: str, at: int) -> int:
    """Return where the brace ends that is open before `at`; -1 if it does not."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return -1


def _boxes(text: str) -> str:
    """Return a text with the content of each box as a quantity if it is one, and without boxes in boxes."""
    text = re.sub(r"\\boxed\s+(?!\{)([^\s$\\]+)", r"\\boxed{\1}", text)
    parts, at = [], 0
    for box in re.finditer(r"\\boxed\s*\{", text):
        if box.start() < at or (end := _closing(text, box.end())) < 0:
            continue
        content = text[box.end() : end]
        read = quantity_of(content) or changed_of(content) or _unboxed(content)
        parts += [text[at : box.start()], f"\\boxed{{{read}}}"]
        at = end + 1
    return "".join([*parts, text[at:]])


def _unboxed(content: str) -> str:
    for character, command in {"~": " ", "²": "^2", "³": "^3", "°": "^{\\circ}", "π": "\\pi "}.items():
        content = content.replace(character, command)
    return re.sub(r"\\boxed\s*(?=\{)", "", content)


def _dollars(text: str) -> str:
    """Return a text without the dollars that are a currency, and with quantities between those that are marks.

    A mark is one by Pandoc's rule: no space behind the opening one, none before the closing one, no digit behind that.
    """
    text = _MARKS.sub(_marked, text.replace("\\$", ""))
    parts, at = [], 0
    for dollar in re.finditer(r"(?<!\$)\$(?!\$)", text):
        start = dollar.start()
        if start < at:
            continue
        end = text.find("$", start + 1)
        content = text[start + 1 : end]
        if end > 0 and text[end : end + 2] != "$$" and "\n\n" not in content and content.strip():
            opens, closes = not content[0].isspace(), not content[-1].isspace()
            is_mark = opens and closes and not text[end + 1 : end + 2].isdigit()
            if is_mark or not (opens or closes):
                parts += [text[at:start], f"${quantity_of(content) or changed_of(content) or content}$"]
                at = end + 1
                continue
        if re.match(r"\s?-?\.?\d", text[start + 1 : start + 4]):
            parts.append(text[at:start])
            at = start + 1
    return "".join([*parts, text[at:]])


def _marked(found: re.Match[str]) -> str:
    read = quantity_of(found[2]) or changed_of(found[2])
    return f"{found[1]}{read}{found[3]}" if read else found[0]


def _decimal(found: re.Match[str]) -> str:
    exponent = int((found[2] or found[found.re.groups])[:9])
    return found[0] if abs(exponent) > _MOST_EXPONENT or len(found[1]) > _MOST_DIGITS else _scaled(found[1], exponent)


def _scaled(digits: str, exponent: int, factor: int = 1) -> str:
    """Return digits times a power of ten and a factor, without an exponent."""
    value = f"{_EXACT.multiply(_EXACT.scaleb(Decimal(digits), exponent), Decimal(factor)):f}"
    return value.rstrip("0").rstrip(".") if "." in value else value
