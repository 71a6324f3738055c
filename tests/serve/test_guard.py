"""One guard stands before every server of the library: who may ask, for which host, from which page, and how much."""

import json
import re
import socket
from pathlib import Path

import pytest
from served import Running
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli import commands
from equipoise.serve.app import make_app

pytest.importorskip("flwr")
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.serve.status_server import status_app

SECRET = "client-of-the-run"  # noqa: S105
TOKEN = "a-token-of-24-characters"  # noqa: S105
SERVERS = {"serve": make_app, "flower status --serve": lambda root, access: status_app(RunView(root), access)}
PAGES = {"serve": "/api/runs", "flower status --serve": "/status.json"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A folder that both servers show: a run, and a federation's status."""
    place = tmp_path_factory.mktemp("shown")
    entry = {"rounds": 2, "failed": 0, "in_a_row": 0, "sent": 0, "received": 0}
    about = {"run": SECRET, "state": "finished", "round": 2, "rounds": 2, "updated": "2026-01-01T00:00:00Z", "alerts": [],
             "clients": {f"{SECRET}\x1b]0;x\x07\nequipoise_round 9": entry}, "protected": False}  # fmt: skip
    (place / "status.json").write_text(json.dumps(about))
    (place / SECRET).mkdir()
    (place / SECRET / "config.toml").write_text("[train]\nrounds = 4\n")
    return place


@pytest.fixture(scope="module", params=SERVERS)
def server(request, shown):
    with Running(shown, make=SERVERS[request.param]) as running:
        running.page = PAGES[request.param]
        yield running


@pytest.fixture(scope="module", params=SERVERS)
def locked(request, shown):
    with Running(shown, make=SERVERS[request.param], token=TOKEN) as running:
        running.page = PAGES[request.param]
        yield running


def ask(server, head, body=b""):
    """The status and the whole of an answer to a request as it is sent; PATH and PORT stand for the server's own."""
    text = head.replace("PATH", server.page).replace("PORT", str(server.port)).replace("\n", "\r\n") + "\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        try:
            connection.sendall(text.encode("latin-1") + body)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            answer = answer or b"HTTP/1.1 000 reset"
    return int(answer.split(b" ", 2)[1]), answer


OURS = "Host: 127.0.0.1:PORT\nConnection: close"
GOOD = [
    f"GET PATH HTTP/1.1\n{OURS}", "GET PATH HTTP/1.0\nHost: localhost", f"GET PATH HTTP/1.1\n{OURS}\nOrigin: http://127.0.0.1:PORT",
    f"GET PATH HTTP/1.1\n{OURS}\nSec-Fetch-Site: cross-site",  # a link on another page that somebody follows
]  # fmt: skip
HOSTS = [
    "evil.com", "127.0.0.1.evil.com:PORT", "127.0.0.1@evil.com", "evil.com#127.0.0.1", "evil.com\t127.0.0.1", "127.1:PORT",
    "2130706433", "0x7f.1", "[::ffff:127.0.0.1]:PORT", "0.0.0.0:PORT", "127.0.0.1:99999", "127.0.0.1:-1", "localhost.", "",
    "[::1", "127.0.0.1, evil.com",
]  # fmt: skip
BAD = [
    *(f"GET PATH HTTP/1.1\nHost: {host}\nConnection: close" for host in HOSTS),
    "GET PATH HTTP/1.0", "GET PATH HTTP/1.1\nConnection: close",
    "GET PATH HTTP/1.1\nHost: evil.com\nHost: 127.0.0.1:PORT\nConnection: close",
    "GET PATH HTTP/1.0\nHost: 127.0.0.1:PORT\nHost: evil.com",
    f"GET http://evil.comPATH HTTP/1.1\n{OURS}", "GET http://127.0.0.1:PORTPATH HTTP/1.1\nHost: evil.com\nConnection: close",
    *(f"GET PATH HTTP/1.1\n{OURS}\nOrigin: {origin}" for origin in
      ("http://evil.com", "null", "http://127.0.0.1:1", "https://127.0.0.1:PORT", "http://localhost:PORT")),
    f"OPTIONS PATH HTTP/1.1\n{OURS}\nOrigin: http://evil.com\nAccess-Control-Request-Method: POST",
    f"POST PATH HTTP/1.1\n{OURS}\nSec-Fetch-Site: cross-site\nContent-Length: 0",
    f"POST PATH HTTP/1.1\n{OURS}\nContent-Length: 99999999999", f"POST PATH HTTP/1.1\n{OURS}\nContent-Length: -1",
    f"GET PATH HTTP/1.1\n{OURS}\nX: {'x' * 500_000}", f"GET /{'x' * 500_000} HTTP/1.1\n{OURS}",
    f"GET PATH/../../../../etc/passwd HTTP/1.1\n{OURS}", "PATH", "GET PATH", "\x16\x03\x01\x02",
]  # fmt: skip


@pytest.mark.parametrize("request_head", GOOD)
def test_requests_that_are_answered(server, request_head):
    status, answer = ask(server, request_head)
    assert status == 200
    assert SECRET.encode() in answer


@pytest.mark.parametrize("request_head", BAD)
def test_requests_that_are_refused(server, request_head):
    status, answer = ask(server, request_head)
    assert status == 0 or 400 <= status < 500
    assert SECRET.encode() not in answer


def test_a_body_without_end_is_cut_off(server):
    piece = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    head = f"POST /predict HTTP/1.1\n{OURS}\nContent-Type: application/json\nTransfer-Encoding: chunked"
    assert ask(server, head, piece * 40)[0] in (0, 404, 413)


def test_headers_of_every_answer(server):
    for request in (GOOD[0], BAD[0]):
        head = ask(server, request)[1].split(b"\r\n\r\n")[0].lower()
        assert b"access-control" not in head
        for name in (b"content-security-policy", b"x-content-type-options", b"x-frame-options", b"referrer-policy"):
            assert head.count(name + b":") == 1
        assert b"script-src 'unsafe" not in head


@pytest.mark.parametrize("given", ["", "Authorization: Bearer wrong", "Authorization: Basic x", "Cookie: equipoise=x"])
def test_without_its_token_a_server_tells_nothing(locked, given):
    for path in ("PATH", "PATH?token=wrong", "/"):
        status, answer = ask(locked, f"GET {path} HTTP/1.1\n{OURS}" + f"\n{given}" * bool(given))
        assert status == 401
        assert SECRET.encode() not in answer


def test_with_its_token_a_server_answers(locked):
    assert ask(locked, f"GET PATH HTTP/1.1\n{OURS}\nAuthorization: Bearer {TOKEN}")[0] == 200
    status, answer = ask(locked, f"GET PATH?token={TOKEN} HTTP/1.1\n{OURS}")
    assert status == 303
    cookie = re.search(rb"set-cookie: (equipoise=\w+)", answer)[1].decode()
    assert TOKEN not in cookie
    assert ask(locked, f"GET PATH HTTP/1.1\n{OURS}\nCookie: {cookie}")[0] == 200
    assert ask(locked, f"GET PATH HTTP/1.1\nHost: evil.com\nConnection: close\nCookie: {cookie}")[0] == 421


COMMANDS = {"serve": ["serve", "."], "flower status --serve": ["flower", "status", ".", "--serve"]}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("host", "asks"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])  # noqa: S104
def test_beyond_this_machine_every_server_asks_for_a_token(name, host, asks, shown, monkeypatch):
    monkeypatch.chdir(shown)
    monkeypatch.delenv("EQUIPOISE_TOKEN", raising=False)
    seen = []

    def run(server, sockets):
        sockets[0].close()
        seen.append(server.config.app)

    monkeypatch.setattr("uvicorn.Server.run", run)
    port = ["--port", "0"] if name == "serve" else ["0"]
    done = CliRunner().invoke(commands.app, [*COMMANDS[name], *port, "--host", host, "--allow-host", "monitor.example"])
    assert done.exit_code == 0, done.output
    (guard,) = seen
    assert (guard.access.token is not None) == asks == ("?token=" in done.stdout)
    assert guard.access.admits(host)
    assert guard.access.admits("monitor.example")
    assert not guard.access.admits("evil.com")


def test_metrics_of_a_hostile_name_are_one_line_each(shown):
    lines = RunView(shown).metrics().splitlines()
    assert "equipoise_round 9" not in lines
    assert [line for line in lines if line.startswith("equipoise_round ")] == ["equipoise_round 2"]


def test_no_other_module_opens_a_server():
    """Whoever adds a server begins it by `run_app`, which puts the guard before it."""
    source = Path(eq.__file__).parent
    opens = r"(?<!self)(?<!place)\.listen\(|HTTPServer|TCPServer|serve_forever|(start|create)_server\(|uvicorn\.(Server|run)\("
    found = {path for path in source.rglob("*.py") if re.search(opens, path.read_text(encoding="utf-8"))}
    assert found == {source / "serve" / "run_server.py"}
