from __future__ import annotations

import sys
import types

import pytest

from advisor.capture.loggers import hand_over


@pytest.fixture
def report(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<html>")
    page.with_suffix(".md").write_text("# found")
    page.with_suffix(".json").write_text("{}")
    return page


class Recorder:
    """An experiment that records the calls it gets; only the methods named exist."""

    def __init__(self, *methods):
        self.calls = []
        for method in methods:
            setattr(self, method, lambda *a, _method=method, **k: self.calls.append((_method, a, k)))


class Logger:
    def __init__(self, experiment, **attributes):
        self.experiment = experiment
        vars(self).update(attributes)


def test_tensorboard_gets_the_markdown_as_text(report):
    experiment = Recorder("add_text", "log_artifact")

    hand_over([Logger(experiment)], report, 42)

    assert experiment.calls == [("add_text", ("training_advisor", "# found", 42), {})]


def test_mlflow_gets_the_files_under_its_run(report):
    experiment = Recorder("log_artifact")

    hand_over([Logger(experiment, run_id="r1")], report, 42)

    assert [(c[1][0], c[1][1].rpartition("/")[2], c[1][2]) for c in experiment.calls] == [
        ("r1", "report.html", "training_advisor"),
        ("r1", "report.json", "training_advisor"),
        ("r1", "report.md", "training_advisor"),
    ]


def test_weights_and_biases_gets_the_page_and_an_artifact(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Html=lambda text, inject: ("html", text)))
    experiment = Recorder("log", "log_artifact")

    hand_over([Logger(experiment)], report, 42)

    assert experiment.calls[0] == ("log", ({"training_advisor/report": ("html", "<html>")},), {})
    assert experiment.calls[1][1:] == (
        (str(report),),
        {"name": "training_advisor-report", "type": "report"},
    )


def test_a_logger_that_only_writes_files_is_left_alone_and_a_failing_one_costs_a_line(report, capsys):
    class Failing:
        @property
        def experiment(self):
            raise ConnectionError("no route")

    after = Recorder("add_text")

    hand_over([Logger(Recorder("log_metrics")), Failing(), Logger(after)], report, 1)

    assert len(after.calls) == 1
    assert "Failing did not take the report: ConnectionError: no route" in capsys.readouterr().err
