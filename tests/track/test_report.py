import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import make_run
from meshwright.errors import UserError
from meshwright.track.charts import SMOOTH_FROM, Series, chart, smooth
from meshwright.track.metrics import MetricsLog
from meshwright.track.report import write_report

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(html)
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data


def page(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def paths(found: Page, look: str = "") -> list[str]:
    """The curves of one class, or all."""
    attributes = [(name, value) for tag, name, value in found.attributes if tag == "path"]
    pairs = zip(attributes[::2], attributes[1::2], strict=True)
    return [path for (_, kind), (_, path) in pairs if look in kind]


def test_the_report_is_one_file_that_fetches_nothing(run_dir: Path) -> None:
    before = set(run_dir.iterdir())
    path = write_report(run_dir)
    assert set(run_dir.iterdir()) - before == {path}
    html = path.read_text(encoding="utf-8")
    found = Page(html)
    assert not [one for one in found.attributes if one[1] in ("src", "href", "srcset", "action", "data")]
    assert not re.search(r"https?://|@import|url\(|fetch\(|import\(", html)
    policy = [value for _, name, value in found.attributes if name == "content" and "default-src 'none'" in value]
    assert len(policy) == 1


def test_the_report_says_what_the_run_came_to(run_dir: Path) -> None:
    found = page(run_dir)
    assert found.text["h1"] == ["small-run"]
    assert dict(zip(found.text["dt"], found.text["dd"], strict=True)) == {
        "Validation loss": "2.1250best, at step 200; last 2.5000",
        "Bits per byte": "1.5000of validation, same step",
        "Perplexity": f"{math.exp(2.125):.4f}of validation, same step",
        "Training loss": "2.0749at step 300",
        "Tokens trained": "614,400in 300 steps",
        "Training time": "0:02:30without evaluations and saves",
        "Tokens per second": "10,000median; best 10,000",
        "Parameters": "1.23M1,234,567",
    }
    captions = [caption.split("training")[0] for caption in found.text["figcaption"]]
    assert captions == ["Loss", "Learning rate", "Gradient norm", "Tokens per second"]
    assert found.text["tr"][1] == f"3002.50001.5000{math.exp(2.5):.4f}"


def test_the_run_file_is_in_the_report(run_dir: Path) -> None:
    assert page(run_dir).text["pre"][-1] == (run_dir / "run.toml").read_text(encoding="utf-8").rstrip()


def test_samples_come_newest_first_and_stay_text(run_dir: Path) -> None:
    found = page(run_dir)
    texts = [text for text in found.text["pre"] if text.startswith("def ")]
    assert texts == [f"def f{step}(x):\n    <script>alert(1)</script>" for step in (300, 200, 100)]
    assert not [script for script in found.text["script"] if "alert(1)" in script]


def test_only_the_newest_samples_are_in_the_report(run_dir: Path) -> None:
    lines = [json.dumps({"step": step, "prompt": "", "text": f"text {step}"}) for step in range(1, 41)]
    (run_dir / "samples.jsonl").write_text("\n".join(lines) + "\n")
    found = page(run_dir)
    assert len([text for text in found.text["pre"] if text.startswith("text ")]) == 30
    assert "10 more in samples.jsonl" in found.text["p"]


def test_the_same_run_gives_the_same_bytes(run_dir: Path) -> None:
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.append({"step": 302, "loss": 1.0})
    assert write_report(run_dir).read_bytes() != first


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_a_gap_and_is_named(run_dir: Path, value: float) -> None:
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.append({"step": 302, "loss": value, "grad_norm": value})
        log.append({"step": 302, "val_loss": value})  # and no bits per byte
        log.append({"step": 304, "loss": 2.0, "grad_norm": 1.0})
    found = page(run_dir)
    assert found.text["dd"][0] == "2.1250best, at step 200; last not finite"
    assert found.text["tr"][1] == "302not finite\u2013\u2013"
    assert not [path for path in paths(found) if re.search("nan|inf", path, re.IGNORECASE)]
    assert paths(found, "faint train")[0].count("M") == 2
    note = next(text for text in found.text["p"] if "training not finite" in text)
    assert "training not finite at 1 of 152 records, first at step 302" in note
    assert "validation not finite at 1 of 4 records" in note
    data = json.loads(found.text["script"][0])["series"]
    assert data[0]["xs"][-2:] == [302, 304] and data[0]["ys"][-2:] == [None, 2.0]


def test_a_run_that_was_never_finite_opens(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.append({"step": 1, "loss": math.nan, "tokens_per_second": math.nan, "tokens": 5, "step_seconds": math.nan})
        log.append({"step": 1, "val_loss": math.inf, "val_perplexity": math.inf})
    found = page(run_dir)
    assert "no finite values" in found.text["p"]
    assert found.text["dd"][0].startswith("not finite")


def test_a_run_of_one_record_opens(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 8.0}\n')
    (run_dir / "samples.jsonl").unlink()
    (run_dir / "checkpoints" / "step_00000300" / "manifest.json").write_text('{"st')
    found = page(run_dir)
    assert found.text["dt"] == ["Training loss"]
    assert "Samples" not in found.text["h2"]
    assert paths(found)[-1] == "M98.81 97.17h0"


def test_own_metrics_get_a_chart(run_dir: Path) -> None:
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.append({"step": 302, "loss": 2.0, "router <entropy>": 0.5})
    assert page(run_dir).text["figcaption"][-1] == "router <entropy>"


def test_tokens_and_epochs_of_each_source_are_a_table(run_dir: Path) -> None:
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        for step, more in ((302, 0.0), (304, 0.25)):
            tokens = {"tokens/<web>": 3_000_000 + more, "tokens/code": 1_000_000}
            log.append({"step": step, "loss": 2.0, "epochs/<web>": 0.5 + more, "epochs/code": 2.0, **tokens})
    found = page(run_dir)
    assert "Sources" in found.text["h2"]
    assert found.text["tr"][:3] == ["SourceTokensShareEpochs", "<web>3M75.0%0.75", "code1M25.0%2"]
    assert not [caption for caption in found.text["figcaption"] if "/" in caption]


def test_epochs_of_one_source_stand_by_the_tokens(run_dir: Path) -> None:
    assert "Sources" not in page(run_dir).text["h2"]
    with MetricsLog(run_dir / "metrics.jsonl") as log:
        log.append({"step": 302, "loss": 2.0, "tokens": 700_000, "epochs": 1.25})
    found = page(run_dir)
    assert "Sources" not in found.text["h2"] and "epochs" not in found.text["figcaption"]
    assert dict(zip(found.text["dt"], found.text["dd"], strict=True))["Tokens trained"] == (
        "700,000in 302 steps, 1.25 epochs"
    )


def test_several_sources_are_counted_in_the_facts(run_dir: Path) -> None:
    sources = [{"source": "a", "weight": 1.0}, {"source": "b", "weight": 2.0}]
    run = make_run({"data": {"train": sources}, "model": {"preset": "gpt2"}})
    (run_dir / "run.toml").write_text(run.to_toml(), encoding="utf-8")
    assert "2 sources" in page(run_dir).text["li"]


def test_missing_and_empty_files_are_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such run directory"):
        write_report(tmp_path / "nowhere")
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds no records"):
        write_report(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        write_report(run_dir)
    (run_dir / "run.toml").write_text("name = ")
    with pytest.raises(UserError, match=r"run\.toml: not valid TOML"):
        write_report(run_dir)
    (run_dir / "run.toml").unlink()
    with pytest.raises(UserError, match=r"run\.toml: No such file"):
        write_report(run_dir)
    assert not (run_dir / "report.html").exists()


def test_thinning_keeps_every_spike() -> None:
    x, y = np.arange(50_000.0), np.ones(50_000)
    y[31_337], y[31_338], y[44_444] = 1.5, np.inf, 0.5
    found = Page(chart("Loss", [Series("loss", x, y)], last_x=50_000))
    (series,) = json.loads(found.text["script"][0])["series"]
    points = dict(zip(series["xs"], series["ys"], strict=True))
    assert len(points) <= 1002
    assert points[31_337] == 1.5 and points[44_444] == 0.5 and {0, 49_999} <= points.keys()


def test_a_few_spikes_do_not_flatten_the_rest() -> None:
    x, y = np.arange(1000.0), 1 + 0.1 * np.sin(np.arange(1000.0))
    y[500] = 1e6
    found = Page(chart("Gradient norm", [Series("norm", x, y)], last_x=1000))
    assert "cut at the top; highest value 1M" in found.text["p"]
    places = [float(place) for place in re.findall(r"[ML][\d.]+ (-?[\d.]+)", paths(found)[-1])]
    assert np.ptp(np.delete(places, 500)) > 5


def test_smoothing_takes_means_and_passes_over_gaps() -> None:
    assert np.array_equal(smooth(np.arange(SMOOTH_FROM - 1.0)), np.arange(SMOOTH_FROM - 1.0))
    values = np.tile([1.0, 3.0, 2.0], 66)
    values[60] = np.nan
    smoothed = smooth(values)
    np.testing.assert_allclose(smoothed[[30, 31, 100]], 2.0)
    np.testing.assert_allclose(smoothed[[59, 60, 61]], [(3 + 2) / 2, (2 + 3) / 2, (3 + 2) / 2])
