"""Numbers as people write them: each text's value worked out by hand, and no text that crashes or takes long."""

import sys
from fractions import Fraction

import pytest

from trainer.data.tasks import numeric
from trainer.rewards.numerals import Number, equal, last_number, single_number


def _reward(answer: object, completion: str) -> float:
    (reward,) = numeric([completion], [answer])
    return reward


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("1/2", "3/2", 0),
        (r"\frac{3}{4}", r"\frac{1}{4}", 0),
        ("-5", "\u22125", 1),
        ("5", "\u22125", 0),
        ("10000", "10{,}000", 1),
        ("1234", "1,234.", 1),
        ("34", "x = 3,4", 0),
        ("5", "it is - 5", 0),
        ("-5", "it is - 5", 1),
        ("19", "2001-19", 1),
        ("-5", "-$5", 1),
        ("-3/4", "(-3)/4", 1),
        ("(-3)/4", "-0.75", 1),
        ("1", "1k", 0),
        ("5", "5 and a half", 0),
        ("567", "12,34,567", 0),
        ("30", "12:30", 0),
        ("2", "3:2", 0),
        ("1/2", "0.5", 1),
        ("72", "72 clips, altogether.", 1),
    ],
)
def test_what_was_read_as_another_number(answer: str, completion: str, right: int) -> None:
    assert _reward(answer, completion) == right


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        # signs
        ("$-5", -5), (r"-\$5", -5), ("\u20135", -5), ("\uff0d5", -5), ("x = \u2013 5", -5), ("(-5)", -5), ("-(5)", -5),
        ("negative 5", -5), ("it is minus 5", -5),
        ("**-5**", -5), ("_-5_", -5), ("__1,234__", 1234),
        ("_42_.", 42), ("\nminus 5", -5), ("\n\u2212\u00bd", "-1/2"),
        ("8, -3", -3), ("8 -3", -3),
        ("-1,234.50", "-1234.5"),
        ("+3", 3), ("=-7", -7), ("10 minus 5", 5), ("8 - 3", 3), ("8-3", 3), ("x - 5", 5), ("F-16", 16),
        ("5 to 10", 10),
        ("the answer\u20145", 5), ("the answer -- 5", 5), ("pages 5\u201310", 10), ("(2 + 1) - 3", 3), ("$8$-$5$", 5),
        ("In all:\n- 72 clips", 72), ("In all:\n  - 72 clips", 72), ("x =\n-72", -72), ("- 5", -5),
        ("it is:\n$-5$", -5),
        # thousands
        ("1,234,567", 1234567), ("1_000", 1000), ("1\u2009234", 1234), ("1\u202f234\u202f567", 1234567),
        (r"1\,234", 1234),
        ("1\u00a0234.5", "1234.5"), ("1'234", 1234), ("10,00", 0), ("1, 2, 3, 4", 4), ("1,2,3", 3), ("1 234", 234),
        # decimals and powers
        (".5", "0.5"), ("7.", 7), ("007", 7), ("1e3", 1000), ("2.5E-1", "0.25"), ("1.2 x 10^3", 1200),
        ("10^-3", "0.001"),
        (r"1.2 \times 10^{3}", 1200), (r"3 \cdot 10^{-2}", "0.03"), ("1.2\u00d710\u00b3", 1200),
        ("10\u207b\u00b3", "0.001"),
        ("2^{10}", 1024), ("10**3", 1000), ("-2^2", -4), ("about 3.14...", "3.14"),
        # fractions
        ("3 / 4", "3/4"), (r"\dfrac12", "1/2"), (r"-\frac{1}{2}", "-1/2"), (r"\frac{-1}{2}", "-1/2"), ("1 1/2", "3/2"),
        (r"\tfrac{1,000}{3}", "1000/3"), (r"1\frac{1}{2}", "3/2"), ("-1 1/2", "-3/2"), ("\u00bd", "1/2"),
        ("1\u00bd", "3/2"),
        (r"\frac{1}{10^{3}}", "1/1000"), (r"\frac{ - 2^{2} }{ 3 }", "-4/3"), (r"\frac{3.5}{7}", "1/2"),
        ("3\u20444", "3/4"), ("1/-2", "-1/2"), ("3/4 cup", "3/4"), ("5 3/2", "3/2"), (r"\\frac{1}{2}", "1/2"),
        # LaTeX
        (r"\(5\)", 5), (r"\[x = 5\]", 5), ("$5$", 5), (r"5\text{ km}", 5), (r"\text{5}", 5), (r"\mathbf{-5}", -5),
        (r"90^\circ", 90), (r"90^{\circ}", 90), ("\\left( -5 \\right)", -5), (r"x_{1} = 5", 5), (r"x_1 = 5", 5),
        (r"\boxed{72} after 3 steps", 72), (r"\boxed{1} or \boxed{x = 2}", 2), (r"-\boxed{5}", -5), (r"7-\boxed{5}", 5),
        (r"\boxed{\frac{3}{4}}", "3/4"), (r"\boxed{25\text{ cm}^2}", 25), (r"\boxed{12", 12), (r"\boxed 12 or 3", 12),
        # units
        ("5 km", 5), ("5km/h", 5), ("25 cm^2.", 25), ("25 m\u00b2", 25), ("44 g of CO2", 44), ("90\u00b0", 90),
        ("7!", 7),
        ("$2.50", "2.5"), ("\u20ac20", 20), ("2 million", 2 * 10**6), ("$1.5 billion", 15 * 10**8), ("Answer 3: 5", 5),
        # other scripts
        ("\uff14\uff12", 42), ("\u7b54\u6848\u662f42\u4e2a", 42), ("\u0664\u0662", 42),
    ],
)  # fmt: skip
def test_last_number_of_a_text(completion: str, value: int | str) -> None:
    assert last_number(completion) == Number(Fraction(value))


