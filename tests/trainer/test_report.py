"""The page of runs: what stands on it, that text of a model stays text, and how a browser shows it."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import ConfigError, parse_config
from trainer.loop import train
from trainer.report.__main__ import main
from trainer.report.charts import Scale, binned, running_mean, thinned
from trainer.report.markup import duration, escape, number
from trainer.report.page import render_page, write_report
from trainer.report.panels import PANELS
from trainer.report.runs import read_runs
from trainer.report.samples import BOUNDS, chosen_steps, shade
from trainer.run import prepare

HOSTILE = "</script></pre><script>alert(1)</script><img src=http://x.invalid/a onerror=alert(2)>\"'&\ud800\x00\u202e"
"""What a model or a dataset may write."""


def _line(step: int) -> dict[str, Any]:
    phases = {"rollout": 0.5, "reward": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.1, "swap": 0.05}
    return {
        "step": step,
        "reward": 0.5 + 0.4 * math.sin(step / 9),
        "completions/mean_length": 20.0 + step,
        "entropy": math.nan if step == 3 else 1.0 / step,
        "learning_rate": 1e-5,
        "timing_s/step": 1.5,
        **{f"timing_s/{name}": seconds for name, seconds in phases.items()},
        **({"eval/pass@1": step / 100} if step % 10 == 0 else {}),
    }


def _completion(step: int, text: str, tokens: Sequence[str]) -> dict[str, Any]:
    return {
        "step": step, "prompt": text, "completion": text, "finish_reason": "length", "reward": None,
        "rewards": {text: 1.0, "other": None}, "extras": {text: text}, "num_tokens": len(tokens),
        "tokens": list(tokens), "logprobs": [-0.01 - 0.6 * k for k in range(len(tokens))],
    }  # fmt: skip


def _write(folder: Path, steps: int = 40, name: str = "made", text: str = "12+34=", lr: str = "1e-5") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "eval/pass@1": 0.0}, *map(_line, range(1, steps + 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = [text, "\n", "", " of a long line " * 8, "x" * 300]
    shown = [_completion(step, text, tokens) for step in range(1, steps + 1) for _ in range(2)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shown))
    config = {"name": name, "steps": 100, "optim": {"lr": lr}, "task": {"kind": "arithmetic", "path": text}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


# -- the parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 30, [0, 10, 20, 30]),
        (3, 41, [10, 20, 30, 40]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks(4) == pytest.approx(expected)


def test_scale_maps_its_ends() -> None:
    scale = Scale(2, 4, 100, 0)
    assert [scale(value) for value in (2, 3, 4)] == [100, 50, 0]


def test_thinned_line_keeps_extremes_and_ends() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    values[777], values[4321] = 50.0, -50.0
    points = [(float(x), float(y)) for x, y in enumerate(values)]
    kept = thinned(points, 360)
    assert len(kept) <= 360
    assert kept == sorted(set(kept) & set(points))
    assert {(777, 50.0), (4321, -50.0)} < set(kept)
    assert thinned(points[:360], 360) == points[:360]


def test_running_mean_is_of_the_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=100)
    means = running_mean([(step, float(value)) for step, value in enumerate(values)])
    for place, (step, mean) in enumerate(means):
        assert step == place
        assert mean == pytest.approx(values[max(0, place - 5) : place + 6].mean())


@pytest.mark.parametrize(("length", "sizes"), [(8, [1] * 8), (9, [2, 2, 2, 2, 1]), (24, [3] * 8)])
def test_bins_are_means_of_pieces(length: int, sizes: list[int]) -> None:
    values = np.random.default_rng(0).normal(size=length)
    pieces = np.split(np.arange(length), np.cumsum(sizes)[:-1])
    points = [(float(step), float(value)) for step, value in enumerate(values)]
    places, means = zip(*binned(points, 8), strict=True)
    assert places == tuple(piece.mean() for piece in pieces)
    assert means == pytest.approx([values[piece].mean() for piece in pieces])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.25, "\u22120.25"), (12345.0, "12.3k"), (2.5e6, "2.5M"), (1234.0, "1234")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.25, "1.25 s"), (150, "2 min"), (3 * 3600 + 240, "3 h 04 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shades_are_of_probabilities() -> None:
    assert [shade(math.log(p)) for p in (1.0, *(bound - 1e-6 for bound in BOUNDS))] == list(range(7))
    assert (shade(math.log(1e-9)), shade(None)) == (6, 0)


def test_escaped_text_reads_back_but_for_what_html_cannot_have() -> None:
    shown = escape(HOSTILE)
    assert not set(shown) & {"<", ">", '"', "'", "\x00"}
    assert html.unescape(shown) == HOSTILE.replace("\ud800", "\ufffd").replace("\x00", "\ufffd")
    shown.encode()


def test_steps_with_completions_are_spread_and_bounded(tmp_path: Path) -> None:
    few = chosen_steps(read_runs([str(_write(tmp_path / "few", steps=20))]))
    many = chosen_steps(read_runs([str(_write(tmp_path / "many", steps=500))]))
    assert few == list(range(1, 21))
    assert (many[0], many[-1], len(many)) == (1, 500, 60)
    assert {b - a for a, b in pairwise(many)} <= {8, 9}


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is no folder"),
        (lambda folder: folder.mkdir(), "holds no run: it has no metrics.jsonl"),
        (lambda folder: (_write(folder) / "metrics.jsonl").write_text("[1]\n"), "a line that is no object with a step"),
        (lambda folder: (_write(folder) / "metrics.jsonl").write_text("{\n"), "metrics.jsonl cannot be read"),
        (lambda folder: (_write(folder) / "completions.jsonl").write_bytes(b"\xff\n"), "completions.jsonl cannot be"),
        (lambda folder: (_write(folder) / "config.yaml").write_text("a: [1"), "config.yaml cannot be read"),
    ],
)
def test_what_is_no_run_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    make(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 2
    assert re.match(rf"error: RUN: {tmp_path}/run.*{re.escape(message)}", capsys.readouterr().err)
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("arguments", [[], ["out=a.html"], ["--help"], ["a", "out=b", "out=c"], ["a", "out="], [""]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m trainer.report RUN")


def test_page_is_written_beside_the_run_or_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = str(_write(tmp_path / "run")), str(_write(tmp_path / "other"))
    assert main([run]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert main([run, other]) == 2
    assert "out: 2 runs" in capsys.readouterr().err
    assert main([run, other, f"out={tmp_path}/two.html"]) == 0
    with pytest.raises(ConfigError, match=r"^out: .*nowhere/two.html cannot be written"):
        write_report([run], str(tmp_path / "nowhere/two.html"))
    with pytest.raises(ConfigError, match=r"^out: .*other cannot be written: Is a directory"):
        write_report([run], other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "two.html"]


def test_report_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from trainer.report.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(_write(tmp_path / "run"))], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the page -----------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Elements with their attributes, and the text inside each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self._inside.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]][-1] += data

    def all(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        """Attributes of the elements of a kind, and of a class if one is named."""
        found = [attrs for kind, attrs in self.elements if kind == tag]
        return [attrs for attrs in found if not name or name in (attrs.get("class") or "").split()]


def _page(*folders: Path) -> _Page:
    return _Page(render_page(read_runs([str(folder) for folder in folders])))


def test_charts_are_of_the_metrics_that_are_there(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run"))
    titles = page.texts["h3"]
    assert titles == ["Reward", "Held-out pass@1", "Completion length", "Entropy", "Learning rate", "Phases"]
    curves = [attrs["d"] or "" for attrs in page.all("path", "line")]
    # reward, length and entropy have a mean before them; what is not finite is left out
    assert [d.count(" ") for d in curves] == [40, 40, 5, 40, 40, 39, 39, 40]
    assert len(page.all("path", "area")) == 7
    labels = [attrs["aria-label"] for attrs in page.all("svg")]
    assert labels[1] == "Held-out pass@1 by step. made 0.4 at step 40"


def test_reward_curve_goes_through_its_values(tmp_path: Path) -> None:
    """The drawing's units are worked out here from the axis: its ticks' places and texts."""
    page = _page(_write(tmp_path / "run", steps=8))
    (path, *_) = [attrs["d"] or "" for attrs in page.all("path", "line")]
    drawn = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    ticks = [(float(a["y"] or 0), t) for a, t in zip(page.all("text"), page.texts["text"], strict=True) if a.get("dy")]
    (y0, low), (y1, high) = ticks[0], next(tick for tick in ticks[1:] if tick[0] != ticks[0][0])
    for step, (_, y) in enumerate(drawn, 1):
        value = float(low) + (y - y0) / (y1 - y0) * (float(high) - float(low))
        assert value == pytest.approx(_line(step)["reward"], abs=2e-3)


def test_text_of_models_datasets_and_users_stays_text(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", name=HOSTILE.replace("\x00", ""), text=HOSTILE, steps=3)
    other = _write(tmp_path / "other", steps=3)
    for page in (_page(folder), _page(folder, other)):
        assert [attrs.get("type") for attrs in page.all("script")] == ["application/json", None]
        assert page.all("img") == page.all("a") == page.all("iframe") == []
        assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
        shown = HOSTILE.replace("\ud800", "\ufffd").replace("\x00", "\ufffd")
        assert shown in page.texts["pre"]
        assert shown in page.texts["i"]
        json.loads(page.texts["script"][0])


def test_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = render_page(read_runs([str(_write(tmp_path / "run"))]))
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|@font-face|\bsrc=|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text


def test_several_runs_have_colours_switches_and_a_table_of_differences(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "a", name="a"), _write(tmp_path / "b", name="b", lr="3e-5", steps=20))
    assert [attrs["id"] for attrs in page.all("input")] == ["run-0", "run-1"]
    assert {attrs["class"] for attrs in page.all("path", "line")} >= {"line run-0 of-0", "line run-1 of-1"}
    keys = page.texts["code"]
    differing = keys[: keys.index("name", 1)] if keys.count("name") > 1 else []
    assert differing == ["name", "a", "b", "optim.lr", "1e-5", "3e-5"]


def test_runs_of_one_name_are_told_apart_and_one_given_twice_is_one(tmp_path: Path) -> None:
    runs = read_runs([str(_write(tmp_path / name)) for name in ("a", "b")] + [str(tmp_path / "a/../b")])
    assert [run.label for run in runs] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "rew')
    assert "No step has ended yet." in render_page(read_runs([str(folder)]))
    _write(folder, steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    page = _page(folder)
    assert page.texts["dd"][0] == "1 of 100 so far"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the trainer's."""
    folder = tmp_path_factory.mktemp("real") / "run"
    chosen = [
        "experiment=smoke", f"run_dir={folder}", "name=real", "steps=3", "model.warm_start_steps=0", "eval.every=1",
        "algorithm.prompts_per_step=3", "algorithm.group_size=2", "sampling.max_new_tokens=8", "checkpoint.every=0",
        "rollout.num_blocks=64", "algorithm.kl_coef=0.1",
    ]  # fmt: skip
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        run = prepare(parse_config(compose("config", chosen)))
    try:
        train(run)
    finally:
        run.close()
    return folder


