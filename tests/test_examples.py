"""The recording that the README lets a reader try is read, costed and advised upon."""

from pathlib import Path

from advisor import analyze

ROOT = Path(__file__).resolve().parents[1]
TRACE = "examples/h200_gpt_fp32.json.gz"


def test_the_readmes_recording_gives_a_page_with_advice():
    assert TRACE in (ROOT / "README.md").read_text(encoding="utf-8")
    report = analyze(ROOT / TRACE)
    assert report.device is not None
    assert "H200" in report.device.name
    told = {finding.rule: finding for finding in report.findings}
    assert {"precision.mixed", "attention.explicit", "optimizer.fused"} <= told.keys()
    assert told["precision.mixed"].saving_ms.low > 0
    assert told["precision.mixed"].fix