@pytest.mark.parametrize(
    "completion",
    [
        "", "no number", "-", r"2\sqrt{3}", "\u221a2", r"\frac{\pi}{2}", r"\frac{\sqrt{3}}{2}", "2\u03c0", r"\pm 5",
        "\u00b15",
        "1/2/3", "12/25/2024", "1/0", r"\frac{1}{0}", "0^-1", "2^x", "(x+1)^2", "1.2.3", r"\log_2 8", r"\boxed{}",
        r"\infty",
        r"5 is \boxed{\text{none}}", r"\boxed{3, 4}", r"\boxed{2\sqrt{3}}", r"\boxed{1 \text{ or } 2}", "101_2",
        "x/3", "CO2",
        "12:30", "at 12:30 pm", "10:30:15", "3:2", "it is 3 : 2", r"\(3:-2\)", "12,34,567", "1,23,456.50", "0,123",
        "1k", "$1.5k", "1.5M", "2B", "5K", "5 and a half", "2 and one-third cups", "3 dozen",
        r"\boxed{12:30}", r"\boxed{5k}", "(x)/4", "(-3)/0",
    ],
)  # fmt: skip
def test_what_comes_last_is_no_number(completion: str) -> None:
    assert last_number(completion) is None


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (5, 5), (-0.0, 0), (0.1, "1/10"), (1e22, 10**22), (10**4299, 10**4299), ("5", 5), (" 5 km\n", 5), ("x = 5", 5),
        ("72 clips", 72), ("The answer is 72.", 72), ("48/2 = 24\n#### 24", 24), ("#### 1,234", 1234),
        (r"so \boxed{-7}", -7),
        ("+5", 5), ("+$5", 5), ("$+5$", 5), ("(+5)", 5), ("+1/2", "1/2"), ("x = +5", 5), (r"+\frac{1}{2}", "1/2"),
        ("+.5", "0.5"), ("(-3)/4", "-3/4"), ("-(3)/4", "-3/4"), ("3/(-4)", "-3/4"), ("(-3)/(4)", "-3/4"),
        ("(1)/(2)", "1/2"), ("5 kg", 5), ("300 K", 300),
        ("$5", 5), ("(5)", 5), ("**5**", 5), ("1e-3", "0.001"), (r"\frac{4}{2}", 2), ("12+3 = 15", 15),
        ("5 kilowatt-hours", 5),
        (r"\approx 3.14", "3.14"), ("5 m/s", 5), (r"\$1{,}000", 1000), ("20 m^2", 20), ("2^{10}", 1024),
    ],
)  # fmt: skip
def test_single_number(answer: object, value: int | str) -> None:
    assert single_number(answer) == Number(Fraction(value))


