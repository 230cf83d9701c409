// A real browser against the real gateway: its native EventSource and WebSocket, without a line of ours in the page.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { startGateway, startRedis, token, until, upTo } from "./gateway.mjs";

let browser;
let redis;
before(async () => {
  browser = await startBrowser();
  redis = await startRedis();
});
after(async () => {
  await browser?.close();
  await redis?.stop();
});

/** Opens an EventSource in the page; all that it receives is collected there, in order. */
function listen(page, url) {
  return page.evaluate((url) => {
    window.received = [];
    window.source = new EventSource(url);
    source.onmessage = (message) => received.push(JSON.parse(message.data));
    for (const type of ["hello", "ready", "gap", "bye", "position"]) {
      source.addEventListener(type, (message) => received.push(JSON.parse(message.data)));
    }
  }, url);
}

const received = (page, type) => page.evaluate((type) => received.filter((message) => message.type === type), type);
const data = async (page) => (await received(page, "event")).map((event) => event.data);

test("EventSource: resumes by itself after a restart of the gateway, nothing missing or double", async () => {
  let gateway = await startGateway({ GATEWAY_REDIS_URL: redis.url });
  // Any page of the gateway's own origin will do; a stream may come from the same origin without CORS.
  const page = await browser.page(`http://${gateway.public}/v1/client.js`);
  await listen(page, `/v1/sse?access_token=${token("browser-1", { channels: ["browser-1"] })}`);
  await until("ready", async () => (await received(page, "ready")).length === 1);
  for (const n of upTo(5)) await gateway.publish("browser-1", n);
  await until("five events", async () => (await data(page)).length === 5);

  await gateway.kill();
  // Nobody serves now; a back end goes on publishing straight into Redis.
  for (const n of [6, 7, 8]) {
    const id = redis.cli("FCALL", "tidegate_publish", "1", "tidegate:log", "browser-1", String(n));
    assert.match(id, /^\d+-\d+$/);
  }
  gateway = await startGateway({ GATEWAY_REDIS_URL: redis.url, GATEWAY_LISTEN: gateway.public });
  await until("ready again", async () => (await received(page, "ready")).length === 2);
  await gateway.publish("browser-1", 9);
  await until("the live event", async () => (await data(page)).at(-1) === 9);

  assert.deepEqual(await data(page), upTo(9));
  assert.deepEqual(await received(page, "gap"), []);
  const [, again] = await received(page, "ready");
  assert.equal(again.resume, "ok");
  assert.equal(again.replayed, 3);
  await page.close();
  await gateway.kill();
});

test("EventSource: a restart that loses the log is announced by a gap, then it goes on live", async () => {
  let gateway = await startGateway();
  const page = await browser.page(`http://${gateway.public}/v1/client.js`);
  await listen(page, `/v1/sse?access_token=${token("browser-2", { channels: ["browser-2"] })}`);
  await until("ready", async () => (await received(page, "ready")).length === 1);
  await gateway.publish("browser-2", 1);
  await until("the event", async () => (await data(page)).length === 1);

  await gateway.kill();
  gateway = await startGateway({ GATEWAY_LISTEN: gateway.public });
  await until("ready again", async () => (await received(page, "ready")).length === 2);
  await gateway.publish("browser-2", 2);
  await until("the live event", async () => (await data(page)).length === 2);

  assert.deepEqual(await data(page), [1, 2]);
  const gaps = await received(page, "gap");
  assert.ok(gaps.some((gap) => gap.channel === "browser-2" && gap.reason === "reset"), JSON.stringify(gaps));
  assert.equal((await received(page, "ready"))[1].resume, "gap");
  await page.close();
  await gateway.kill();
});

test("EventSource: a drained gateway says bye, and the browser comes back to the next one", async () => {
  let gateway = await startGateway({ GATEWAY_REDIS_URL: redis.url });
  const page = await browser.page(`http://${gateway.public}/v1/client.js`);
  await listen(page, `/v1/sse?access_token=${token("browser-3", { channels: ["browser-3"] })}`);
  await until("ready", async () => (await received(page, "ready")).length === 1);
  await gateway.publish("browser-3", 1);
  await until("the event", async () => (await data(page)).length === 1);

  assert.equal(await gateway.stop(), 0);
  gateway = await startGateway({ GATEWAY_REDIS_URL: redis.url, GATEWAY_LISTEN: gateway.public });
  await gateway.publish("browser-3", 2);
  await until("the missed event", async () => (await data(page)).length === 2);

  assert.deepEqual(await data(page), [1, 2]);
  const byes = await received(page, "bye");
  // More may follow: it comes back at a moment that was drawn for it, perhaps before the next one serves.
  assert.equal(byes[0].reason, "drain");
  assert.deepEqual(await received(page, "gap"), []);
  await page.close();
  await gateway.kill();
});

test("WebSocket: hello, ready, an event, and a close that the page can read", async () => {
  const gateway = await startGateway();
  const page = await browser.page(`http://${gateway.public}/v1/client.js`);
  await page.evaluate(({ url, token }) => {
    window.received = [];
    window.socket = new WebSocket(url, ["tidegate.v1", `bearer.${token}`]);
    socket.onmessage = (message) => received.push(JSON.parse(message.data));
    socket.onclose = (event) => (window.ending = { code: event.code, clean: event.wasClean });
  }, { url: gateway.ws, token: token("browser-4", { channels: ["browser-4"] }) });
  await until("ready", async () => (await received(page, "ready")).length === 1);
  assert.equal(await page.evaluate(() => socket.protocol), "tidegate.v1");
  await gateway.publish("browser-4", { text: "grüße \u{1F30A}" });
  await until("the event", async () => (await data(page)).length === 1);
  assert.deepEqual(await data(page), [{ text: "grüße \u{1F30A}" }]);
  assert.equal(await gateway.stop(), 0);
  await until("closed", () => page.evaluate(() => window.ending));
  assert.deepEqual(await page.evaluate(() => ending), { code: 1001, clean: true });
  assert.equal((await received(page, "bye"))[0].reason, "drain");
  await page.close();
});
