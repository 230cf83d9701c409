// The README's promises, taken from its own text: command one ends with an event seen, and the lines for a browser's
// console run in a real browser and survive a pulled cable.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { root, startGateway, token, until } from "./gateway.mjs";

const readme = readFileSync(join(root, "README.md"), "utf8");

test("the first command ends with an event that a client saw", () => {
  const [, command] = readme.match(/^(scripts\/demo)\b/m);
  const any = "127.0.0.1:0";
  const run = spawnSync(join(root, command), {
    encoding: "utf8",
    stdio: ["ignore", "pipe", "pipe"],
    env: { ...process.env, GATEWAY_LISTEN: any, GATEWAY_ADMIN_LISTEN: any, GATEWAY_PROBE_LISTEN: any },
  });
  assert.equal(run.status, 0, run.stdout + run.stderr);
  assert.match(run.stdout, /the client saw\n\d+-\d+ demo - \{"hello":"world"\}\n$/);
});

test("the lines for a browser's console receive events, also those of an offline time", async () => {
  const [, lines] = readme.match(/```js\n([\s\S]*?)```/);
  assert.equal(lines.trim().split("\n").length, 4);
  const gateway = await startGateway();
  const browser = await startBrowser();
  try {
    const page = await browser.page(`http://${gateway.public}/v1/client.js`);
    const code = lines
      .replaceAll("127.0.0.1:8080", gateway.public)
      .replace("TOKEN", token("reader", { subscribe: ["*"] }));
    // A console runs lines with `await` as this does.
    await page.evaluate(`(async () => { ${code} window.tide = tide; })()`);
    const seen = (text) => until(`the console says ${text}`, () => page.said.some((line) => line.includes(text)));
    // The subscription is asked for, not confirmed, when the lines have run: publish until it is heard.
    await until("the first event", async () => {
      await gateway.publish("news", "first");
      return page.said.some((line) => line.includes("first"));
    });
    await page.context().setOffline(true);
    await gateway.publish("news", "while offline 1");
    await gateway.publish("news", "while offline 2");
    await page.context().setOffline(false);
    await seen("while offline 2");
    const offline = page.said.filter((line) => line.includes("while offline"));
    assert.equal(offline.length, 2, page.said.join("\n"));
  } finally {
    await browser.close();
    await gateway.kill();
  }
});
