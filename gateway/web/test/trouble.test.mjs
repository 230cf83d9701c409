// Tokens that ended, lines that died unseen, places where nothing can connect, pages that are loaded again.
import assert from "node:assert/strict";
import { test } from "node:test";

import { FakeWebSocket, chance, event, last, links, make, next, of, pass, settled, start, storage } from "./fakes.mjs";

const counting = () => {
  const source = async () => `t${source.n++}`;
  return Object.assign(source, { n: 0 });
};

test("over SSE a token that may have ended meanwhile is renewed, as a page cannot see a 401", async () => {
  await start({ transport: "sse", token: counting() });
  links[0].open("5-0").end();
  const second = await next();
  assert.equal(second.query.access_token, "t0", "a lost stream is no fault of the token");
  second.end();
  assert.equal((await next()).query.access_token, "t1");
});

test("over a WebSocket as well; a bye says enough to keep the token", async () => {
  await start({ token: counting() });
  links[0].end();
  const second = await next();
  assert.equal(second.rest[1], "bearer.t1");
  second.say({ type: "bye", reason: "overload", reconnect: "after", after_ms: 10 });
  second.end(1013);
  assert.equal((await next()).rest[1], "bearer.t1");
});

test("a token whose end passed while the client was away is renewed before it is used", async () => {
  const ends = 1_764_460_000 + 60;
  await start({ token: counting() });
  links[0].open("1-0", { expires_at: ends }).say({ type: "bye", reason: "slow", reconnect: "after", after_ms: 70_000 });
  links[0].end(1013);
  const second = await next(80_000);
  assert.equal(second.rest[1], "bearer.t1");
  second.open("1-0", { expires_at: ends + 3_600 }).end();
  assert.equal((await next()).rest[1], "bearer.t1", "good for an hour");
});

test("a token function that never answers is given up and asked again", async () => {
  const waiting = [];
  const tide = await start({ token: () => new Promise((resolve) => waiting.push(resolve)) });
  await pass(30_000);
  assert.equal(last(tide, "lost").reason, "no token in time");
  await pass(5_000);
  waiting[0]("too late");
  await settled();
  assert.equal(links.length, 0);
  waiting[1]("t");
  await settled();
  assert.equal(links[0].rest[1], "bearer.t");
});

test("a stream that gave no word for longer than any server is silent is opened anew from the cursor", async () => {
  const tide = await start({ transport: "sse" });
  links[0].open("1-0");
  await pass(300_000);
  links[0].say({ type: "position", id: "5-0" }, "5-0");
  await pass(329_999);
  assert.deepEqual([links.length, tide.state], [1, "open"]);
  await pass(1);
  const second = await next(250);
  assert.deepEqual([links[0].closed, second.query.last_event_id, of(tide, "lost").length], [true, "5-0", 0]);
});

/** Runs `body` with an `online()` that the page hears. */
async function with_online(body) {
  const target = new EventTarget();
  for (const verb of ["addEventListener", "removeEventListener"]) globalThis[verb] = target[verb].bind(target);
  try {
    await body(() => target.dispatchEvent(new Event("online")));
  } finally {
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  }
}

test("coming online opens a quiet stream anew after a drawn moment, one that spoke just now never", () =>
  with_online(async (online) => {
    const tide = await start({ transport: "sse" });
    links[0].open("1-0");
    await pass(50_000);
    online();
    await pass(10_000);
    assert.equal(links.length, 1, "heard within two heartbeats");
    online();
    await pass(1_000);
    online(); // draws no second time
    await pass(1_499);
    assert.equal(links[0].closed, undefined);
    await pass(1);
    assert.equal(links[0].closed, true);
    (await next(250)).open("1-0");
    await pass(60_000);
    online();
    links[1].say(event("base", "2-0"), "2-0");
    await pass(5_000);
    assert.deepEqual([links.length, tide.state], [2, "open"], "it spoke meanwhile");
  }));

test("coming online again and again does not put off the end of a dead socket", () =>
  with_online(async (online) => {
    const tide = await start();
    links[0].open();
    for (let n = 0; n < 3; n++) {
      online();
      await pass(4_000);
    }
    assert.deepEqual([tide.state, links[0].sent.length], ["waiting", 1]);
  }));

for (const [name, error] of [["malformed", "SyntaxError"], ["forbidden", "SecurityError"]]) {
  test(`a connection that the browser calls ${name} is the end, with a reason`, async () => {
    class Refusing {
      constructor() {
        throw new DOMException("not like this", error);
      }
    }
    const tide = await start({ WebSocket: Refusing, token: async () => "two\nlines" });
    assert.deepEqual([tide.state, last(tide, "end").reason], ["ended", "no connection: not like this"]);
  });
}

