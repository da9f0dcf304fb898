r"""Numbers as people write them, read exactly: `-$5`, `1,234.`, `10{,}000`, `\frac{3}{4}`, `1.2 x 10^3`, `50%`, `5 km`.

Every pattern is possessive or bounded, so that reading takes time linear in the text, and only the number that counts
is worked out.
"""

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from trainer.rewards.number_text import NO_BREAK, boxed, fold, is_sign, without_latex

_MAX_DIGITS = 4000
"""A number of more digits, written out or by its exponent, is not read: no one means it, and it takes long."""
_TOLERANCE = Fraction(1, 10**6)


class Number(NamedTuple):
    """A value as written, so that 50% has the value 50, and whether a percent sign is behind it."""

    value: Fraction
    percent: bool = False


def equal(a: Number, b: Number) -> bool:
    """Integers exactly, others to one in a million. One percentage alone counts as its number or as its hundredth."""
    if a.percent == b.percent:
        return _close(a.value, b.value)
    share, plain = (a.value, b.value) if a.percent else (b.value, a.value)
    return _close(share, plain) or _close(share / 100, plain)


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))


def last_number(text: str) -> Number | None:
    r"""The number in the last `\boxed{}`, if there is one, else the last number of the text.

    None if there is none, if the box holds anything but one number, or if what comes last is an expression that is not
    a number written out (`\sqrt{2}`, `\pm 3`, `\pi/2`, `1/2/3`, `1/0`), or part of something else (`12:30`, `3:2`,
    `5k`, `5 and a half`, `12,34,567`).
    """
    folded = fold(text)
    box = boxed(folded)
    if box is not None:
        return _single(box)
    last = None
    for token in _TOKEN.finditer(_without_brackets(without_latex(folded))):
        if token["word"] is None:
            last = token
    return None if last is None or _is_part(last) else _value(last)[0]


