"""A browser is opened only where someone would see it."""

from pathlib import Path

import pytest

from advisor.cli import _browser


@pytest.mark.parametrize(
    ("env", "platform", "expected"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "a 1 b 2"}, "linux", False),
        ({"SSH_TTY": "/dev/pts/1"}, "darwin", False),
        ({}, "darwin", True),
    ],
)
def test_a_display_is_where_the_user_sits(env: dict[str, str], platform: str, expected: bool) -> None:
    assert _browser.has_display(env, platform) is expected


def test_a_browser_that_never_returns_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a browser that says what it was shown and then stays
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.part && mv {seen}.part {seen}\nexec sleep 3\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    # WHEN a page is shown
    process = _browser.show(tmp_path / "a report.html")
    # THEN the call came back while the browser is still there, and the browser has the page
    assert process.poll() is None
    process.wait(timeout=30)
    assert seen.read_text().strip() == (tmp_path / "a report.html").as_uri()
