// The browser client of Tidegate: connects, resumes by cursor, backs off. No dependencies.
//
//   import { connect } from "/v1/client.js";
//   const tide = connect(url, { token, channels: ["news"] });
//   tide.on("event", (event) => console.log(event.channel, event.data));
//   tide.on("gap", (gap) => refetch(gap.channel));
//
// Every message of the server is emitted under its `type`, and "*" hears them all. Two are the client's own: "lost"
// {reason, retry_in_ms} (it tries again by itself) and "end" {reason} (it does not). The rules of resuming and waiting
// are those of the Rust client: what is drawn here keeps a crowd of clients from coming back in the same instant.
const OPEN_MS = 15_000; // until `hello`
const STABLE_MS = 30_000; // a connection that lived this long clears the count of failures
const PONG_MS = 10_000; // a page cannot see the server's own pings, so a silent socket is asked
const BYE_MS = 1_000; // after `bye` the server closes at once; where it does not, we do
const ASK_AGAIN_MS = 1_000;
const SSE_REOPEN_MS = 250;
const FINAL = new Set([1002, 1003, 1007, 1008, 1009, 4403, 4409]);
const TYPES = ["message", "hello", "ready", "position", "gap", "unsubscribed", "token_expiring", "bye"];

/**
 * @param {string} [url] the gateway, "https://host"; empty: where the page came from
 * @param {object} [options]
 *   token: text, or an async function that is called for the first token and whenever a new one is needed ·
 *   channels: asked for when connecting · since: a cursor to resume from ("0": all that is kept) ·
 *   transport: "ws", "sse", or "auto" (WebSocket; SSE where WebSockets never open) ·
 *   storage: keeps the cursor over reloads, for example sessionStorage · credentials: send cookies with SSE elsewhere too ·
 *   WebSocket, EventSource, random: to be replaced in tests
 */
export function connect(url, options) {
  return new Tide(url, options);
}

class Tide {
  #base;
  #options;
  #WebSocket;
  #EventSource;
  #random;
  #key;
  #token;
  #channels;
  #listeners = new Map();
  #places = []; // the cursor: the last id of each partition
  #wanted = new Map(); // later channels: name → {ref, since, state: "waiting" | "asked" | "held"}
  #left = new Set(); // channels of the token that the page does not want
  #refs = 0;
  #pace = { min_ms: 500, max_ms: 30_000, first_max_ms: 5_000 };
  #failures = 0;
  #misses = 0; // attempts in a row without a `hello`
  #works = null; // the transport of the last `hello`
  #link = null;
  #pause = null; // the wait before the next attempt
  #ended = null;

