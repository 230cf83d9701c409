// The browser client against connections that the test plays itself: connecting, resuming, endings, waits, storage.
import assert from "node:assert/strict";
import { test } from "node:test";

import { FakeEventSource, FakeWebSocket, chance, event, last, links, next, pass, start } from "./fakes.mjs";

test("a token goes into the subprotocol, channels and cursor into the query", async () => {
  await start({ token: "a.b.c", channels: ["x", "y/z"], since: "3-0" });
  assert.equal(links[0].url.href, "ws://h:1/v1/ws?channel=x&channel=y%2Fz&last_event_id=3-0");
  assert.deepEqual(links[0].rest, ["tidegate.v1", "bearer.a.b.c"]);
});

test("a cut client resumes from the last id it received, downwards too after a ready", async () => {
  const tide = await start();
  links[0].open("4-0").say(event("base", "5-0"), event("base", undefined), { type: "gap", channel: "base", id: "9-0" });
  assert.equal(tide.cursor, "5-0");
  links[0].end();
  const second = await next();
  assert.equal(second.query.last_event_id, "5-0");
  second.open("1-0").end();
  assert.equal((await next()).query.last_event_id, "1-0");
});

test("each partition keeps its own last id", async () => {
  const tide = await start({ since: "0" });
  links[0].open(null).say(event("a", "0~5-0"), event("b", "1~3-0"), event("a", "0~6-0"));
  assert.equal(tide.cursor, "0~6-0,1~3-0");
});

test("a bye is obeyed: after waits at least so long, never ends, reauth asks for a token", async () => {
  let tokens = 0;
  const tide = await start({ token: async () => `t${tokens++}` });
  links[0].open().say({ type: "bye", reason: "drain", code: 1001, reconnect: "after", after_ms: 3_000, id: "7-0" });
  links[0].end(1001);
  assert.deepEqual(last(tide, "lost"), { type: "lost", reason: "drain", retry_in_ms: 3_500 });
  await pass(3_499);
  assert.equal(links.length, 1);
  await pass(1);
  assert.equal(links[1].query.last_event_id, "7-0");
  assert.equal(links[1].rest[1], "bearer.t0");
  links[1].open().say({ type: "bye", reason: "token_expired", code: 4401, reconnect: "reauth" });
  links[1].end(4401);
  const third = await next();
  assert.equal(third.rest[1], "bearer.t1");
  third.open().say({ type: "bye", reason: "revoked", code: 4403, reconnect: "never" });
  third.end(4403);
  assert.deepEqual(last(tide, "end"), { type: "end", reason: "revoked" });
  await pass(3_600_000);
  assert.deepEqual([links.length, tide.state], [3, "ended"]);
});

test("close codes without a bye are understood", async () => {
  for (const [code, state] of [[1006, "waiting"], [1012, "waiting"], [4401, "ended"], [4403, "ended"], [4409, "ended"], [1009, "ended"]]) {
    const tide = await start({ token: "fixed" });
    links.at(-1).end(code);
    assert.equal(tide.state, state, `${code}`);
    tide.close();
  }
});

test("a server that says bye and does not close is left after a second", async () => {
  const tide = await start();
  links[0].open().say({ type: "bye", reason: "recycle", reconnect: "after", after_ms: 0 });
  assert.equal(tide.state, "open");
  await pass(1_000);
  assert.deepEqual([tide.state, last(tide, "lost").reason, links[0].closed], ["waiting", "recycle", true]);
});

