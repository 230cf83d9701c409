// The README's promises, taken from its own text: command one ends with an event seen, and the lines for a browser's
// console run in a real browser and survive a pulled cable.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { join } from "node:path";
import { test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { binary, root, startGateway, token, until } from "./gateway.mjs";

const readme = readFileSync(join(root, "README.md"), "utf8");

test("the first command ends with an event that a client saw", () => {
  const [, command] = readme.match(/^(scripts\/demo)\b/m);
  const any = "127.0.0.1:0";
  const run = spawnSync(join(root, command), {
    encoding: "utf8",
    stdio: ["ignore", "pipe", "pipe"],
    env: { ...process.env, TIDEGATE: binary, GATEWAY_LISTEN: any, GATEWAY_ADMIN_LISTEN: any, GATEWAY_PROBE_LISTEN: any },
  });
  assert.equal(run.status, 0, run.stdout + run.stderr);
  assert.match(run.stdout, /the client saw\n\d+-\d+ demo - \{"hello":"world"\}\n$/);
});

/** A cable between a browser and the gateway: what runs through it is cut by `pull`, and runs again after `plug`. */
async function cable(to) {
  const [host, port] = to.split(":");
  const open = new Set();
  const server = createServer((near) => {
    const far = connect(Number(port), host);
    for (const [one, other] of [[near, far], [far, near]]) {
      open.add(one);
      one.on("error", () => other.destroy()).on("close", () => (open.delete(one), other.destroy())).pipe(other);
    }
  });
  const listen = async (port) => once(server.listen(port, "127.0.0.1"), "listening");
  await listen(0);
  const { port: here } = server.address();
  return {
    address: `127.0.0.1:${here}`,
    async pull() {
      server.close();
      open.forEach((socket) => socket.destroy());
      await once(server, "close");
    },
    plug: () => listen(here),
  };
}

test("the lines for a browser's console receive events, also those of a pulled cable", async () => {
  const [, lines] = readme.match(/```js\n([\s\S]*?)```/);
  assert.equal(lines.trim().split("\n").length, 4);
  const gateway = await startGateway();
  const line = await cable(gateway.public);
  const browser = await startBrowser();
  try {
    const page = await browser.page(`http://${line.address}/v1/client.js`);
    const code = lines
      .replaceAll("127.0.0.1:8080", line.address)
      .replace("TOKEN", token("reader", { subscribe: ["*"] }));
    // A console runs lines with `await` as this does.
    await page.evaluate(`(async () => { ${code} })()`);
    const seen = () => page.said.filter((said) => said.startsWith("news "));
    // The subscription is asked for, not confirmed, when the lines have run: publish until it is heard.
    await until("the first event", async () => {
      await gateway.publish("news", 0);
      return seen().length > 0;
    });
    await gateway.publish("news", 1);
    await until("a live event", () => seen().includes("news 1"));
    await line.pull();
    await gateway.publish("news", 2);
    await gateway.publish("news", 3);
    await line.plug();
    await until("the events of the time without a cable", () => seen().includes("news 3"));
    await gateway.publish("news", 4);
    await until("a live event", () => seen().includes("news 4"));
    assert.deepEqual(seen().filter((said) => said !== "news 0"), ["news 1", "news 2", "news 3", "news 4"]);
    await line.pull();
  } finally {
    await browser.close();
    await gateway.kill();
  }
});
