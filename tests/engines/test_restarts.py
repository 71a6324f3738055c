"""Restarts with real processes: of the SuperLink in the middle of a message, and of a node that was killed.

Each of these tests fails on the version before the federation could be operated (bf3ba60), with the commands of its README.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from real_federation import Processes, answers, free_ports

pytestmark = pytest.mark.long
EQUIPOISE = [sys.executable, "-c", "from equipoise.cli import main; main()"]
LONG = 150.0  # seconds, on a busy machine


def state_of_runs(it: Processes, superlink: str) -> list[str]:
    listed = it.call("flwr", "list", superlink, "--format", "json")
    return [run["status"] for run in json.loads(listed[listed.index("{") :])["runs"]]


# ------------------------------------------------------------------------- 1: a warm node after a restart in mid-message


class HeldObjects(ThreadingHTTPServer):
    """Passes a node's requests on to the SuperLink; once it is armed, those for the objects of a message wait."""

    def __init__(self, superlink: int) -> None:
        self.armed, self.held, self.released = threading.Event(), threading.Event(), threading.Event()

        class PassOn(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.path == "/v1/fleet/pull-object" and self.armed.is_set():
                    self.held.set()
                    self.released.wait(2 * LONG)
                link = http.client.HTTPConnection("127.0.0.1", superlink, timeout=30)
                try:
                    link.request("POST", handler.path, body, dict(handler.headers))
                    answer = link.getresponse()
                    content = answer.read()
                except OSError:
                    handler.close_connection = True  # the SuperLink is away: the node tries again
                    return
                finally:
                    link.close()
                handler.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        handler.send_header(name, value)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        super().__init__(("127.0.0.1", 0), PassOn)


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[tuple[Processes, HeldObjects, list[str], Path]]:
    """An app, a SuperLink that remembers, and one warm node that reaches it through a proxy of the test's."""
    app, (port, runtime) = tmp_path / "held-federation", free_ports(2)
    with Processes(tmp_path / "logs") as it, HeldObjects(port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        it.call(*EQUIPOISE, "flower", "init", str(app))
        here = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (it.home / "config.toml").write_text(here)
        superlink = [
            "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port), "--database",
            str(tmp_path / "superlink.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        it.start("superlink", superlink)
        it.wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the SuperLink answers", LONG)
        node = [*EQUIPOISE, "flower", "node", "--insecure", "--superlink", f"127.0.0.1:{proxy.server_port}", "--port"]
        it.start("node", [*node, str(runtime), "--node-config", "client-id='client-0'"])
        it.wait_for_log("node", "SuperNode ID:", LONG)
        try:
            yield it, proxy, superlink, app
        finally:
            proxy.released.set()
            proxy.shutdown()


def test_a_warm_node_answers_the_next_run_after_a_restart_in_the_middle_of_a_message(one_node):
    """The run dies while the node gets a message: its app waited for objects that never come, and no other was forked."""
    it, proxy, superlink, app = one_node
    proxy.armed.set()
    config = "rounds=1 clients-per-round=1 minimum=1 timeout=60.0 folder={}"
    begin = ["flwr", "run", str(app), "here", "--stream", "--run-config"]
    it.start("first", [*begin, config.format(json.dumps(str(app / "first")))], may_end=True)
    it.wait_until(proxy.held.is_set, "the node asks for the objects of a message", LONG)
    time.sleep(5.0)  # by then its app is there, and waits for them
    it.kill("superlink")
    it.may_end.discard("superlink")
    it.start("superlink", superlink)
    it.wait_until(lambda: answers(f"http://127.0.0.1:{superlink[5]}/health"), "the SuperLink is back", LONG)
    it.wait_until(lambda: state_of_runs(it, "here")[0].startswith("finished"), "the first run is dead", LONG)
    proxy.armed.clear()
    proxy.released.set()
    second = it.start("second", [*begin, config.format(json.dumps(str(app / "second")))], may_end=True)
    it.wait_until(lambda: second.poll() is not None, "the second run ends", LONG)
    assert state_of_runs(it, "here").count("finished:completed") == 1, it.log("second")
    assert (app / "second" / "model.safetensors").exists()


# --------------------------------------------------------------------------------- 8: a SuperLink and a node that come back


class ByTheReadme(Processes):
    """A SuperLink and one node, each by the command of the app's README; the port is another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.app = folder / "read-federation"
        self.environment["FLWR_HOME"] = str(self.app / ".flwr")

    def __enter__(self) -> ByTheReadme:
        self.call(*EQUIPOISE, "flower", "init", str(self.app))
        port = str(free_ports(1)[0])
        for file in self.app.glob("*.*"):
            file.write_text(file.read_text(encoding="utf-8").replace("47090", port), encoding="utf-8")
        text = (self.app / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
        _, keys, superlink, nodes, *_ = re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)
        self.superlink = superlink[: superlink.index("> superlink.log")]
        register = re.search(r"^equipoise flower register client-0", nodes, flags=re.M)[0]  # type: ignore[index]
        self.node = nodes[nodes.index("; do\n") + len("; do\n") : nodes.index('> "$client.log"')]
        self.call("bash", "-e", "-c", keys, cwd=self.app)
        try:
            self.begin("superlink", self.superlink)
            self.wait_until(lambda: self.listed() is not None, "the SuperLink answers", LONG)
            self.call("bash", "-c", register, cwd=self.app)
            self.begin("client-0", self.node)
            self.wait_until(lambda: self.listed() == ["online"], "the node is online", LONG)
        except BaseException as failure:
            self.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self

    def begin(self, name: str, command: str) -> None:
        self.may_end.discard(name)
        self.start(name, ["bash", "-c", f"client={name}; exec {command.strip()}"], cwd=self.app)

    def listed(self) -> list[str] | None:
        """The states of the nodes that the SuperLink knows; None while it does not answer."""
        try:
            text = self.call("flwr", "supernode", "list", "federation", "--format", "json", cwd=self.app)
            return [node["status"] for node in json.loads(text[text.index("{") :])["nodes"]]
        except (AssertionError, ValueError, KeyError):
            return None


def test_a_restarted_superlink_knows_its_nodes_and_they_come_back(tmp_path):
    """Before, registrations were lost, and all nodes ended."""
    with ByTheReadme(tmp_path) as it:
        it.kill("superlink")
        time.sleep(5.0)
        it.begin("superlink", it.superlink)
        it.wait_until(lambda: it.listed() is not None, "the SuperLink is back", LONG)
        time.sleep(45.0)  # more than an interval of its heartbeats, by which a node notices that it was forgotten
        it.wait_until(lambda: it.listed() == ["online"], "the node is online again", LONG)
        assert it.running["client-0"].poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_node_that_was_ended_is_let_in_again_by_the_same_command(tmp_path, number):
    """Before, it was refused for 55 s, and ended: whoever does not look at it has no node."""
    with ByTheReadme(tmp_path) as it:
        it.kill("client-0", number, within=LONG)
        it.begin("client-0", it.node)
        it.wait_for_log("client-0", "SuperNode ID:", LONG)
        assert it.running["client-0"].poll() is None
