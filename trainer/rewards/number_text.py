"""The plain form of a text that numbers are read from: one minus, one kind of digit, no LaTeX for looks alone."""

import re
import unicodedata

NO_BREAK = "\u00a0"
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻]++")
_AFTER_DIGIT = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_FROM_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")


class _Folding(dict[int, str]):
    """Each character's plain form, worked out when it is first met; an em dash is no minus."""

    def __missing__(self, code: int) -> str:
        self[code] = folded = self._plain(chr(code))
        return folded

    @staticmethod
    def _plain(char: str) -> str:
        if char.isascii():
            return char
        compatible = unicodedata.normalize("NFKC", char)
        if char.isdecimal():
            return str(unicodedata.decimal(char))
        if "\u2044" in compatible:  # one half and the like
            return compatible.replace("\u2044", "/")
        if char.isspace():
            return " "
        if unicodedata.category(char) == "Cf":  # no width
            return ""
        return compatible if compatible.isascii() else char


_FOLDING = _Folding()
_FOLDING |= {
    ord(char): form
    for chars, form in (
        ("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-"),
        ("\u00a0\u2007\u2009\u200a\u202f", NO_BREAK),
        ("\u00d7\u22c5\u00b7\u2219", "*"),
        ("\u2044\u2215", "/"),
        ("\u066b", "."),
        ("\u066c", ","),
        ("\u00b1", r"\pm "),
        ("\u221a", r"\sqrt "),
        ("\u03c0", r"\pi "),
        ("\u221e", r"\infty "),
        ("\u2248", "="),
        ("\u2019", "'"),
        ("\u00b0", " degrees "),
    )
    for char in chars
}


def fold(text: str) -> str:
    """Digits, signs, spaces and fractions of any script in ASCII, superscripts as powers."""
    text = _SUPERSCRIPTS.sub(lambda run: "^{" + run[0].translate(_FROM_SUPERSCRIPT) + "}", text)
    # a mixed number: 1 1/2, not 11/2
    return _AFTER_DIGIT.sub(" ", text).translate(_FOLDING).replace("\\\\", "\\")


_BOX = re.compile(r"\\(?:boxed|fbox)\s?(?:\{|([^\s{}]*+))")


def boxed(folded: str) -> str | None:
    """What the last box holds, with a minus in front of the box; a box cut short reaches to the end."""
    box = _BOX.match(folded, max(folded.rfind(r"\boxed"), folded.rfind(r"\fbox"), 0))
    if box is None:
        return None
    before = folded[: box.start()].rstrip()
    minus = before.endswith("-") and is_sign(folded, len(before) - 1, spaced=len(before) < box.start())
    inside = folded[box.end() :] if box[1] is None else box[1]
    depth = 1
    for brace in re.finditer("[{}]", inside):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            inside = inside[: brace.start()]
            break
    return f"-{inside}" if minus else inside


_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|operatorname)\s?\{([^{}]{0,200})\}")
_COMMAND = re.compile(r"\^\s?\{?\s?\\circ(?![A-Za-z])\s?\}?|\\([A-Za-z]++|[^A-Za-z])")
_PLAIN_COMMANDS = (
    dict.fromkeys(("left", "right", "displaystyle", "text", "textbf", "mathrm", "mathbf", "!"), "")
    | dict.fromkeys((",", ";", ":", " "), NO_BREAK)
    | dict.fromkeys(("cdot", "times", "ast"), "*")
    | {"approx": "=", "degree": " degrees "}
    | {char: char for char in "$%{}"}
    | dict.fromkeys(("(", ")", "[", "]"), " ")
)


def without_latex(folded: str) -> str:
    """LaTeX that is only typography as plain text; fractions, roots and commands of other kinds stay."""

    def plain(command: re.Match[str]) -> str:
        name = command[1]
        if name is None:
            return " degrees "
        return _PLAIN_COMMANDS.get(name, command[0] if name.isalpha() else f" {name}")

    return _COMMAND.sub(plain, _WRAPPED.sub(r"\1", folded)).replace("{,}", ",")


def is_sign(text: str, place: int, *, spaced: bool) -> bool:
    """Whether the minus at `place` is a sign: not a dash (`--`), a hyphen (`F-16`), a range (`2001-19`), a difference,
    nor the mark of a list's item.

    spaced: white space follows it, as in `it is - 5`.
    """
    before = text[max(0, place - 16) : place]
    operand = before.rstrip(" $\t" + NO_BREAK)
    if not operand:
        return True
    last, attached = operand[-1], not any(char.isspace() for char in before[len(operand) :])
    if last == "-" and attached:
        return False
    if last == "\n":
        return not (spaced and text[place] == "-")
    if last.isdigit() or last in ")]}%":
        return not attached and not spaced
    if last.isascii() and last.isalpha():
        variable = len(operand) == 1 or not operand[-2].isalpha()
        return not attached and not (variable and spaced)
    return True