  constructor(url = "", options = {}) {
    this.#options = options;
    this.#WebSocket = options.WebSocket ?? globalThis.WebSocket;
    this.#EventSource = options.EventSource ?? globalThis.EventSource;
    this.#random = options.random ?? Math.random;
    const base = new URL(url || ".", globalThis.location?.origin ?? "http://localhost").href;
    this.#base = base.replace(/\/(v1\/(ws|sse))?(\?.*)?$/, "");
    this.#key = `tidegate:${this.#base}`;
    this.#channels = new Set(options.channels ?? []);
    if (typeof options.token === "string") this.#token = options.token;
    this.#replace(options.since ?? options.storage?.getItem(this.#key) ?? "");
    this.#listen("addEventListener");
    queueMicrotask(() => this.#open()); // listeners are attached by then
  }

  /** What to resume from: pass it as `since`. */
  get cursor() {
    return this.#places.join(",");
  }

  /** "waiting", "connecting", "open" or "ended". */
  get state() {
    if (this.#ended) return "ended";
    return this.#link?.ready ? "open" : this.#pause ? "waiting" : "connecting";
  }

  /** Calls `listener` for every message of `type`; returns a function that ends it. */
  on(type, listener) {
    if (!this.#listeners.has(type)) this.#listeners.set(type, new Set());
    this.#listeners.get(type).add(listener);
    return () => this.off(type, listener);
  }

  off(type, listener) {
    this.#listeners.get(type)?.delete(listener);
  }

  /** Asks for a channel, now and after every reconnect; `ok` or `error` comes with the returned ref (not over SSE,
   *  where the stream is opened anew with the channel, from the cursor). */
  subscribe(channel, since) {
    const ref = String(++this.#refs);
    const wish = this.#wanted.get(channel);
    this.#left.delete(channel);
    if (wish?.state === "held") this.#link?.send?.({ type: "subscribe", ref, channel });
    else if (wish) Object.assign(wish, { ref, state: "waiting" });
    else this.#wanted.set(channel, { ref, since: since || undefined, state: "waiting" });
    if (this.#link?.sse && !wish) this.#reopen();
    this.#ask();
    return ref;
  }

  /** Leaves a channel, also one of the token, now and after every reconnect. */
  unsubscribe(channel) {
    const ref = String(++this.#refs);
    const asked = this.#forget(channel);
    this.#left.add(channel);
    if (this.#link?.sse && asked) this.#reopen();
    if (this.#link?.opened) this.#link.send?.({ type: "unsubscribe", ref, channel });
    return ref;
  }

  /** Replaces the token, in the open session too. */
  auth(token) {
    const ref = String(++this.#refs);
    this.#token = token;
    if (this.#link?.opened) this.#link.send?.({ type: "auth", ref, token });
    return ref;
  }

  /** Asks not to be moved for so long (at most a minute; 0 ends it). */
  busy(for_ms) {
    this.send({ type: "busy", for_ms });
  }

  ping() {
    this.send({ type: "ping" });
  }

  /** Sends a message as it is (a plugin's, for example); dropped while there is no open WebSocket. */
  send(message) {
    if (this.#link?.opened) this.#link.send?.(message);
  }

  /** Ends the client for good. */
  close() {
    const link = this.#link;
    this.#finish("closed");
    link?.close(1000);
  }

  async #open() {
    this.#pause = null;
    if (this.#ended) return;
    const attempt = (this.#link = { opened: 0, ready: false, close() {} }); // ours until another takes its place
    try {
      if (this.#token === undefined && typeof this.#options.token === "function") {
        const token = await this.#options.token();
        if (this.#link !== attempt) return;
        this.#token = token;
      }
      this.#dial();
    } catch (error) {
      if (this.#link === attempt) this.#gone(attempt, 0, `no connection: ${error.message}`);
    }
  }

  #dial() {
    const sse = this.#uses_sse();
    const link = { sse, opened: 0, ready: false, bye: null, joined: [], timers: {}, close() {} };
    const hear = (text, id) => link === this.#link && this.#hear(link, text, id);
    const gone = (code) => link === this.#link && this.#gone(link, code);
    this.#link = link;
    if (sse) {
      const source = new this.#EventSource(this.#endpoint("sse"), { withCredentials: !!this.#options.credentials });
      link.close = () => source.close(); // it would come back by its own rules otherwise
      for (const type of TYPES) source.addEventListener(type, (event) => hear(event.data, event.lastEventId));
      source.addEventListener("error", () => gone(0));
    } else {
      const protocols = this.#token ? [["tidegate.v1", `bearer.${this.#token}`]] : [];
      const socket = new this.#WebSocket(this.#endpoint("ws"), ...protocols);
      link.send = (message) => socket.readyState === 1 && socket.send(JSON.stringify(message));
      link.close = (code) => socket.close(code);
      socket.onmessage = (event) => hear(event.data);
      socket.onclose = (event) => gone(event.code);
    }
    this.#watch(link, OPEN_MS, () => this.#cut(link, "no answer"));
  }

  #uses_sse() {
    const transport = this.#options.transport ?? "auto";
    if (transport !== "auto") return transport === "sse";
    if (!this.#EventSource || this.#works === "ws") return false;
    if (!this.#WebSocket || (this.#works === "sse" && this.#misses === 0)) return true;
    return this.#misses >= 3 && this.#misses % 2 === 1; // a proxy in between may know no WebSockets
  }

  #endpoint(transport) {
    const url = new URL(`${this.#base}/v1/${transport}`);
    url.protocol = url.protocol.replace(/^(http|ws)/, transport === "ws" ? "ws" : "http");
    const channels = transport === "sse" ? new Set([...this.#channels, ...this.#wanted.keys()]) : this.#channels;
    for (const channel of channels) url.searchParams.append("channel", channel);
    if (this.cursor) url.searchParams.set("last_event_id", this.cursor);
    if (transport === "sse" && this.#token) url.searchParams.set("access_token", this.#token);
    return url.href;
  }

  #hear(link, text, id) {
    let message;
    try {
      message = JSON.parse(text);
    } catch {
      return; // not ours
    }
    if (id) this.#replace(id);
    const { type, channel, ref } = message ?? {};
    if (typeof type !== "string") return;
    const wish = [...this.#wanted.values()].find((wish) => ref !== undefined && wish.ref === ref);
    if (type === "hello") this.#greeted(link, message);
    else if (type === "ready") this.#ready(link, message);
    else if (type === "event" && message.id) this.#heard(message);
    else if (type === "position" || type === "ok" || type === "bye") this.#advance(message.id);
    else if (type === "unsubscribed") this.#forget(channel);
    else if (type === "token_expiring") this.#renew(link, message.in_ms);
    if (type === "ok" && wish) wish.state = "held";
    if (type === "error" && wish) this.#refused(link, wish, message);
    if (type === "bye") link.bye = message;
    else if (link.opened && !link.sse) this.#watch(link, link.heartbeat_ms, () => this.#probe(link));
    this.#ask();
    this.#emit(type, message);
    this.#options.storage?.setItem(this.#key, this.cursor); // after the listeners: a reload repeats rather than loses
    if (type === "bye" && link === this.#link) {
      if (link.sse) this.#cut(link);
      else this.#watch(link, BYE_MS, () => this.#cut(link));
    }
  }

  #greeted(link, hello) {
    Object.assign(link, { opened: Date.now(), joined: hello.channels ?? [], heartbeat_ms: hello.heartbeat_ms ?? 25_000 });
    Object.assign(this.#pace, hello.reconnect);
    this.#misses = 0;
    this.#works = link.sse ? "sse" : "ws";
    clearTimeout(link.timers.watch);
  }

  #ready(link, { id }) {
    if (id) this.#replace(id); // downwards too: the log may have been reset
    if (link.ready) return;
    link.ready = true;
    if (link.sse) for (const wish of this.#wanted.values()) wish.state = "held";
    for (const channel of link.joined.filter((name) => this.#left.has(name)))
      link.send?.({ type: "unsubscribe", ref: "left", channel });
  }

  #heard({ id, channel, replay }) {
    const wish = this.#wanted.get(channel);
    if (wish?.state === "asked" && (!wish.since || is_later(id, wish.since))) wish.since = id;
    if (!replay) this.#advance(id); // the replay of a later channel says nothing about the others
  }

  #refused(link, wish, { retry, after_ms }) {
    if (!retry) return this.#wanted.forEach((known, channel) => known === wish && this.#wanted.delete(channel));
    wish.state = "waiting";
    const wait = (after_ms ?? ASK_AGAIN_MS) + this.#random() * ASK_AGAIN_MS;
    link.timers.ask = setTimeout(() => {
      link.timers.ask = undefined;
      if (link === this.#link) this.#ask();
    }, wait);
  }

  // One channel at a time: the server replays one at a time, and more would only meet its rate limit.
  #ask() {
    const link = this.#link;
    if (!link?.ready || !link.send || link.bye || link.timers.ask) return;
    const wishes = [...this.#wanted];
    if (wishes.some(([, wish]) => wish.state === "asked")) return;
    const [channel, wish] = wishes.find(([, wish]) => wish.state === "waiting") ?? [];
    if (!wish) return;
    wish.state = "asked";
    link.send({ type: "subscribe", ref: wish.ref, channel, since: wish.since });
  }

  #renew(link, in_ms = 0) {
    if (typeof this.#options.token !== "function" || link.sse || link.timers.renew) return;
    link.timers.renew = setTimeout(async () => {
      try {
        const token = await this.#options.token();
        if (link === this.#link) this.auth(token);
      } catch {
        // The session ends with its token then, and the function is asked again.
      }
      link.timers.renew = undefined;
    }, this.#random() * Math.min(in_ms / 4, 5_000));
  }

  #watch(link, ms, then) {
    clearTimeout(link.timers.watch);
    link.timers.watch = setTimeout(() => link === this.#link && then(), ms);
  }

  #probe(link) {
    link.send({ type: "ping" });
    this.#watch(link, PONG_MS, () => this.#cut(link, "no sign of life"));
  }

  #cut(link, why) {
    this.#gone(link, 0, why);
    link.close();
  }

  #gone(link, code, why) {
    this.#settle(link);
    if (!link.opened) this.#misses += 1;
    else if (Date.now() - link.opened >= STABLE_MS) this.#failures = 0;
    const reason = link.bye?.reason ?? why ?? (code ? `closed with ${code}` : "cut");
    const next = link.bye?.reconnect ?? (code === 4401 ? "reauth" : FINAL.has(code) ? "never" : "after");
    if (next === "never" || (next === "reauth" && typeof this.#options.token !== "function")) return this.#finish(reason);
    if (next === "reauth") this.#token = undefined;
    this.#wait(reason, link.bye?.after_ms);
  }

  // The connection is over: a confirmed channel goes on from where the session stood, another from its own place.
  #settle(link) {
    Object.values(link.timers ?? {}).forEach(clearTimeout);
    this.#link = null;
    for (const wish of this.#wanted.values()) {
      if (wish.state === "held") wish.since = this.cursor || undefined;
      wish.state = "waiting";
    }
  }

  #reopen() {
    const link = this.#link;
    this.#settle(link);
    link.close();
    this.#sleep(this.#random() * SSE_REOPEN_MS, 0);
  }

  #wait(reason, hint) {
    const n = this.#failures++;
    const ceiling = n ? Math.min(this.#pace.max_ms, this.#pace.min_ms * 2 ** n) : this.#pace.first_max_ms;
    const width = hint === undefined ? ceiling : Math.max(1_000, hint / 10, n ? ceiling : 0);
    const wait = (hint ?? 0) + this.#random() * width; // a hint is a floor, and equal hints are spread
    this.#sleep(wait, hint ?? 0);
    this.#emit("lost", { type: "lost", reason, retry_in_ms: wait });
  }

  #sleep(wait, floor) {
    clearTimeout(this.#pause?.timer);
    const now = Date.now();
    const timer = setTimeout(() => this.#open(), Math.min(wait, 2 ** 31 - 1));
    this.#pause = { timer, due: now + wait, floor: now + floor, redrawn: false };
  }

  // The network or the person is back: worth an earlier attempt, but drawn (once), and never before the server's hint.
  #sooner = () => {
    const now = Date.now();
    if (globalThis.document?.visibilityState === "hidden") return;
    if (this.#link?.opened && !this.#link.sse && !this.#link.bye) this.#probe(this.#link);
    if (!this.#pause || this.#pause.redrawn) return;
    const { due, floor } = this.#pause;
    const at = Math.max(floor, now + this.#random() * this.#pace.first_max_ms);
    if (at < due) this.#sleep(at - now, floor - now);
    this.#pause.redrawn = true;
  };

  #listen(verb) {
    globalThis[verb]?.("online", this.#sooner);
    globalThis.document?.[verb]?.("visibilitychange", this.#sooner);
  }

  #finish(reason) {
    if (this.#ended) return;
    if (this.#link) this.#settle(this.#link);
    clearTimeout(this.#pause?.timer);
    this.#pause = null;
    this.#ended = reason;
    this.#listen("removeEventListener");
    this.#emit("end", { type: "end", reason });
  }

  #forget(channel) {
    return [this.#channels.delete(channel), this.#wanted.delete(channel)].includes(true);
  }

  #replace(cursor) {
    this.#places = cursor.split(",").filter(Boolean);
  }

  #advance(id) {
    for (const place of (id ?? "").split(",").filter(Boolean)) {
      const of = partition(place);
      const rest = this.#places.filter((known) => (partition(known) === null) === (of === null));
      const known = rest.some((other) => partition(other) === of);
      this.#places = known ? rest.map((other) => (partition(other) === of ? place : other)) : [...rest, place];
    }
  }

  #emit(type, message) {
    for (const listener of [...(this.#listeners.get(type) ?? []), ...(this.#listeners.get("*") ?? [])]) {
      try {
        listener(message);
      } catch (error) {
        (globalThis.reportError ?? console.error)(error); // a listener's fault is not the connection's
      }
    }
  }
}

function partition(place) {
  return place.includes("~") ? place.slice(0, place.indexOf("~")) : null;
}

// Ids that cannot be compared count as later: the order of arrival is all there is then.
function is_later(a, b) {
  const parse = (id) => /^(?:(.*)~)?(\d+)-(\d+)$/.exec(id)?.slice(1);
  const [x, y] = [parse(a), parse(b)];
  if (!x || !y || x[0] !== y[0]) return true;
  return BigInt(x[1]) !== BigInt(y[1]) ? BigInt(x[1]) > BigInt(y[1]) : BigInt(x[2]) > BigInt(y[2]);
}
