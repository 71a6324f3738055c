"""Servers and clients for the tests of serving."""

import asyncio
import threading
import time


class Running:
    """A server in a thread, on a free port."""

    def __init__(self, root, make=None, **access):
        import uvicorn

        from equipoise.serve.app import make_app
        from equipoise.serve.guard import Access
        from equipoise.serve.run_server import ServerOptions, listen, server_config

        hosts = frozenset({"127.0.0.1", "localhost"})
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = root
        self.asked = []  # method, path and body of every request
        app = (make or make_app)(root, Access(hosts, **access))

        async def recorded(scope, receive, send):
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            entry = [scope["method"], scope["path"], b""]
            self.asked.append(entry)

            async def listening():
                message = await receive()
                entry[2] += message.get("body", b"")
                return message

            await app(scope, listening, send)

        self.server = uvicorn.Server(server_config(recorded, ServerOptions()))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.02)
        return self

    def __exit__(self, *failure):
        self.server.should_exit = True
        self.thread.join(10)


class Client:
    """Asks an application without a network, one request after the other; cookies are kept."""

    def __init__(self, root, **access):
        import httpx

        from equipoise.serve.app import make_app
        from equipoise.serve.guard import Access

        self.transport = httpx.ASGITransport(make_app(root, Access(frozenset({"127.0.0.1", "localhost"}), **access)))
        self.cookies = httpx.Cookies()

    def request(self, method, path, **options):
        import httpx

        async def ask():
            async with httpx.AsyncClient(transport=self.transport, base_url="http://127.0.0.1", cookies=self.cookies) as client:
                answer = await client.request(method, path, **options)
                self.cookies.update(client.cookies)
                return answer

        return asyncio.run(ask())

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, **options):
        return self.request("POST", path, **options)
