"""What people see: TensorBoard in a real browser. ``pytest -m browser``"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from toys import Plain, fit, network, toy_data

from flsv import ClientEvaluation
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1500,1250"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: All text of the page, that of custom elements too.
TEXT = """
const texts = [];
const walk = node => {
  if (node.nodeType === Node.TEXT_NODE) texts.push(node.textContent);
  if (node.tagName === 'STYLE' || node.tagName === 'SCRIPT') return;
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return texts.join('\\n');
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="there is no Chromium with its chromedriver here"),
]


class Hospitals(FederatedDataModule):
    """Three clients with names."""

    @property
    def client_names(self) -> tuple[str, ...]:
        return ("Boston", "Lyon", "St. Mary's/East")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on a run of two rounds."""
    folder = tmp_path_factory.mktemp("browser")
    data = toy_data()
    data.__class__ = Hospitals
    data.source[0].classes = ["Shirt", "Dress", "2"]  # type: ignore[index, union-attr]
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1, evaluation=ClientEvaluation(every=1))
    logger = TensorBoardLogger(folder, name="", version="run")
    fit(loop, folder, Plain(network(batch_norm=False)), data, rounds=2, logger=logger)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(lambda: b"clients/Lyon" in ask(f"{base}/data/runs"), "TensorBoard reads the run")
        yield base
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    driver.command_executor.client_config.timeout = 60
    try:
        yield driver
    finally:
        driver.quit()


def ask(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return b""


def wait_for(met: Callable[[], Any], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.5)


def wait_for_texts(browser: Any, url: str, texts: list[str]) -> None:
    browser.get(url)
    browser.refresh()
    wait_for(lambda: all(text in browser.execute_script(TEXT) for text in texts), f"{texts} at {url}")


def test_custom_scalars_show_clients_by_name(browser: Any, address: str) -> None:
    charts = ["all clients", "cssv by class", "Shirt", "Dress", "class 2", "Boston", "Lyon"]
    runs = ["run/Boston", "run/Lyon", "run/St. Mary's_East"]
    wait_for_texts(browser, f"{address}/#custom_scalars", [*charts, *runs, "St. Mary's/East"])
    # Every chart of the first category has found the three clients' curves.
    wait_for(lambda: browser.execute_script(TEXT).count("Matches (3)") >= 5, "curves in the charts")


def test_the_other_tabs_are_not_empty(browser: Any, address: str) -> None:
    wait_for_texts(browser, f"{address}/#text", ["how to read", "cosine with the aggregate", "St. Mary's/East"])
    wait_for_texts(browser, f"{address}/#hparams", ["algorithm", "FedAvg", "client_accuracy/mean", "val_acc"])