@pytest.mark.parametrize(
    "answer",
    [
        "", "abc", "A", "1, 2", "3 and 4", "3,4", "(1, 2)", "[1,2]", "x+1", "2x", "3i", "x^2", "5^x", "2^{x}", "5!",
        "|-5|", ">5",
        "1-2", "12:30", "2024-01-01", "2:3", "1 234", "1.2.3", "1/2/3", "1/0", "nan", "inf", "Infinity", "x=1, y=2",
        "101_2",
        "1k", "$1.5k", "5k", "5K", "1.5M", "2bn", "5 and a half", "2 and two-thirds", "5 dozen", "12,34,567", "3 : 2",
        "x+5", "x - 5", "x-5", "+-5", "++5", "+x", "5+", "(5)/0", "2(3)/4",
        "0x1F", r"\sqrt{2}", r"2\pi", r"\frac{\pi}{2}", r"\pm 5", "5 \u00b1 0.1", r"\boxed{}", r"5 #### ",
        "1e999999999", "\u221e",
        True, False, None, [5], {"value": 5}, float("nan"), float("inf"),
    ],
)  # fmt: skip
def test_what_is_not_a_single_number(answer: object) -> None:
    assert single_number(answer) is None
    assert _reward(answer, "5") == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("1234567", "1234568", 0), ("9007199254740993", "9007199254740992", 0), (10**30, "1" + "0" * 30, 1),
        ("1/3", "0.3333333", 1), ("1/3", "0.3333", 0), ("0.1", "0.10000001", 1), ("2.5", "2.500003", 0),
        ("0", "0.0000001", 0),
        ("1e-400", "2e-400", 0), ("1e-400", "1e-400", 1), (0.1 + 0.2, "0.3", 1), ("7.0", "7", 1), ("1e400", "1e401", 0),
    ],
)  # fmt: skip
def test_integers_exactly_and_others_to_one_in_a_million(answer: object, completion: str, right: int) -> None:
    assert _reward(answer, completion) == right


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("50%", "50%", 1), ("50%", "50", 1), ("50", r"50\%", 1), ("50%", "0.5", 1), ("0.5", "50 percent", 1),
        ("1/2", "50%", 1),
        ("50%", "0.5%", 0), ("5", "50%", 0), ("1", "50%", 0), ("-5%", "\u22125 %", 1), ("12.5%", "1/8", 1),
    ],
)  # fmt: skip
def test_percent_is_its_number_or_its_hundredth(answer: str, completion: str, right: int) -> None:
    assert _reward(answer, completion) == right


def test_equal_does_not_depend_on_the_order() -> None:
    numbers = [Number(Fraction(value), percent) for value in ("50", "1/2", "5000", "0") for percent in (False, True)]
    assert all(equal(a, b) == equal(b, a) for a in numbers for b in numbers)
    assert all(equal(a, a) for a in numbers)


HUGE = [
    "1e999999999",
    "1e-999999999",
    "-1e" + "9" * 100000,
    "9" * 100000,
    "2^{999999}",
    "0." + "3" * 100000,
    "10^10^10^10",
]


@pytest.mark.parametrize(
    "text", [*HUGE, "1e9999/1e9999", "1/1e-4000", "(((" * 1000, r"\boxed{" * 1000, "\ud83d5\ud83d"]
)
def test_huge_or_odd_texts_score_and_do_not_raise(text: str) -> None:
    assert _reward("5", text) in (0.0, 1.0)
    assert _reward(text, "5") in (0.0, 1.0)


def test_digits_are_read_whatever_limit_python_has(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert _reward("1" * 3000, "1" * 3000) == 1.0
        assert _reward("1" * 3000, "1" * 2999 + "2") == 0.0
    finally:
        sys.set_int_max_str_digits(before)


PIECES = [
    "1", "1/", "1,111,", "1,", "1 ", "1 1/", "-", "- ", "-$", r"\frac{", r"\frac{1}", r"\sqrt{", r"\sqrt{{",
        r"\sqrt{{a}", "{", "}",
    r"\boxed{", r"\boxed", "\\", "^", "1^", "10^{1", "1e", "1.", "x", "x_", "a1", "minus ", " ", "$", "1\u00a0",
        "\u00b2", "\u00bd",
    r"\text{", "1 x 10^", "1 hundred", "1=", "((", "/1", "_1", "1%", r"\pm1", r"\pm[1", "\u22121\u2013", "{,}",
        "{,}1", "1**", "(1", "(1)/", "/(1", "1:", "1k", "1 and a ", "+",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_work_is_linear_in_the_text(piece: str) -> None:
    """A pattern that is quadratic in 100,000 characters would take an hour; no figure is asserted."""
    text = piece * (100_000 // len(piece))
    for padded in (text, f"{text}x", f"x{text}5"):
        last_number(padded)
        single_number(padded)