test("a connection that cannot be made just now is tried again", async () => {
  let n = 0;
  class Moody extends FakeWebSocket {
    constructor(...rest) {
      super(...rest);
      if (!n++) throw new TypeError("not now");
    }
  }
  const tide = await start({ WebSocket: Moody });
  assert.equal(last(tide, "lost").reason, "no connection: not now");
  (await next()).open();
  assert.equal(tide.state, "open");
});

test("where there is no WebSocket or EventSource at all, it ends and says so", async () => {
  for (const [transport, kind] of [["ws", "WebSocket"], ["sse", "EventSource"], ["auto", "WebSocket"]]) {
    const tide = await start({ transport, WebSocket: false, EventSource: false });
    assert.equal(last(tide, "end").reason, `no ${kind} here: give one as an option`);
  }
});

test("a sandboxed frame, which has no origin, connects to an absolute address", async () => {
  globalThis.location = { origin: "null", href: "about:srcdoc" };
  try {
    make();
    await settled();
    assert.equal(links[0].url.href, "ws://h:1/v1/ws");
  } finally {
    delete globalThis.location;
  }
});

test("the cursor outlives the page where a storage is given", async () => {
  const kept = storage();
  const tide = await start({ storage: kept });
  links[0].open("4-0").say(event("base", "5-0"));
  tide.close();
  await start({ storage: kept });
  assert.equal(links[1].query.last_event_id, "5-0");
});

test("a later channel goes on after a reload where the page before had it", async () => {
  const kept = storage();
  const before = await start({ storage: kept });
  before.subscribe("news");
  links[0].open("4-0").answer().say(event("news", "5-0"));
  before.close();

  const soon = make({ storage: kept });
  const ref = soon.subscribe("news");
  soon.subscribe("new");
  await settled();
  assert.deepEqual([links[1].channels, links[1].query.last_event_id], [["news"], "5-0"]);
  links[1].open("7-0");
  assert.deepEqual(last(soon, "ok"), { type: "ok", ref, channel: "news", resume: "ok", id: "7-0" });
  assert.deepEqual(links[1].sent.map(({ channel, since }) => [channel, since]), [["new", undefined]]);
  soon.close();

  const late = await start({ storage: kept });
  links[2].open("9-0");
  late.subscribe("news");
  assert.deepEqual(links[2].sent[0].since, "7-0", "asked for when the session was past it");
});

test("a channel that the page names a place for, or that was left, is not restored", async () => {
  const kept = storage();
  const before = await start({ storage: kept });
  for (const channel of ["a", "b"]) before.subscribe(channel);
  links[0].open("4-0").answer().answer();
  before.unsubscribe("b");
  links[0].answer();
  before.close();
  const tide = make({ storage: kept });
  tide.subscribe("a", "1-0");
  tide.subscribe("b");
  await settled();
  links[1].open("5-0").answer().answer();
  assert.deepEqual([links[1].channels, links[1].sent.map(({ since }) => since)], [[], ["1-0", undefined]]);
});

test("two clients of one page keep their cursors apart, by their channels or by a key of their own", async () => {
  const kept = storage();
  const options = [{ channels: ["b", "a"] }, { channels: ["c"] }, { storage_key: "mine" }, {}];
  for (const [n, one] of options.entries()) {
    const tide = await start({ storage: kept, ...one });
    links[n].open(`${n + 1}-0`);
    tide.close();
  }
  await start({ storage: kept, channels: ["a", "b"] });
  for (const one of options.slice(1)) await start({ storage: kept, ...one });
  assert.deepEqual(links.slice(4).map((link) => link.query.last_event_id), ["1-0", "2-0", "3-0", "4-0"]);
});

test("a cursor that an older version of this client kept is read", async () => {
  const kept = () => storage({ "tidegate:http://h:1": "5-0" });
  for (const options of [{}, { channels: ["a"] }]) await start({ storage: kept(), ...options });
  assert.deepEqual(links.map((link) => link.query.last_event_id), ["5-0", "5-0"]);
});

test("a storage that takes nothing harms nobody", async () => {
  const faults = [];
  globalThis.reportError = (error) => faults.push(error.message);
  try {
    const full = { getItem: () => null, setItem: () => assert.fail("full") };
    const tide = await start({ storage: full });
    links[0].open().say({ type: "bye", reason: "drain", reconnect: "after", after_ms: 0 });
    await pass(1_000);
    assert.deepEqual([last(tide, "lost").reason, faults[0]], ["drain", "full"]);
  } finally {
    delete globalThis.reportError;
  }
});
