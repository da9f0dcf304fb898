"""Text and numbers as a page shows them. Whatever a model, a dataset or a user wrote goes through `escape`."""

import html
import re

_NOT_IN_HTML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_UNITS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def escape(text: object) -> str:
    """The text as HTML, for elements and quoted attributes; characters that HTML cannot have become U+FFFD."""
    return html.escape(_NOT_IN_HTML.sub("\ufffd", str(text)))


def number(value: float) -> str:
    """Four digits at most; large ones with k, M or G."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
