"""Show a page in the user's browser, where there is one to show it in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def has_display(env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Whether a window opened from here would be seen by the person who asked for it."""
    if env.get("CI") or env.get("SSH_CONNECTION") or env.get("SSH_TTY"):
        return False
    return platform in {"darwin", "win32"} or bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))


def show(page: Path) -> subprocess.Popen[bytes]:
    """Open `page` in the default browser, in a process of its own that nothing waits for."""
    return subprocess.Popen(
        [sys.executable, "-m", "webbrowser", "-t", page.resolve().as_uri()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
