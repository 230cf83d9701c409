// What becomes of later channels: asked for, carried over reconnects, left, refused.
import assert from "node:assert/strict";
import { test } from "node:test";

import { chance, event, last, links, make, names, next, of, pass, settled, start } from "./fakes.mjs";

const say = (link) => link.sent.map(({ type, channel, since }) => [type, channel, since].filter(Boolean).join(" "));
const over_rate = { type: "error", code: "rate_limited", retry: true, after_ms: 100 };
const forbidden = { type: "error", code: "forbidden", retry: false };

/** A client with `channels` confirmed over a WebSocket that is open. */
async function holding(channels, options) {
  const tide = await start(options);
  links[0].open("4-0");
  for (const channel of channels) tide.subscribe(channel);
  for (const _ of channels) links[0].answer();
  return tide;
}

test("a later channel is asked for from its own place, and its replay does not move the cursor", async () => {
  const tide = await start();
  const ref = tide.subscribe("more", "2-0");
  links[0].open("4-0");
  assert.deepEqual(links[0].sent, [{ type: "subscribe", ref, channel: "more", since: "2-0" }]);
  links[0].say(event("more", "3-0", { replay: true }));
  assert.equal(tide.cursor, "4-0");
  links[0].say({ type: "ok", ref, channel: "more", resume: "ok", id: "6-0" });
  assert.equal(tide.cursor, "6-0");
});

test("confirmed channels travel in the query after a loss, and nothing is asked for again", async () => {
  const tide = await holding(names(40));
  links[0].say(event("c7", "9-0"));
  links[0].end();
  const second = await next();
  assert.deepEqual(second.channels, names(40));
  assert.equal(second.query.last_event_id, "9-0");
  second.open("9-0");
  assert.deepEqual([second.sent, of(tide, "ok").length], [[], 40]);
  second.end();
  assert.deepEqual((await next()).channels, names(40), "confirmed by `ready` alone");
});

test("a channel that was not confirmed at the loss is asked for singly, from its own place", async () => {
  const tide = await holding(["held"]);
  tide.subscribe("more", "2-0");
  links[0].say(event("more", "10-0", { replay: true }), event("more", "3-0", { replay: true }));
  links[0].end();
  const second = (await next()).open("9-0");
  assert.deepEqual([second.channels, say(second)], [["held"], ["subscribe more 10-0"]], "compared as numbers");
  second.end();
  const third = (await next()).open("9-0");
  assert.deepEqual([third.channels, say(third)], [["held"], ["subscribe more 10-0"]]);
});

test("names too many for the head of a request are asked for singly, from the cursor at the loss", async () => {
  const long = names(60).map((name) => `${name}${"%".repeat(100)}`); // escaped three times as long
  await holding(long);
  links[0].say(event("base", "9-0"));
  links[0].end();
  const second = await next();
  assert.ok(second.url.search.length < 5_000, `${second.url.search.length}`);
  assert.ok(second.channels.length > 10);
  second.open(null).say(event("base", "12-0"), { type: "ready", resume: "ok", id: "12-0" });
  assert.deepEqual(say(second), [`subscribe ${long[second.channels.length]} 9-0`]);
});

test("every third attempt without a hello goes without later channels, and hears which is refused", async () => {
  const tide = await holding(["gone", "kept"]);
  links[0].end();
  const channels = [];
  for (let n = 0; n < 3; n++) {
    const link = await next(30_000);
    channels.push(link.channels);
    if (n < 2) link.end();
  }
  assert.deepEqual(channels, [["gone", "kept"], ["gone", "kept"], []]);
  const third = links.at(-1).open("4-0");
  third.answer(({ channel }) => (channel === "gone" ? forbidden : { type: "ok" })).answer();
  assert.deepEqual(say(third), ["subscribe gone 4-0", "subscribe kept 4-0"]);
  assert.equal(last(tide, "error").code, "forbidden");
  third.end();
  assert.deepEqual((await next(30_000)).channels, ["kept"]);
});

test("many channels are tried once more together before they are asked for one by one", async () => {
  await holding(names(40));
  links[0].end();
  for (let n = 0; n < 2; n++) (await next(30_000)).end();
  const third = await next(30_000);
  assert.deepEqual(third.channels, []);
  third.open("4-0");
  assert.deepEqual([third.closed, third.sent], [true, []]);
  const fourth = await next(250);
  assert.deepEqual([fourth.channels, fourth.query.last_event_id], [names(40), "4-0"]);
  fourth.end(); // so one of them is refused
  (await next(30_000)).end();
  const sixth = (await next(30_000)).open("4-0");
  assert.deepEqual([sixth.channels, say(sixth)], [[], ["subscribe c0 4-0"]]);
});

