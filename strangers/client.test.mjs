// Our browser client on sockets and streams that we did not write (npm `ws` and `eventsource`), against the real
// gateway: what its own tests play by hand, the wire must bear out.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { EventSource } from "eventsource";
import WebSocket from "ws";
import { connect } from "../gateway/web/client.js";
import { startGateway, token, until, upTo } from "./gateway.mjs";

let gateway;
before(async () => {
  // A quick rate, so that who was told to wait need not wait long; the burst is the default one.
  gateway = await startGateway({ GATEWAY_CLIENT_RATE: "100" });
});
after(async () => {
  clients.forEach((tide) => tide.close());
  await gateway?.kill();
});

const clients = []; // all of them, also those of a test that failed

const names = (n) => upTo(n).map((i) => `c${i}`);

/** A client whose draws are short; `of` gives what it heard. */
function follow(to, options) {
  const [links, said, heard] = [[], [], []];
  class Socket extends WebSocket {
    constructor(...rest) {
      super(...rest);
      links.push(this.on("error", () => {})); // a close follows
    }
    send(text) {
      said.push(JSON.parse(text));
      super.send(text);
    }
  }
  class Stream extends EventSource {
    constructor(...rest) {
      super(...rest);
      links.push(this);
    }
  }
  const ours = { WebSocket: Socket, EventSource: Stream, random: () => 0.01 };
  const tide = connect(`http://${to.public}`, { ...ours, ...options });
  tide.on("*", (message) => heard.push(message));
  clients.push(tide);
  const of = (type) => heard.filter((message) => message.type === type);
  return Object.assign(tide, { links, said, of });
}

const is_open = (tide) => until("open", () => tide.state === "open");

test("forty channels come back together after a cut, and what was missed on the last of them as well", async () => {
  const tide = follow(gateway, { token: token("carried", { subscribe: ["*"] }) });
  for (const channel of names(40)) tide.subscribe(channel);
  await until("forty answers", () => tide.of("ok").length === 40);
  const n_said = tide.said.length;
  tide.links[0].terminate();
  await until("lost", () => tide.of("lost").length === 1);
  for (const channel of names(40)) await gateway.publish(channel, "missed");
  await until("forty events", () => tide.of("event").length === 40);
  await is_open(tide);
  await gateway.publish("c40", "live");
  await until("the live event", () => tide.of("event").length === 41);
  assert.equal(tide.said.length, n_said, "nothing is asked for again");
  assert.deepEqual([tide.of("ready")[1].resume, tide.of("error"), tide.of("gap")], ["ok", [], []]);
  tide.close();
});

test("a client that lost the right to one of its channels keeps the others, and what it missed on them", async () => {
  let subscribe = ["*"];
  const tide = follow(gateway, { token: async () => token("shrunk", { subscribe }) });
  for (const channel of ["kept", "gone"]) tide.subscribe(channel);
  await until("two answers", () => tide.of("ok").length === 2);
  subscribe = ["kept"];
  tide.auth("no.token.at-all"); // so that another is fetched when it is refused
  tide.links[0].terminate();
  await until("lost", () => tide.of("lost").length === 1);
  await gateway.publish("kept", 1);
  await until("the event", () => tide.of("event").length === 1);
  await until("the refusal", () => tide.of("error").some(({ code }) => code === "forbidden"));
  tide.close();
});

for (const transport of ["ws", "sse"]) {
  test(`${transport}: a token that is good no more when the client comes back is renewed`, async () => {
    const old = await startGateway();
    const secret = "another key of these tests, as long as HMAC wants it";
    let of_now;
    const tide = follow(old, { transport, token: async () => token("renewed", {}, of_now) });
    await is_open(tide);
    await old.kill();
    of_now = secret;
    const env = { GATEWAY_LISTEN: old.public, GATEWAY_JWT_SECRET: secret, GATEWAY_WS_REFUSE: "status" };
    const node = await startGateway(env);
    await until("open again", () => tide.of("ready").length === 2);
    tide.close();
    await node.kill();
  });
}

test("ninety channels of the token are left at once, and none is heard any more", async () => {
  const tide = follow(gateway, { token: token("leaver", { channels: names(90) }) });
  await is_open(tide);
  for (const channel of names(90)) tide.unsubscribe(channel);
  await until("ninety answers", () => tide.of("ok").length === 90);
  for (const channel of names(90)) await gateway.publish(channel, "unheard");
  await gateway.publish("user:leaver", "heard");
  await until("the event", () => tide.of("event").length > 0);
  assert.deepEqual([tide.of("event").map(({ data }) => data), tide.state], [["heard"], "open"]);
  tide.close();
});

test("over SSE one channel that is not granted is refused, and the others are heard", async () => {
  const tide = follow(gateway, { transport: "sse", token: token("streams", { subscribe: ["granted-*"] }) });
  await is_open(tide);
  const refs = ["granted-1", "secret", "granted-2"].map((channel) => tide.subscribe(channel));
  await until("two answers and a refusal", () => tide.of("ok").length === 2 && tide.of("error").length === 1);
  await is_open(tide);
  for (const channel of ["granted-1", "secret", "granted-2"]) await gateway.publish(channel, channel);
  await until("two events", () => tide.of("event").length === 2);
  assert.deepEqual(tide.of("event").map(({ data }) => data), ["granted-1", "granted-2"]);
  const { ref, code, retry } = tide.of("error")[0];
  assert.deepEqual([ref, code, retry], [refs[1], "forbidden", false]);
  tide.close();
});

for (const transport of ["ws", "sse"]) {
  test(`${transport}: a page that is loaded again misses nothing of a later channel`, async () => {
    const kept = new Map();
    const storage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value) };
    const options = { transport, storage, token: token("reader", { subscribe: ["*"] }) };
    const channel = `pages-${transport}`;
    const first = follow(gateway, options);
    first.subscribe(channel);
    await until("confirmed", () => first.of("ok").length === 1);
    await gateway.publish(channel, 1);
    await until("the event", () => first.of("event").length === 1);
    first.close();
    await gateway.publish(channel, 2);
    const second = follow(gateway, options);
    second.subscribe(channel);
    await until("the missed event", () => second.of("event").length > 0);
    await until("confirmed", () => second.of("ok").length === 1);
    assert.deepEqual([second.of("event").map(({ data }) => data), second.of("ok")[0].resume], [[2], "ok"]);
    second.close();
  });
}
