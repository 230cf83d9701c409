"""Clients of the Python world that we did not write: `websockets` and `httpx-sse`."""

import asyncio
import json
import unittest

import httpx
import httpx_sse
import websockets.asyncio.client
import websockets.exceptions

from gateway import Gateway, token

PATIENCE = 20


async def messages_until(socket, kind: str) -> list[dict]:
    """All messages up to the first of this type."""
    got: list[dict] = []
    while not got or got[-1]["type"] != kind:
        got.append(json.loads(await socket.recv()))
    return got


class Strangers(unittest.TestCase):
    gateway: Gateway

    @classmethod
    def setUpClass(cls) -> None:
        cls.gateway = Gateway()
        cls.addClassCleanup(cls.gateway.stop)

    def run_async(self, test) -> None:
        asyncio.run(asyncio.wait_for(test, PATIENCE))

    def test_websockets_receives_and_resumes(self) -> None:
        async def go() -> None:
            header = {"Authorization": "Bearer " + token("py-ws", channels=["py-ws"])}
            async with websockets.asyncio.client.connect(self.gateway.ws, additional_headers=header) as socket:
                opening = await messages_until(socket, "ready")
                self.assertEqual(opening[0]["type"], "hello")
                for n in (1, 2):
                    await asyncio.to_thread(self.gateway.publish, "py-ws", n)
                await messages_until(socket, "event")
                (event,) = await messages_until(socket, "event")
                self.assertEqual(event["data"], 2)
                cursor = event["id"]
            for n in (3, 4):
                await asyncio.to_thread(self.gateway.publish, "py-ws", n)
            header["Last-Event-ID"] = cursor
            async with websockets.asyncio.client.connect(self.gateway.ws, additional_headers=header) as socket:
                resumed = await messages_until(socket, "ready")
                self.assertEqual([m["data"] for m in resumed if m["type"] == "event"], [3, 4])
                self.assertEqual(resumed[-1]["resume"], "ok")

        self.run_async(go())

    def test_websockets_pings_are_answered(self) -> None:
        async def go() -> None:
            url = f"{self.gateway.ws}?access_token={token('py-ping')}"
            async with websockets.asyncio.client.connect(url) as socket:
                await messages_until(socket, "ready")
                await (await socket.ping(b"x" * 125))

        self.run_async(go())

    def test_websockets_sees_a_refusal(self) -> None:
        async def go() -> None:
            with self.assertRaises(websockets.exceptions.InvalidStatus) as refused:
                await websockets.asyncio.client.connect(self.gateway.ws)
            self.assertEqual(refused.exception.response.status_code, 401)
            self.assertEqual(json.loads(refused.exception.response.body)["code"], "token_missing")

        self.run_async(go())

    def test_httpx_sse_receives_and_resumes(self) -> None:
        async def go() -> None:
            header = {"Authorization": "Bearer " + token("py-sse", channels=["py-sse"])}

            async def read(n_events: int, publish: list[int]) -> tuple[list, str]:
                data, cursor = [], ""
                async with httpx.AsyncClient(timeout=PATIENCE) as http:
                    async with httpx_sse.aconnect_sse(http, "GET", self.gateway.sse, headers=header) as stream:
                        async for event in stream.aiter_sse():
                            self.assertNotEqual(event.data, "", "every block of ours holds data")
                            if event.event == "message":
                                data.append(event.json()["data"])
                                cursor = event.id
                            elif event.event == "ready":
                                for n in publish:
                                    await asyncio.to_thread(self.gateway.publish, "py-sse", n)
                            if len(data) == n_events:
                                return data, cursor
                raise AssertionError(f"the stream ended after {data}")

            data, cursor = await read(2, publish=[1, 2])
            self.assertEqual(data, [1, 2])
            await asyncio.to_thread(self.gateway.publish, "py-sse", 3)
            header["Last-Event-ID"] = cursor
            data, _ = await read(2, publish=[4])
            self.assertEqual(data, [3, 4])

        self.run_async(go())


if __name__ == "__main__":
    unittest.main()
