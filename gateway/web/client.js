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
//
// A later channel that the server once confirmed travels in the query of the next connection, as the session's cursor
// is its place too: one replay serves them all. The others are asked for in the open session, one at a time.
const OPEN_MS = 15_000; // until `hello`
const TOKEN_MS = 30_000; // until the function has given a token
const STABLE_MS = 30_000; // a connection that lived this long clears the count of failures
const PONG_MS = 10_000; // a page cannot see the server's own pings, so a silent socket is asked
const QUIET_MS = 330_000; // nor the heartbeats of a stream; but an id comes at least every 5 minutes
const BYE_MS = 1_000; // after `bye` the server closes at once; where it does not, we do
const ASK_AGAIN_MS = 1_000;
const REOPEN_MS = 250;
const CARRIED_BYTES = 4_096; // of channels in the query: proxies cut the head of a request at 8 KiB
const UNANSWERED = 20; // the server bears a burst of 50, and some of it is the page's own
const FEW = 4; // so many asks with a place fit into that burst
const FINAL = new Set([1002, 1003, 1007, 1008, 1009, 4403, 4409]);
const TYPES = ["message", "hello", "ready", "position", "gap", "unsubscribed", "token_expiring", "bye"];

/**
 * @param {string} [url] the gateway, "https://host"; empty: where the page came from
 * @param {object} [options]
 *   token: text, or an async function that is called for the first token and whenever a new one is needed ·
 *   channels: asked for when connecting · since: a cursor to resume from ("0": all that is kept) ·
 *   transport: "ws", "sse", or "auto" (WebSocket; SSE where WebSockets never open) ·
 *   storage: keeps the cursor and the later channels that it stands for over reloads, for example sessionStorage ·
 *   storage_key: under which name; by default the URL and `channels`, so two clients alike in both need one each ·
 *   credentials: send cookies with SSE elsewhere too · WebSocket, EventSource, random: to be replaced in tests
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
  #kept; // by the page before this one: {cursor, channels}
  #token;
  #expires = Infinity; // ms since 1970, of the token in use
  #channels;
  #listeners = new Map();
  #places = []; // the cursor: the last id of each partition
  // Later channels by name: {ref, since, state, known: confirmed once, answered: the page has its `ok`, doubted}. The
  // state is "waiting" to be told to the server, "asked", "confirmed", or "carried" in the query of the link.
  #wanted = new Map();
  #left = new Map(); // those that the page does not want: {ref, state}
  #trial = null; // while SSE seeks a refused channel: of those that are not known, only these wishes are carried
  #refs = 0;
  #pace = { min_ms: 500, max_ms: 30_000, first_max_ms: 5_000 };
  #failures = 0;
  #misses = 0; // attempts in a row without a `hello` or a `bye`
  #works = null; // the transport of the last `hello`
  #link = null;
  #pause = null; // the wait before the next attempt
  #ended = null;

  constructor(url = "", options = {}) {
    this.#options = options;
    this.#WebSocket = options.WebSocket ?? globalThis.WebSocket;
    this.#EventSource = options.EventSource ?? globalThis.EventSource;
    this.#random = options.random ?? Math.random;
    this.#base = absolute(url || ".").replace(/\/(v1\/(ws|sse))?(\?.*)?$/, "");
    this.#channels = new Set(options.channels ?? []);
    if (typeof options.token === "string") this.#token = options.token;
    const plain = `tidegate:${this.#base}`;
    this.#key = options.storage_key ?? [plain, ...[...this.#channels].sort()].join(" ");
    this.#kept = kept(options.storage, this.#key, plain);
    this.#replace(options.since ?? this.#kept.cursor);
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

  /** Asks for a channel, now and after every reconnect; `ok` or `error` comes with the returned ref. It goes on where
   *  the page before this one had it, if `storage` knows. Over SSE the stream is opened anew, from the cursor. */
  subscribe(channel, since) {
    const ref = String(++this.#refs);
    const wish = this.#wanted.get(channel);
    this.#left.delete(channel);
    if (!wish) this.#wish(ref, channel, since);
    else if (wish.state === "confirmed") this.#confirm_again(ref, channel);
    else if (wish.state === "asked") Object.assign(wish, { ref, state: "waiting" });
    else Object.assign(wish, { ref, answered: false });
    if (this.#link?.sse && !wish) this.#reopen();
    this.#ask();
    return ref;
  }

  /** Leaves a channel, also one of the token, now and after every reconnect; nothing more of it is emitted. */
  unsubscribe(channel) {
    const ref = String(++this.#refs);
    const was_asked_for = this.#forget(channel);
    this.#left.set(channel, { ref, state: "waiting" });
    if (this.#link?.sse && was_asked_for) this.#reopen();
    this.#ask();
    return ref;
  }

  /** Replaces the token, in the open session too. */
  auth(token) {
    const ref = String(++this.#refs);
    this.#use(token);
    if (this.#link?.opened) this.#authenticate(this.#link, ref);
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

  // ---- an attempt

  async #open() {
    this.#pause = null;
    if (this.#ended) return;
    const link = { opened: 0, ready: false, bye: null, joined: [], n_may_wait: UNANSWERED, timers: {}, close() {} };
    this.#link = link; // ours until another takes its place
    try {
      if (this.#needs_token()) {
        this.#watch(link, TOKEN_MS, () => this.#gone(link, 0, "no token in time"));
        const token = await this.#options.token();
        if (link !== this.#link) return;
        this.#use(token);
      }
      this.#dial(link);
    } catch (error) {
      if (link !== this.#link) return;
      const why = `no connection: ${error?.message ?? error}`;
      // What a browser calls malformed or forbidden here will be so every time.
      if (link.carried && ["SyntaxError", "SecurityError"].includes(error?.name)) this.#finish(why);
      else this.#gone(link, 0, why);
    }
  }

  #needs_token() {
    return typeof this.#options.token === "function" && (this.#token === undefined || Date.now() >= this.#expires);
  }

  #use(token) {
    this.#token = token;
    this.#expires = Infinity; // until a `hello` says more
  }

  #dial(link) {
    const sse = this.#uses_sse();
    const Kind = sse ? this.#EventSource : this.#WebSocket;
    if (!Kind) return this.#finish(`no ${sse ? "EventSource" : "WebSocket"} here: give one as an option`);
    Object.assign(link, { sse, nth: this.#misses % 3, carried: this.#to_carry(sse) });
    for (const wish of link.carried.values()) wish.state = "carried";
    const hear = (text, id) => link === this.#link && this.#hear(link, text, id);
    const gone = (code) => link === this.#link && this.#gone(link, code);
    if (sse) {
      const source = new Kind(this.#endpoint(link), { withCredentials: !!this.#options.credentials });
      link.close = () => source.close();
      for (const type of TYPES) source.addEventListener(type, (event) => hear(event.data, event.lastEventId));
      source.addEventListener("error", () => {
        source.close(); // it would come back by its own rules, beside us
        gone(0);
      });
    } else {
      const protocols = this.#token ? [["tidegate.v1", `bearer.${this.#token}`]] : [];
      const socket = new Kind(this.#endpoint(link), ...protocols);
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

  // One channel that is not granted (any more) refuses the whole connection, and a page cannot see why. So of three
  // attempts in a row that fail, the last goes without any later channel; and over SSE, which has no other way to ask
  // for one, the second without those that were never confirmed.
  #to_carry(sse) {
    const nth = this.#misses % 3;
    const wishes = nth === 2 ? [] : [...this.#wanted];
    const is_tried = (wish) => nth === 0 && (this.#trial?.has(wish) ?? true);
    if (sse) return new Map(wishes.filter(([, wish]) => wish.known || is_tried(wish)));
    const size = (channel) => encodeURIComponent(channel).length + "&channel=".length;
    let room = [...this.#channels].reduce((room, channel) => room - size(channel), CARRIED_BYTES);
    const fits = (channel) => (room -= size(channel)) >= 0;
    return new Map(wishes.filter(([channel, wish]) => this.#shares_cursor(wish) && fits(channel)));
  }

  #endpoint({ sse, carried }) {
    const url = new URL(`${this.#base}/v1/${sse ? "sse" : "ws"}`);
    url.protocol = url.protocol.replace(/^(http|ws)/, sse ? "http" : "ws");
    for (const channel of new Set([...this.#channels, ...carried.keys()])) url.searchParams.append("channel", channel);
    if (this.cursor) url.searchParams.set("last_event_id", this.cursor);
    if (sse && this.#token) url.searchParams.set("access_token", this.#token);
    return url.href;
  }

  // ---- what the server says

  #hear(link, text, id) {
    let message;
    try {
      message = JSON.parse(text);
    } catch {
      return; // not ours
    }
    if (id) this.#replace(id);
    const { type, channel } = message ?? {};
    if (typeof type !== "string") return;
    if (type === "hello") this.#greeted(link, message);
    else if (type === "ready") this.#ready(link, message);
    else if (type === "event" && message.id) this.#heard(message);
    else if (type === "position" || type === "ok" || type === "bye") this.#advance(message.id);
    else if (type === "unsubscribed") this.#forget(channel);
    else if (type === "token_expiring") this.#renew(link, message.in_ms);
    if (type === "ok" || type === "error") this.#answered(link, message);
    if (type === "bye") link.bye = message;
    else if (link.opened) this.#attend(link);
    if (["ready", "ok", "error", "unsubscribed"].includes(type)) this.#ask();
    if (!this.#left.has(channel) || !["event", "gap"].includes(type)) this.#emit(type, message);
    this.#keep(); // after the listeners: a reload repeats rather than loses
    if (link !== this.#link) return; // a listener's doing
    if (type === "hello") this.#sort_out(link);
    else if (type === "ready") this.#confirm(link, message);
    else if (type === "bye" && link.sse) this.#cut(link);
    else if (type === "bye") this.#watch(link, BYE_MS, () => this.#cut(link));
  }

  #greeted(link, hello) {
    const { channels = [], heartbeat_ms = 25_000 } = hello;
    Object.assign(link, { opened: Date.now(), joined: [...channels], heartbeat_ms });
    Object.assign(this.#pace, hello.reconnect);
    this.#expires = hello.expires_at ? hello.expires_at * 1_000 : Infinity;
    this.#misses = 0;
    this.#works = link.sse ? "sse" : "ws";
  }

  #ready(link, { id }) {
    if (id) this.#replace(id); // downwards too: the log may have been reset
    if (link.ready) return;
    link.ready = true;
    for (const wish of link.carried.values()) wish.state = "confirmed";
    for (const [channel, leave] of this.#left) {
      if (link.joined.includes(channel)) leave.state = "waiting";
      else this.#left.delete(channel); // nothing brings it back
    }
  }

  #heard({ id, channel, replay }) {
    const wish = this.#wanted.get(channel);
    if (wish?.state === "asked" && (!wish.since || is_later(id, wish.since))) wish.since = id;
    if (!replay) this.#advance(id); // the replay of a later channel says nothing about the others
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

  #authenticate(link, ref) {
    clearTimeout(link.timers.auth);
    link.auth_ref = ref;
    link.send?.({ type: "auth", ref, token: this.#token });
  }

  // The token is as good as before; who could say so was away.
  #authenticate_later(link, ref, after_ms = ASK_AGAIN_MS) {
    const wait = after_ms + this.#random() * ASK_AGAIN_MS;
    link.timers.auth = setTimeout(() => link === this.#link && this.#authenticate(link, ref), wait);
  }

  // ---- later channels

  #wish(ref, channel, since) {
    const known = !since && this.#kept.channels.delete(channel);
    const place = (known ? this.#kept.cursor : since) || undefined;
    this.#wanted.set(channel, { ref, state: "waiting", since: place, known, answered: false, doubted: false });
  }

  #forget(channel) {
    return [this.#channels.delete(channel), this.#wanted.delete(channel)].includes(true);
  }

  #shares_cursor(wish) {
    return wish.known && (["carried", "confirmed"].includes(wish.state) || (wish.since ?? "") === this.cursor);
  }

  // Subscribes go one at a time: the server replays one at a time, and more would only meet its rate limit. Leaving is
  // cheap, so several may be under way, first: what is left makes room.
  #ask() {
    const link = this.#link;
    if (!link?.ready || !link.send || link.bye || link.timers.ask) return;
    const in_state = (state, asks) => [...asks].filter(([, ask]) => ask.state === state);
    const tell = (type, [channel, ask]) => {
      ask.state = "asked";
      link.send({ type, ref: ask.ref, channel, since: ask.since });
    };
    const n_asked = in_state("asked", this.#wanted).length;
    const room = Math.max(0, link.n_may_wait - n_asked - in_state("asked", this.#left).length);
    const leaves = in_state("waiting", this.#left).slice(0, room);
    for (const leave of leaves) tell("unsubscribe", leave);
    const [next] = in_state("waiting", this.#wanted);
    if (next && n_asked === 0 && leaves.length < room) tell("subscribe", next);
  }

  #answered(link, { type, ref, channel, code, retry, after_ms }) {
    if (ref === undefined) return this.#joined(link, channel);
    if (ref === link.auth_ref && type === "error" && retry) return this.#authenticate_later(link, ref, after_ms);
    for (const asks of [this.#wanted, this.#left]) {
      const [name, ask] = [...asks].find(([, ask]) => ask.ref === ref) ?? [];
      if (!ask) continue;
      if (type === "ok") Object.assign(ask, { state: "confirmed", known: true, answered: true, doubted: false });
      else if (retry) this.#ask_later(link, ask, code, after_ms);
      else asks.delete(name);
      // What was left comes back with the next connection only where the token joins it.
      if (type === "ok" && asks === this.#left && !link.joined.includes(name)) asks.delete(name);
    }
  }

  // A channel that only the new token of an open session names.
  #joined(link, channel) {
    if (channel) link.joined.push(channel);
    const leave = this.#left.get(channel);
    if (leave) leave.state = "waiting";
  }

  #ask_later(link, ask, code, after_ms = ASK_AGAIN_MS) {
    ask.state = "waiting";
    const is_over_rate = code === "rate_limited"; // of the session's own bucket: no crowd waits for it
    if (is_over_rate) link.n_may_wait = 1;
    clearTimeout(link.timers.ask);
    link.timers.ask = setTimeout(() => {
      link.timers.ask = undefined;
      if (link === this.#link) this.#ask();
    }, after_ms + this.#random() * (is_over_rate ? after_ms : ASK_AGAIN_MS));
  }

  // The server does not answer to the channels of the query one by one; who asked for them waits for it all the same.
  #confirm(link, { resume, id }) {
    for (const [channel, wish] of link.carried) {
      if (!wish.answered) this.#emit("ok", { type: "ok", ref: wish.ref, channel, resume, id });
      wish.answered = true;
    }
  }

  #confirm_again(ref, channel) {
    if (!this.#link.sse) this.#link.send({ type: "subscribe", ref, channel });
    else queueMicrotask(() => this.#emit("ok", { type: "ok", ref, channel, resume: "ok", id: this.cursor }));
  }

  // A connection opened. Without the channels that an attempt before it had: because of one of them, or because the
  // network is back just now. So they are tried once more, all together; this connection is given up before its cursor
  // moves, for that is their place too. Then a WebSocket asks for them one by one, and SSE seeks the one by halves.
  #sort_out(link) {
    for (const wish of link.carried.values()) Object.assign(wish, { known: true, doubted: false });
    const missing = [...this.#wanted].filter(([channel]) => !link.carried.has(channel));
    if (link.sse) return this.#seek(link, missing);
    const undoubted = missing.filter(([, wish]) => this.#shares_cursor(wish) && !wish.doubted);
    if (link.nth < 2 || undoubted.length <= FEW) return;
    for (const [, wish] of undoubted) wish.doubted = true;
    this.#reopen();
  }

  #seek(link, missing) {
    const suspects = missing.filter(([, wish]) => link.nth === 2 || (this.#trial?.has(wish) ?? true));
    this.#trial = null;
    if (link.nth > 0 && suspects.length > 0) {
      const is_certain = suspects.every(([, wish]) => wish.doubted);
      if (is_certain && suspects.length === 1) return this.#refused(missing, suspects[0]);
      const half = is_certain ? suspects.slice(0, suspects.length / 2) : suspects;
      this.#trial = new Set(half.map(([, wish]) => wish));
      for (const [, wish] of suspects) Object.assign(wish, { known: false, doubted: true });
    }
    if (missing.length > 0) this.#reopen();
  }

  #refused(missing, [channel, { ref }]) {
    this.#wanted.delete(channel);
    if (missing.length > 1) this.#reopen();
    const message = `no stream opens with ${channel}`;
    this.#emit("error", { type: "error", ref, code: "forbidden", message, retry: false });
  }

  // ---- signs of life

  #attend(link) {
    Object.assign(link, { heard: Date.now(), is_doubted: false });
    if (link.sse) this.#watch(link, QUIET_MS, () => this.#reopen());
    else this.#watch(link, link.heartbeat_ms, () => this.#probe(link));
  }

  #watch(link, ms, then) {
    clearTimeout(link.timers.watch);
    link.timers.watch = setTimeout(() => link === this.#link && then(), ms);
  }

  #probe(link) {
    link.is_doubted = true;
    link.send({ type: "ping" });
    this.#watch(link, PONG_MS, () => this.#cut(link, "no sign of life"));
  }

  // A stream cannot be asked; to open it anew costs a drawn moment and loses nothing.
  #freshen(link) {
    if (Date.now() - link.heard <= 2 * link.heartbeat_ms) return;
    link.is_doubted = true;
    this.#watch(link, this.#random() * this.#pace.first_max_ms, () => this.#reopen());
  }

  // ---- endings and waits

  #cut(link, why) {
    this.#gone(link, 0, why);
    link.close();
  }

  #gone(link, code, why) {
    this.#settle(link);
    const { bye, opened, carried } = link;
    const has_source = typeof this.#options.token === "function";
    if (carried && !opened && !bye) {
      this.#misses += 1;
      if (has_source) this.#token = undefined; // it may be the reason, which a page cannot see
    }
    const reason = bye?.reason ?? why ?? (code ? `closed with ${code}` : "cut");
    const next = bye?.reconnect ?? (code === 4401 ? "reauth" : FINAL.has(code) ? "never" : "after");
    if (next === "never" || (next === "reauth" && !has_source)) return this.#finish(reason);
    if (next === "reauth") this.#token = undefined;
    this.#wait(reason, bye?.after_ms);
  }

  // The connection is over: a confirmed channel goes on from where the session stood, another from its own place.
  #settle(link) {
    Object.values(link.timers).forEach(clearTimeout);
    this.#link = null;
    if (link.opened && Date.now() - link.opened >= STABLE_MS) this.#failures = 0;
    for (const wish of this.#wanted.values()) {
      const stood_there = wish.state === "confirmed" || (wish.state === "carried" && link.opened);
      if (stood_there) wish.since = this.cursor || undefined;
      wish.state = "waiting";
    }
  }

  #reopen() {
    const link = this.#link;
    this.#settle(link);
    link.close();
    this.#sleep(this.#random() * REOPEN_MS, 0);
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
    const link = this.#link;
    if (link?.opened && !link.bye && !link.is_doubted) link.sse ? this.#freshen(link) : this.#probe(link);
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

  // ---- the cursor

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

  #keep() {
    if (!this.#options.storage) return;
    const held = [...this.#wanted].filter(([, wish]) => this.#shares_cursor(wish)).map(([channel]) => channel);
    try {
      this.#options.storage.setItem(this.#key, JSON.stringify({ cursor: this.cursor, channels: held }));
    } catch (error) {
      report(error); // full, or forbidden here
    }
  }

  #emit(type, message) {
    for (const listener of [...(this.#listeners.get(type) ?? []), ...(this.#listeners.get("*") ?? [])]) {
      try {
        listener(message);
      } catch (error) {
        report(error); // a listener's fault is not the connection's
      }
    }
  }
}

function report(error) {
  (globalThis.reportError ?? console.error)(error);
}

function absolute(url) {
  try {
    return new URL(url).href;
  } catch {
    const { origin = "http://localhost", href } = globalThis.location ?? {};
    return new URL(url, origin === "null" ? href : origin).href; // a sandboxed frame has no origin
  }
}

// A bare cursor, under the URL alone, is what the storage held before it named channels.
function kept(storage, key, plain) {
  const text = storage?.getItem(key);
  try {
    const { cursor, channels } = JSON.parse(text);
    if (typeof cursor === "string") return { cursor, channels: new Set(channels) };
  } catch {
    // a bare one, or none
  }
  const older = storage?.getItem(plain);
  return { cursor: text ?? (older?.startsWith("{") ? "" : older) ?? "", channels: new Set() };
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
