"""A headless Chromium for pages, and pages opened in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1360,1000",
)


def _found(variable: str, *names: str) -> str:
    browser_path = os.environ.get(variable) or next((path for name in names if (path := shutil.which(name))), None)
    if browser_path is None:
        pytest.skip(f"needs a headless Chromium: no {' or '.join(names)} on PATH, and {variable} is not set")
    return browser_path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A selenium driver of a fresh headless Chromium; tests that use it carry `@pytest.mark.browser`."""
    chromium = _found("FEDVEIL_CHROMIUM", "chromium", "chromium-browser", "google-chrome")
    driver_path = _found("FEDVEIL_CHROMEDRIVER", "chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    driver.set_script_timeout(180)  # a page draws all of its families in one script; a busy machine takes its time
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file in the browser at a given width; at the end of the test the page must have logged and requested nothing."""
    opened: list[str] = []

    def opening(path: Path, *, fragment: str = "", width: int = 1360, height: int = 1000) -> Any:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")
        opened.append(path.resolve().as_uri())
        browser.get(opened[-1] + fragment)
        return browser

    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    yield opening
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    asked = {m["params"]["request"]["url"].partition("#")[0] for m in messages if m["method"] == "Network.requestWillBeSent"}
    fetched = {url for url in asked if not url.startswith("data:")}  # pictures inside the page are listed as requests too
    assert fetched <= {*opened, "about:blank"}, "the page must not ask for anything but itself"
