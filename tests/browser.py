"""Headless Chromium, as the system has it (`make test` installs it where it can)."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, PHONE = 1280, 375


def browser_path():
    """The browser's path; a CI without one has failed, as it would not have looked at the page."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"expected one of {NAMES} on the path, got none")
    return path or pytest.skip(f"needs one of {NAMES} on the path")


@contextmanager
def opened_browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that was opened, and everything that it complained of or asked for."""

    def __init__(self, browser, address, *, width=WIDE, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.complaints, self.requests = [], []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()

    def fits(self):
        """Whether nothing makes the page wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def violations(self):
        """What axe finds against the accessibility guidelines."""
        from axe_playwright_python.sync_playwright import Axe

        return [v["id"] for v in Axe().run(self.page).response["violations"]]