test("delays are drawn from 5 s, then from a range that doubles to its cap", async () => {
  const tide = await start({ transport: "ws" });
  chance.warp = 0.999_999;
  const waits = [];
  for (let n = 0; n < 9; n++) {
    links.at(-1).end();
    waits.push(Math.round(last(tide, "lost").retry_in_ms));
    await pass(30_000);
  }
  assert.deepEqual(waits, [5_000, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
});

test("only a connection that lived half a minute clears the count of failures", async () => {
  const tide = await start();
  chance.warp = 0.999_999;
  links[0].open().end();
  await pass(5_000);
  links[1].open();
  await pass(24_999);
  links[1].say({ type: "pong" });
  await pass(5_000);
  links[1].end();
  assert.equal(Math.round(last(tide, "lost").retry_in_ms), 1_000);
  await pass(1_000);
  links[2].open();
  await pass(24_999);
  links[2].say({ type: "pong" });
  await pass(5_001);
  links[2].end();
  assert.equal(Math.round(last(tide, "lost").retry_in_ms), 5_000);
});

test("the server's own pace is kept", async () => {
  const tide = await start();
  links[0].open("1-0", { reconnect: { min_ms: 10, max_ms: 40, first_max_ms: 100 } }).end();
  assert.equal(last(tide, "lost").retry_in_ms, 50);
});

test("a silent socket is asked, and left when it does not answer", async () => {
  const tide = await start();
  links[0].open();
  await pass(25_000);
  assert.deepEqual(links[0].sent, [{ type: "ping" }]);
  links[0].say({ type: "pong" });
  await pass(25_000);
  await pass(9_999);
  assert.equal(tide.state, "open");
  await pass(1);
  assert.deepEqual([tide.state, last(tide, "lost").reason], ["waiting", "no sign of life"]);
});

test("a connection that never says hello is given up", async () => {
  const tide = await start();
  await pass(15_000);
  assert.equal(last(tide, "lost").reason, "no answer");
});

test("an expiring token is renewed in the open session", async () => {
  let tokens = 0;
  await start({ token: async () => `t${tokens++}` });
  links[0].open().say({ type: "token_expiring", in_ms: 8_000 });
  await pass(1_000);
  assert.deepEqual(links[0].sent, [{ type: "auth", ref: "1", token: "t1" }]);
});

test("a token that could not be checked is sent again, until it was or another took its place", async () => {
  const tide = await start({ token: "t0" });
  const link = links[0].open();
  const ref = tide.auth("t1");
  link.say({ type: "error", ref, code: "unavailable", retry: true });
  await pass(2_000);
  assert.deepEqual(link.sent, [1, 2].map(() => ({ type: "auth", ref, token: "t1" })));
  link.say({ type: "error", ref, code: "rate_limited", retry: true, after_ms: 3_000 });
  const next = tide.auth("t2");
  await pass(10_000);
  assert.deepEqual(link.sent.slice(2), [{ type: "auth", ref: next, token: "t2" }]);
  link.say({ type: "error", ref: next, code: "token_invalid", retry: false });
  await pass(10_000);
  assert.equal(link.sent.length, 3);
});

test("a token function that fails is asked again later", async () => {
  let tokens = 0;
  const tide = await start({
    token: async () => {
      if (!tokens++) throw new Error("no network");
      return "t";
    },
  });
  assert.deepEqual([links.length, last(tide, "lost").reason], [0, "no connection: no network"]);
  assert.equal((await next()).rest[1], "bearer.t");
});

test("coming online brings the attempt forward once, and never before the server's hint", async () => {
  const target = new EventTarget();
  for (const verb of ["addEventListener", "removeEventListener"]) globalThis[verb] = target[verb].bind(target);
  try {
    const online = () => target.dispatchEvent(new Event("online"));
    const tide = await start();
    links[0].open().say({ type: "bye", reason: "slow", reconnect: "after", after_ms: 20_000 });
    links[0].end(1013); // due in 21 s
    chance.warp = 0.1;
    online(); // drawn: 0.5 s, but the hint is a floor
    await pass(19_999);
    assert.equal(links.length, 1);
    await pass(1);
    assert.equal(links.length, 2);
    chance.warp = 0.999;
    links[1].end();
    links.at(-1).onclose = null;
    const wait = last(tide, "lost").retry_in_ms; // up to 1 s by now
    chance.warp = 0.04;
    online();
    chance.warp = 0;
    online(); // a second event draws no second time
    await pass(199);
    assert.equal(links.length, 2, `${wait}`);
    await pass(1);
    assert.equal(links.length, 3);
  } finally {
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  }
});

test("where WebSockets never open, SSE is tried, and kept once it works", async () => {
  await start();
  const kind = () => links.at(-1).constructor;
  for (const expected of [FakeWebSocket, FakeWebSocket, FakeWebSocket]) {
    assert.equal(kind(), expected);
    links.at(-1).end();
    await pass(5_000);
  }
  assert.equal(kind(), FakeEventSource);
  links.at(-1).say({ type: "hello", session: "s" });
  links.at(-1).listeners.error({});
  await pass(30_000);
  assert.equal(kind(), FakeEventSource);
});

test("a socket that worked once is never given up for SSE", async () => {
  await start();
  links[0].open();
  for (let n = 0; n < 6; n++) {
    links.at(-1).end();
    await pass(30_000);
  }
  assert.ok(links.every((link) => link instanceof FakeWebSocket));
});

test("a listener that throws harms nobody, and what is no message is skipped", async () => {
  const tide = await start();
  const faults = [];
  globalThis.reportError = (error) => faults.push(error.message);
  try {
    const off = tide.on("event", () => {
      throw new Error("mine");
    });
    links[0].open().onmessage({ data: "no json" });
    links[0].onmessage({ data: "null" });
    links[0].say(event("base", "5-0"));
    off();
    links[0].say(event("base", "6-0"));
    assert.deepEqual([faults, tide.cursor, tide.heard.length], [["mine"], "6-0", 4]);
  } finally {
    delete globalThis.reportError;
  }
});

test("closing it is the end: no attempt, no message", async () => {
  const tide = await start();
  links[0].open();
  tide.close();
  assert.deepEqual([links[0].closed, last(tide, "end").reason], [1000, "closed"]);
  links[0].say(event("base", "5-0"));
  links[0].end(1000);
  await pass(60_000);
  assert.deepEqual([links.length, tide.heard.at(-1).type], [1, "end"]);
});
