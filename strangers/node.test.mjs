// Clients of the Node world that we did not write: npm `ws` and `eventsource`.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { EventSource } from "eventsource";
import WebSocket from "ws";
import { startGateway, startRedis, token, until, upTo } from "./gateway.mjs";

let redis;
let gateway;
before(async () => {
  redis = await startRedis();
  gateway = await startGateway({ GATEWAY_REDIS_URL: redis.url });
});
after(async () => {
  await gateway?.kill();
  await redis?.stop();
});

/** A WebSocket whose messages are kept in order, with the cursor that PROTOCOL.md asks a client to keep. */
function connect(url, query = {}, protocols = []) {
  const socket = new WebSocket(`${url}?${new URLSearchParams(query)}`, protocols);
  const client = { socket, messages: [], cursor: null, closed: null };
  client.of = (type) => client.messages.filter((message) => message.type === type);
  socket.on("message", (data, isBinary) => {
    const message = JSON.parse(data);
    assert.equal(isBinary, false);
    client.messages.push(message);
    if (message.id && !message.replay) client.cursor = message.id;
  });
  socket.on("close", (code) => (client.closed = code));
  socket.on("error", (error) => (client.error = error));
  client.ready = () => until("ready", () => client.of("ready").length > 0);
  return client;
}

test("ws: a token in the subprotocol is answered by exactly tidegate.v1", async () => {
  const client = connect(gateway.ws, {}, ["tidegate.v1", `bearer.${token("ws-1")}`]);
  await client.ready();
  assert.equal(client.socket.protocol, "tidegate.v1");
  assert.equal(client.messages[0].type, "hello");
  assert.equal(client.messages[0].user, "ws-1");
  client.socket.close(1000);
  await until("closed", () => client.closed === 1000);
});

test("ws: events come in order, and what was missed comes on resume, once", async () => {
  const access_token = token("ws-2", { channels: ["ws-2-a", "ws-2-b"] });
  const first = connect(gateway.ws, { access_token });
  await first.ready();
  for (const n of upTo(10)) await gateway.publish(n % 2 ? "ws-2-a" : "ws-2-b", n);
  await until("ten events", () => first.of("event").length === 10);
  first.socket.terminate();
  for (const n of [11, 12, 13]) await gateway.publish("ws-2-a", n);
  const second = connect(gateway.ws, { access_token, last_event_id: first.cursor });
  await second.ready();
  await gateway.publish("ws-2-b", 14);
  await until("the live event", () => second.of("event").length === 4);
  assert.deepEqual([...first.of("event"), ...second.of("event")].map((event) => event.data), upTo(14));
  assert.equal(second.of("ready")[0].resume, "ok");
  assert.equal(second.of("ready")[0].replayed, 3);
  assert.deepEqual(second.of("gap"), []);
  second.socket.close();
});

test("ws: subscribe, unsubscribe, ping and an unknown type are answered", async () => {
  const client = connect(gateway.ws, { access_token: token("ws-3", { subscribe: ["ws-3-*"] }) });
  await client.ready();
  const ask = async (message, type) => {
    const n = client.of(type).length;
    client.socket.send(JSON.stringify(message));
    await until(`an answer to ${JSON.stringify(message)}`, () => client.of(type).length > n);
    return client.of(type).at(-1);
  };
  assert.equal((await ask({ type: "subscribe", ref: "1", channel: "ws-3-x" }, "ok")).ref, "1");
  await gateway.publish("ws-3-x", { text: "grüße \u{1F30A}" }, { event: "note" });
  await until("the event", () => client.of("event").length === 1);
  assert.deepEqual(client.of("event")[0].data, { text: "grüße \u{1F30A}" });
  assert.equal(client.of("event")[0].event, "note");
  assert.equal((await ask({ type: "subscribe", ref: "2", channel: "other" }, "error")).code, "forbidden");
  assert.equal((await ask({ type: "unsubscribe", ref: "3", channel: "ws-3-x" }, "ok")).ref, "3");
  assert.ok(await ask({ type: "ping" }, "pong"));
  assert.equal((await ask({ type: "sing" }, "error")).code, "unknown_type");
  client.socket.close();
});

test("ws: a bad token is a 401 that npm ws can see", async () => {
  const client = connect(gateway.ws, { access_token: "nonsense" });
  await until("refused", () => client.error);
  assert.match(client.error.message, /401/);
});

test("eventsource: reconnects by itself after the gateway was killed, with nothing missing", async () => {
  let node = await startGateway({ GATEWAY_REDIS_URL: redis.url });
  const url = `${node.sse}?access_token=${token("es-1", { channels: ["es-1"] })}`;
  const source = new EventSource(url);
  const data = [];
  const readies = [];
  source.onmessage = (message) => data.push(JSON.parse(message.data).data);
  source.addEventListener("ready", (message) => readies.push(JSON.parse(message.data)));
  await until("ready", () => readies.length === 1);
  for (const n of upTo(5)) await gateway.publish("es-1", n);
  await until("five events", () => data.length === 5);
  await node.kill();
  for (const n of [6, 7]) await gateway.publish("es-1", n);
  node = await startGateway({ GATEWAY_REDIS_URL: redis.url, GATEWAY_LISTEN: node.public });
  await until("ready again", () => readies.length === 2);
  await gateway.publish("es-1", 8);
  await until("the live event", () => data.at(-1) === 8);
  assert.deepEqual(data, upTo(8));
  assert.equal(readies[1].resume, "ok");
  source.close();
  await node.kill();
});

test("ws and eventsource: a drained gateway says so to everybody and exits 0", async () => {
  const node = await startGateway({ GATEWAY_REDIS_URL: redis.url });
  const access_token = token("drained");
  const clients = upTo(20).map(() => connect(node.ws, { access_token }));
  await Promise.all(clients.map((client) => client.ready()));
  const byes = [];
  const source = new EventSource(`${node.sse}?access_token=${access_token}`);
  // Left alone it would come back by itself after a moment that was drawn for it, which may be before
  // this node has ended, and would be told once more.
  source.addEventListener("bye", (message) => {
    byes.push(JSON.parse(message.data));
    source.close();
  });
  await new Promise((resolve) => source.addEventListener("ready", resolve));
  const code = await node.stop();
  assert.equal(code, 0);
  await until("all closed", () => clients.every((client) => client.closed !== null));
  assert.deepEqual(clients.map((client) => client.closed), clients.map(() => 1001));
  for (const client of clients) {
    assert.equal(client.messages.at(-1).type, "bye");
    assert.equal(client.messages.at(-1).reason, "drain");
    assert.equal(client.messages.at(-1).reconnect, "after");
  }
  assert.equal(byes.length, 1);
  assert.equal(byes[0].reason, "drain");
});