test("channels are asked for one at a time; one refused for now comes again, one denied does not", async () => {
  const tide = await start();
  const [busy, secret] = [tide.subscribe("busy"), tide.subscribe("secret")];
  const [link] = links;
  link.open();
  link.say({ type: "error", ref: busy, code: "unavailable", retry: true, after_ms: 100 });
  assert.equal(link.sent.length, 1);
  await pass(600);
  assert.deepEqual(say(link), ["subscribe busy", "subscribe busy"]);
  link.say({ type: "ok", ref: busy, channel: "busy" });
  link.say({ type: "error", ref: secret, code: "forbidden", retry: false });
  link.end();
  assert.deepEqual((await next()).channels, ["busy"]);
});

test("what is over the session's own rate comes again within twice the time that the server names", async () => {
  const tide = await start();
  chance.warp = 0.999;
  tide.subscribe("a", "1-0");
  links[0].open().answer(() => over_rate);
  await pass(99);
  assert.equal(links[0].sent.length, 1);
  await pass(101);
  assert.equal(links[0].sent.length, 2);
});

test("many leaves are paced, and repeated when the server had no room for them", async () => {
  const tide = await holding(names(120));
  const [link] = links;
  link.sent.length = link.n_answered = 0;
  for (const channel of names(120)) tide.unsubscribe(channel);
  assert.equal(link.sent.length, 20, "unanswered");
  link.answer(() => (link.n_answered < 50 ? { type: "ok" } : over_rate));
  const n_sent = link.sent.length;
  await pass(200);
  assert.equal(link.sent.length, n_sent + 1, "one at a time once it was too many");
  link.answer();
  const left = new Set(of(tide, "ok").map(({ channel }) => channel));
  assert.deepEqual([left.size, link.sent.length], [120, 120 + n_sent - 50]);
});

test("nothing of a channel that is being left is emitted, but the cursor moves on", async () => {
  const tide = await holding(["a"]);
  tide.unsubscribe("a");
  links[0].say(event("a", "5-0"), { type: "gap", channel: "a", reason: "evicted" }, event("a"), event("base", "7-0"));
  const heard = tide.heard.slice(-2).map(({ type, channel }) => [type, channel]);
  assert.deepEqual([heard, tide.cursor], [[["ok", "a"], ["event", "base"]], "7-0"]);
  links[0].answer();
  tide.subscribe("a");
  links[0].say(event("a", "8-0"));
  assert.equal(last(tide, "event").id, "8-0", "wanted again");
});

test("a channel left stays left, and one taken away is not asked for again", async () => {
  const tide = await start({ channels: ["q", "taken"] });
  links[0].open().say({ type: "unsubscribed", channel: "taken", reason: "grant" });
  tide.unsubscribe("base");
  tide.unsubscribe("q");
  assert.deepEqual(say(links[0]), ["unsubscribe base", "unsubscribe q"]);
  links[0].answer().end();
  const second = await next();
  assert.equal(second.url.search, "?last_event_id=1-0");
  assert.deepEqual(say(second.open()), ["unsubscribe base"]);
});

test("a token that joins a hundred channels which the page does not want is no flood", async () => {
  const tide = await start();
  links[0].open("1-0", { channels: names(100) });
  for (const channel of names(100)) tide.unsubscribe(channel);
  for (let n = 0; n < 100; n++) links[0].answer();
  links[0].end();
  const second = (await next()).open("1-0", { channels: names(100) });
  assert.equal(second.sent.length, 20);
  for (let n = 0; n < 100; n++) second.answer();
  assert.equal(second.sent.length, 100);
});

test("a channel that was left and that a new token joins is left again", async () => {
  const tide = await start();
  links[0].open("1-0", { channels: ["a"] });
  tide.unsubscribe("a");
  links[0].answer();
  links[0].say({ type: "ok", channel: "a" }); // without a ref: the token's doing
  links[0].say({ type: "ok", ref: "x", channel: "b" }); // anything makes it look
  assert.deepEqual(say(links[0]), ["unsubscribe a", "unsubscribe a"]);
});

