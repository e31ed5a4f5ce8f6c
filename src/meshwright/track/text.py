"""Words and numbers as people read them, the same on the console and in the report."""

import math
import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Make a model's text harmless to show: it may hold any character, escape sequences among them.

    Arguments:
        text: anything.

    Returns:
        The text with control characters, reversals of direction and lone surrogates as visible stand-ins; line ends
        and tabs stay.
    """
    return _UNSAFE.sub(_stand_in, text.replace("\r\n", "\n"))


def _stand_in(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def clock(seconds: float) -> str:
    """A duration as `h:mm:ss`, or `-:--:--` where it is not known.

    Arguments:
        seconds: the duration; NaN or infinite: not known.
    """
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def short(number: float) -> str:
    """A number in few characters: `12,345`, `1.23M`, `0.0006`.

    Arguments:
        number: any.
    """
    if not math.isfinite(number):
        return "not finite"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