def test_real_run_has_every_chart_that_always_has_one(real: Path) -> None:
    titles = _page(real).texts["h3"]
    assert [panel.title for some in PANELS.values() for panel in some if not panel.if_any] == titles[:-1]
    assert titles[-1] == "Phases"


# -- in a browser -------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium")

MEASURE = """<script>addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth;
  const over = [...document.querySelectorAll("body *")].filter((one) => !one.closest(".scroll table, svg, pre")
    && one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 80));
  const body = getComputedStyle(document.body), seen = (name) => document.querySelectorAll(name);
  const shown = [...seen(".card")].filter((card) => card.offsetParent).map((card) => card.dataset.step);
  parent.postMessage(JSON.stringify({
    width: innerWidth, wide, over, back: body.backgroundColor, ink: body.color, shown,
    lines: [...seen("path.line")].filter((line) => line.getBoundingClientRect().width > 100).length,
    values: (seen("svg")[0].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"})),
      [...seen("output")[0].childNodes].map((one) => one.textContent)),
    left: (seen("#run-0")[0].click(), [".of-0", ".of-1"].map((name) => [...seen(name)].some((one) =>
      one.getClientRects().length))),
    focus: [...seen("a,button,input,select,summary,[tabindex]")].map((one) => one.tagName.toLowerCase()),
  }), "*");
});</script>"""
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><script>
addEventListener("message", (event) => { document.documentElement.dataset.measured = event.data; });
</script><iframe src="measured.html" width="WIDTH" height="900" style="border: 0"></iframe>"""
"""A window is never narrower than 500 pixels, a frame is."""


def _browse(path: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """The page as the browser has it after its scripts, and what it has to say of it."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    command += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _measured(path: Path, tmp_path: Path, width: int, *options: str) -> dict[str, Any]:
    """The page at a width, with a script of the test's own, which its policy would not let run."""
    page = path.read_text()
    without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert without != page
    (tmp_path / "measured.html").write_text(without.replace("</body>", f"{MEASURE}</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    options = ("--hide-scrollbars", "--virtual-time-budget=3000", *options)
    dom, said = _browse(frame, tmp_path / "profile", *options)
    assert said == []
    found = re.search(r'data-measured="([^"]*)"', dom)
    assert found is not None
    measured = json.loads(html.unescape(found[1]))
    assert isinstance(measured, dict)
    return measured


@needs_chromium
def test_browser_has_nothing_to_say(tmp_path: Path) -> None:
    """No script error, nothing that the page's own policy forbids, nothing fetched."""
    write_report([str(_write(tmp_path / "run", text=HOSTILE))], None)
    log = tmp_path / "net.json"
    dom, said = _browse(tmp_path / "run/report.html", tmp_path / "profile", f"--log-net-log={log}")
    assert said == []
    assert "x.invalid" not in re.sub(r"&lt;img src=http://x\.invalid", "", dom)
    assert "x.invalid" not in log.read_text()
    (chosen,) = re.findall(r'<div class="filter"(.*?)>', dom)
    assert "hidden" not in chosen  # the script ran


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_page_fits_shows_values_and_hides_runs_in_both_schemes(tmp_path: Path, width: int) -> None:
    runs = [str(_write(tmp_path / name, name=name * 40, text="long-text-without-a-break" * 20)) for name in "ab"]
    page = write_report(runs, str(tmp_path / "page.html"))
    backs = {}
    for scheme, number_of in (("light", 1), ("dark", 0)):
        seen = _measured(page, tmp_path, width, f"--blink-settings=preferredColorScheme={number_of}")
        assert (seen["width"], seen["wide"], seen["over"]) == (width, width, [])
        assert seen["lines"] >= 10
        assert set(seen["shown"]) == {"40"}
        reward = number(_line(39)["reward"])
        assert seen["values"] == ["step 39", reward, reward]
        assert seen["left"] == [False, True]
        assert seen["focus"][:3] == ["div", "input", "input"]
        assert _contrast(seen["back"], seen["ink"]) > 12
        backs[scheme] = _luminance(seen["back"])
    assert backs["light"] > 0.8
    assert backs["dark"] < 0.05


@needs_chromium
def test_curves_are_there_without_scripts(tmp_path: Path) -> None:
    page = write_report([str(_write(tmp_path / "run"))], None)
    bare = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    page.write_text(bare)
    dom, said = _browse(page, tmp_path / "profile")
    assert said == []
    assert dom.count('class="line run-0 of-0"') >= 5
    assert re.search(r'<div class="filter" hidden="">', dom)
    assert dom.count('<article class="card') == 80


def _luminance(colour: str) -> float:
    """Of rgb(...), by WCAG 2's relative luminance."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(scheme: str) -> None:
    """WCAG 2: 4.5 for text, also on the strongest shade, 3 for lines."""
    css = (Path(render_page.__code__.co_filename).parent / "page.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")[:2]
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", light if scheme == "light" else dark.split("\n}\n")[0]))

    def rgb(value: str) -> list[int]:
        return [int(value[k : k + 2], 16) for k in (1, 3, 5)]

    def contrast(one: Sequence[float], other: Sequence[float]) -> float:
        return _contrast(*(f"rgb({','.join(str(round(c)) for c in colour)})" for colour in (one, other)))

    surface, ink = rgb(values["surface"]), rgb(values["ink"])
    hot, most = [int(part) for part in values["hot"].split()], float(values["most"])
    shaded = [h * most + s * (1 - most) for h, s in zip(hot, surface, strict=True)]
    assert contrast(ink, shaded) >= 4.5
    assert contrast(rgb(values["muted"]), surface) >= 4.5
    assert contrast(rgb(values["muted"]), rgb(values["back"])) >= 4.5
    assert all(contrast(rgb(values[f"run-{k}"]), surface) >= 4.5 for k in range(8))