test("over SSE later channels open the stream anew, once, and are confirmed with their ref", async () => {
  const tide = await start({ transport: "sse", token: "t", channels: ["a"] });
  assert.equal(links[0].url.href, "http://h:1/v1/sse?channel=a&access_token=t");
  links[0].open("2-0").say(event("a", "5-0"), "5-0");
  assert.equal(tide.cursor, "5-0", "the id line");
  const refs = [tide.subscribe("b"), tide.subscribe("c")];
  assert.equal(links[0].closed, true);
  const second = await next(250);
  assert.equal(second.url.search, "?channel=a&channel=b&channel=c&last_event_id=5-0&access_token=t");
  second.open("5-0");
  assert.deepEqual(of(tide, "ok").map(({ ref, channel }) => [ref, channel]), [[refs[0], "b"], [refs[1], "c"]]);
  tide.unsubscribe("b");
  assert.deepEqual((await next(250)).channels, ["a", "c"]);
});

test("over SSE a bye closes the stream and is obeyed", async () => {
  const tide = await start({ transport: "sse" });
  links[0].open("5-0").say({ type: "bye", reason: "drain", reconnect: "after", after_ms: 100, id: "6-0" }, "5-0");
  assert.deepEqual([links[0].closed, last(tide, "lost").reason], [true, "drain"]);
  assert.equal((await next()).query.last_event_id, "6-0");
});

test("a stream that broke is closed, as it would come back by itself beside the next one", async () => {
  await start({ transport: "sse" });
  links[0].open("5-0").end();
  assert.equal(links[0].closed, true);
});

/** Plays an SSE gateway that grants all but `refused`, until the client makes no more attempts. */
async function play(refused) {
  for (let n_quiet = 0; n_quiet < 200; n_quiet++) {
    assert.ok(links.length < 50, "it comes to an end");
    const link = links.at(-1);
    if (!link.is_played && link.channels.some((channel) => refused.includes(channel))) link.end();
    else if (!link.is_played) link.open(link.query.last_event_id);
    else await pass(100);
    link.is_played = true;
    if (links.at(-1) !== link) n_quiet = 0;
  }
}

test("over SSE one refused channel is found and dropped, and the others are heard", async () => {
  const tide = await start({ transport: "sse", channels: ["a"] });
  links[0].open("2-0");
  const refs = Object.fromEntries(names(8).map((channel) => [channel, tide.subscribe(channel)]));
  chance.warp = 0.1;
  await pass(25);
  await play(["c5"]);
  const errors = of(tide, "error").map(({ ref, code, retry }) => [ref, code, retry]);
  assert.deepEqual(errors, [[refs.c5, "forbidden", false]]);
  assert.deepEqual(links.at(-1).channels.sort(), ["a", ...names(8).filter((name) => name !== "c5")]);
  assert.equal(tide.state, "open");
});

test("over SSE a channel is not dropped because the network failed when it was asked for", async () => {
  const tide = await start({ transport: "sse", channels: ["a"] });
  links[0].open("2-0");
  tide.subscribe("b");
  (await next(250)).end(); // nobody there
  const third = (await next()).open("2-0"); // there again, and `b` was left out
  assert.deepEqual([third.channels, third.closed], [["a"], true]);
  const fourth = (await next(250)).open("2-0");
  assert.deepEqual([fourth.channels, tide.state, of(tide, "error")], [["a", "b"], "open", []]);
});

test("over SSE a confirmed channel that is granted no more is found, and no other loses its place", async () => {
  const tide = await start({ transport: "sse", channels: ["a"] });
  links[0].open("2-0");
  for (const channel of names(4)) tide.subscribe(channel);
  (await next(250)).open("3-0");
  links[1].end();
  chance.warp = 0.1;
  await pass(500);
  await play(["c0"]);
  assert.deepEqual(of(tide, "error").map(({ code }) => code), ["forbidden"]);
  assert.deepEqual(links.at(-1).channels, ["a", "c1", "c2", "c3"]);
  assert.ok(links.slice(2).every((link) => link.query.last_event_id === "3-0"));
});

test("a second wish for a confirmed channel is answered too", async () => {
  const tide = await holding(["a"]);
  const ref = tide.subscribe("a");
  assert.deepEqual(links[0].sent.at(-1), { type: "subscribe", ref, channel: "a" });
  links[0].end();
  assert.deepEqual((await next()).channels, ["a"]);
  const streams = make({ transport: "sse" });
  streams.subscribe("b");
  await settled();
  links.at(-1).open();
  const again = streams.subscribe("b");
  await settled();
  assert.equal(last(streams, "ok").ref, again);
});
