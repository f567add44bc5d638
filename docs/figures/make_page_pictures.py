"""The pictures of pages: the report of `fedveil demo`, and the explorer, as Chromium shows them.

python docs/figures/make_page_pictures.py   (needs Chromium, chromedriver and selenium)
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

FIGURES = Path(__file__).resolve().parent
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """Write the top of a page as a PNG, in pixels of a light screen."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    driver = shutil.which("chromedriver")  # without it, selenium looks for one on the network
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        light = {"name": "prefers-color-scheme", "value": "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [light]})
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.get(page.as_uri())
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 300))")
        shown = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        picture.write_bytes(base64.b64decode(shown["data"]))
    finally:
        browser.quit()


def main() -> None:
    """Make both pages and their pictures."""
    with tempfile.TemporaryDirectory() as folder:
        run, explorer = Path(folder, "demo"), Path(folder, "explorer.html")
        for words in (["demo", "--out", str(run)], ["explore", "--out", str(explorer)]):
            subprocess.run([sys.executable, "-m", "fedveil", *words], check=True, stdout=subprocess.DEVNULL)
        photograph(run / "report.html", FIGURES / "report.png", 1260, 2100)
        photograph(explorer, FIGURES / "explorer.png", 1440, 1345)


if __name__ == "__main__":
    main()