def single_number(answer: Any) -> Number | None:
    r"""The one number that an answer is: an int, a float, or a text such as `72`, `$5`, `x = 5`, `5 km`, `\frac12`.

    Of a text with `####` (as in GSM8K) what follows the last of them counts, of one with `\boxed{}` what is inside the
    last. None for anything else: a bool, nan, two numbers, an expression.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        return None
    if isinstance(answer, int):
        return Number(Fraction(answer))
    if isinstance(answer, float):
        return Number(Fraction(Decimal(repr(answer)))) if math.isfinite(answer) else None
    folded = fold(answer.rsplit("####", 1)[-1])
    box = boxed(folded)
    return _single(folded if box is None else box)


_RUN = rf"(?:[0-9]++(?:[.,_'{NO_BREAK}][0-9]++)*+|(?<![\w.)])\.[0-9]++)"
_POWER = r"(?:\s?\^\s?(?:\{[^{}]{0,30}\}|\([^()]{0,30}\)|[-+]?[0-9]++|[A-Za-z])|\*\*[-+]?[0-9]++)"
_ATOM = rf"{_RUN}(?:[eE][-+]?[0-9]++)?+{_POWER}?+(?:\s?[*xX]\s?10{_POWER})?+"
_ATOM_PARTS = re.compile(
    rf"(?P<run>{_RUN})(?:[eE](?P<exponent>[-+]?[0-9]++))?+(?P<power>{_POWER})?+(?:\s?[*xX]\s?10(?P<ten>{_POWER}))?+"
)
_ARGUMENT = rf"(?:\{{\s?[-+]?\s?{_ATOM}\s?\}}|[0-9])"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}+\}){0,200}+\}){0,200}+\}"
_FUNCTIONS = "sqrt|pm|mp|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan"
_MINUS = r"(?:-|(?i:minus|negative)(?=\s))"

_TOKEN = re.compile(
    rf"""
    (?:(?P<minus>{_MINUS})\s{{0,2}}(?:[$€£¥₹({{]\s?){{0,3}})?
    (?:
        (?P<mixed>[0-9]++\s{{0,2}})?\\[dtc]?frac\s?(?P<top>{_ARGUMENT})\s?(?P<bottom>{_ARGUMENT})
      | (?P<whole>[0-9]++)\s{{1,2}}(?P<part>[0-9]++)\s?/\s?(?P<parts>[0-9]++)(?![0-9.,]|\s?/\s?[0-9])
      | (?P<atom>{_ATOM})(?P<over>(?:\s?/\s?[-+]?{_ATOM})*+)
    )
    (?:\s?(?P<scale>(?i:hundred|thousand|million|billion|trillion)(?![A-Za-z])))?+
    (?:\s?(?P<percent>%|(?i:percent|per\scent)\b))?+
  | (?P<expression>
        \\(?:{_FUNCTIONS})(?![A-Za-z])(?:\s?_\s?(?:\w|{_GROUP}))?(?:\s?\[[^\[\]]{{0,20}}\])?\s?(?:{_GROUP}|{_ATOM})?
      | \\[dt]?(?:frac|binom)\s?(?:{_GROUP}|\w)?\s?(?:{_GROUP}|\w)?
      | \\(?:pi|infty)(?![A-Za-z])
      | /\s?[-+({{$]?\s?{_ATOM}
      | \^\s?(?:\{{[^{{}}]{{0,30}}\}}|[-+]?\w)
      | (?<=[A-Za-z0-9)}}])_\{{?[A-Za-z0-9]++\}}?
    )
  | (?P<word>
        \\[A-Za-z]++
      | (?!{_MINUS}\s)[A-Za-z]++(?:_\{{?[A-Za-z0-9]++\}}?|[0-9][A-Za-z0-9]*+)?+{_POWER}?+
    )
    """,
    re.VERBOSE,
)
_FIRST_GROUP = re.compile("[1-9][0-9]{0,2}")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_OPERATOR = re.compile(r"[-+*/^<>|!_\\]")
_PLUS = re.compile(r"[($€£¥₹\s]*+\+\s?(?=[$€£¥₹({\\.0-9])")
_BRACKETS = re.compile(
    rf"(?<![\w)\]}}.])\(\s?(?P<top>[-+]?\s?{_RUN})\s?\)(?=\s?/)|/\s?\(\s?(?P<bottom>[-+]?\s?{_RUN})\s?\)(?!\s?[*^!])"
)
_COLON = re.compile(r"[0-9](?:\s:\s|:)\Z")
_BEHIND = re.compile(
    r"(?:[kKMBT]|[bmt]n)(?![A-Za-z])|\s(?i:dozens?\b|and\s(?:an?|one|two|three|[0-9]++)[\s-]"
    r"(?:half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?\b)"
)
"""Behind a number it makes another of it: thousands, millions and so on, dozens, and fractions in words."""
_UNIT = re.compile(r"(?:[mgshlLtJNWVACFd]|[A-Za-z]{2,})(?:\^.*)?")
"""What may stand directly behind a single number: other letters are variables, as in 2x."""


def _without_brackets(text: str) -> str:
    """(-3)/4 and 3/(-4) as -3/4 and 3/-4."""
    return _BRACKETS.sub(lambda found: found["top"] or f"/{found['bottom'].replace(' ', '')}", text)


def _is_part(token: re.Match[str]) -> bool:
    """Whether a number is part of a time, a ratio, or a number that goes on in letters."""
    before = token.string[max(0, token.start() - 4) : token.start()]
    return _COLON.search(before) is not None or _BEHIND.match(token.string, token.end()) is not None


def _single(folded: str) -> Number | None:
    """The number of a text that has one, and beside it nothing but words, units and at most one `... =` before it."""
    sides = without_latex(folded).split("=")
    if len(sides) > 2:
        return None
    text = _without_brackets(sides[-1].strip("*_`\"' \n"))
    plus = _PLUS.match(text)
    text = text if plus is None else plus[0].replace("+", "") + text[plus.end() :]
    found: re.Match[str] | None = None
    end, after_word = 0, False
    for token in _TOKEN.finditer(text):
        is_word, gap = token["word"] is not None, text[end : token.start()]
        compound = after_word and is_word and gap in ("-", "/")  # kilowatt-hours, km/h
        if _OPERATOR.search(gap) and not compound:
            return None
        if is_word:
            attached = found is not None and token.start() == found.end()
            if token[0].startswith("\\") or (attached and not _UNIT.fullmatch(token[0])):
                return None
        elif found is not None:
            return None
        else:
            found = token
        end, after_word = token.end(), is_word
    if found is None or _OPERATOR.search(text[end:]) or _is_part(found):
        return None
    if found["minus"] is not None and not _is_negative(found):  # x - 5
        return None
    number, alone = _value(found)
    return number if alone else None


def _value(token: re.Match[str]) -> tuple[Number | None, bool]:
    """A number's token to its number, and whether the token holds no other numbers, as `3,4` does."""
    if token["expression"] is not None:
        return None, False
    value, alone = _magnitude(token)
    if value is None:
        return None, False
    value *= _SCALES.get((token["scale"] or "").lower(), 1)
    return Number(-value if _is_negative(token) else value, token["percent"] is not None), alone


def _is_negative(token: re.Match[str]) -> bool:
    return token["minus"] is not None and is_sign(
        token.string, token.start("minus"), spaced=token.string[token.end("minus")].isspace()
    )


def _magnitude(token: re.Match[str]) -> tuple[Fraction | None, bool]:
    if token["atom"] is not None:
        value, alone = _atom(token["atom"])
        divisors = token["over"].split("/")[1:]
        if not divisors or value is None:
            return value, alone
        divisor, divisor_alone = _atom(divisors[0]) if len(divisors) == 1 else (None, False)
        return (value / divisor if divisor else None), alone and divisor_alone
    top, bottom, whole = (
        (token["part"], token["parts"], token["whole"])
        if token["whole"] is not None
        else (token["top"], token["bottom"], token["mixed"])
    )
    numerator, denominator = (_atom(side[1:-1] if side.startswith("{") else side)[0] for side in (top, bottom))
    if numerator is None or not denominator:
        return None, False
    fraction = numerator / denominator
    if whole is None:
        return fraction, True
    if 0 < fraction < 1:
        integer = _decimal(whole.strip(), "0")
        return (None if integer is None else integer + fraction), True
    # no mixed number: two numbers side by side, or a product
    return (fraction if token["whole"] is not None else None), False


def _atom(text: str) -> tuple[Fraction | None, bool]:
    text = text.strip()
    parts = _ATOM_PARTS.fullmatch(text.lstrip("+-").lstrip())
    assert parts is not None, text
    digits, alone = _digits(parts["run"])
    value = None if digits is None else _decimal(digits, parts["exponent"] or "0")
    if value is not None and parts["power"] is not None:
        value = _power(value, parts["power"])
    if value is not None and parts["ten"] is not None:
        ten = _power(Fraction(10), parts["ten"])
        value = None if ten is None else value * ten
    return (-value if value is not None and text.startswith("-") else value), alone


def _digits(run: str) -> tuple[str | None, bool]:
    """Digits with at most one point, of a run of digits and separators, and whether it is one number."""
    pieces = re.split(f"([.,_'{NO_BREAK}])", run)
    groups, separators = pieces[::2], pieces[1::2]
    thousands = separators[:-1] if separators and separators[-1] == "." else separators
    if not thousands:
        return run, True
    kinds = set(thousands)
    grouped = groups[1 : len(thousands) + 1]
    if len(kinds) == 1 and "." not in kinds and _FIRST_GROUP.fullmatch(groups[0]) and {*map(len, grouped)} == {3}:
        whole = "".join(groups[: len(thousands) + 1])
        return (whole if thousands is separators else f"{whole}.{groups[-1]}"), True
    if kinds & {"_", "."} or 3 in map(len, grouped):  # a number in another base, a version, a date; 12,34,567
        return None, False
    return re.split(f"[,'{NO_BREAK}]", run)[-1], False


def _decimal(digits: str, exponent: str) -> Fraction | None:
    digits = digits.lstrip("0")
    if "." in digits:
        digits = digits.rstrip("0")
    if digits in ("", "."):
        return Fraction(0)
    size = exponent.lstrip("+-").lstrip("0") or "0"
    if len(digits) > _MAX_DIGITS or len(size) > 4 or int(size) > _MAX_DIGITS:
        return None
    return Fraction(Decimal(digits + ("e-" if exponent.startswith("-") else "e") + size))


def _power(base: Fraction, power: str) -> Fraction | None:
    exponent = re.fullmatch(r"([-+]?)\s?0*([0-9]{1,4})", power.strip().lstrip("*^ ").strip("{}() "))
    if exponent is None:
        return None
    count = int(exponent[2])
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if bits * count > 4 * _MAX_DIGITS or (not base and exponent[1] == "-"):
        return None
    return Fraction(base ** (-count if exponent[1] == "-" else count))
