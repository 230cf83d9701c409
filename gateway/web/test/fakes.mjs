// What the tests here share: a WebSocket and an EventSource that the test plays itself, on a clock that it moves, and
// the client under test between them.
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock } from "node:test";

import { connect } from "../client.js";

export const links = []; // every connection that was tried, in order
export const chance = { warp: 0.5 }; // what `random` gives
let clients = [];

export class FakeLink {
  readyState = 0;
  sent = [];
  listeners = {};
  constructor(url, rest) {
    Object.assign(this, { url: new URL(url), rest });
    links.push(this);
  }
  get query() {
    return Object.fromEntries(this.url.searchParams);
  }
  get channels() {
    return this.url.searchParams.getAll("channel");
  }
  close(code) {
    this.closed = code ?? true;
  }
}

export class FakeWebSocket extends FakeLink {
  send(text) {
    this.sent.push(JSON.parse(text));
  }
  say(...messages) {
    for (const message of messages) this.onmessage({ data: JSON.stringify(message) });
  }
  open(id = "1-0", hello = {}) {
    this.readyState = 1;
    this.say({ type: "hello", session: "s", channels: ["base", ...this.channels], heartbeat_ms: 25_000, ...hello });
    if (id) this.say({ type: "ready", resume: "ok", replayed: 0, id });
    return this;
  }
  /** Answers what was sent and has no answer yet; `of` gives the answer to one message. */
  answer(of = () => ({ type: "ok" })) {
    for (; this.n_answered < this.sent.length; this.n_answered++) {
      const { ref, channel } = this.sent[this.n_answered];
      this.say({ ref, channel, ...of(this.sent[this.n_answered]) });
    }
    return this;
  }
  n_answered = 0;
  end(code = 1006) {
    this.readyState = 3;
    this.onclose({ code });
  }
}

export class FakeEventSource extends FakeLink {
  addEventListener(type, listener) {
    this.listeners[type] = listener;
  }
  say(message, lastEventId = "") {
    const type = message.type === "event" ? "message" : message.type;
    this.listeners[type]({ data: JSON.stringify(message), lastEventId });
  }
  open(id = "1-0", hello = {}) {
    this.say({ type: "hello", session: "s", channels: ["base", ...this.channels], heartbeat_ms: 25_000, ...hello });
    if (!this.closed) this.say({ type: "ready", resume: "ok", replayed: 0, id }, id);
    return this;
  }
  end() {
    this.listeners.error({});
  }
}

export const settled = () => new Promise(setImmediate);

/** A client that has not dialled yet: it does when the caller waits. */
export function make(options = {}) {
  const fakes = { WebSocket: FakeWebSocket, EventSource: FakeEventSource, random: () => chance.warp };
  const tide = connect("http://h:1", { ...fakes, ...options });
  tide.heard = [];
  tide.on("*", (message) => tide.heard.push(message));
  clients.push(tide);
  return tide;
}

export async function start(options) {
  const tide = make(options);
  await settled();
  return tide;
}

export async function pass(ms) {
  mock.timers.tick(ms);
  await settled();
}

/** Lets the longest first delay pass, or `ms`, and gives the connection that was tried in it. */
export async function next(ms = 5_000) {
  const before = links.length;
  await pass(ms);
  assert.equal(links.length, before + 1, "one attempt");
  return links.at(-1);
}

/** A storage like `sessionStorage`. */
export function storage(entries = {}) {
  const kept = new Map(Object.entries(entries));
  return { kept, getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value) };
}

export const event = (channel, id, more) => ({ type: "event", channel, id, data: 1, ...more });
export const last = (tide, type) => tide.heard.findLast((message) => message.type === type);
export const of = (tide, type) => tide.heard.filter((message) => message.type === type);
export const names = (n) => Array.from({ length: n }, (_, i) => `c${i}`);

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_764_460_000_000 });
  links.length = 0;
  chance.warp = 0.5;
});
afterEach(() => {
  clients.forEach((tide) => tide.close());
  clients = [];
  mock.timers.reset();
});
