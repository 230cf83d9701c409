// The console page as a person uses it, in a real browser: connect, publish, watch, over both transports.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { startGateway, token, until } from "./gateway.mjs";

let browser;
let gateway;
before(async () => {
  browser = await startBrowser();
  // The page stands on the admin listener and connects to the public one: another origin.
  gateway = await startGateway({ GATEWAY_ALLOWED_ORIGINS: "*" });
});
after(async () => {
  await browser?.close();
  await gateway?.kill();
});

for (const transport of ["WebSocket", "server-sent events"]) {
  test(`the console connects, publishes and shows the event over ${transport}`, async () => {
    const page = await browser.page(`http://${gateway.admin}/console`);
    await page.getByLabel("Public URL").fill(`http://${gateway.public}`);
    await page.getByLabel("Token").fill(token("console", { subscribe: ["*"] }));
    await page.getByLabel("Transport").selectOption({ label: transport });
    await page.getByRole("button", { name: "Connect", exact: true }).click();
    const log = page.getByRole("log");
    await log.getByText("ready").first().waitFor();

    const channel = `console-${transport.length}`;
    await page.getByLabel("Name", { exact: true }).fill(channel);
    await page.getByRole("button", { name: "Subscribe" }).click();
    await page.getByLabel("Data (JSON)").fill('{"from": "the console"}');
    // The subscription may still be under way: publish until the event shows.
    await until("the event shows", async () => {
      await page.getByRole("button", { name: "Publish" }).click();
      return (await log.innerText()).includes("from");
    });
    assert.match(await log.innerText(), new RegExp(channel));
    assert.deepEqual(page.said.filter((line) => line.startsWith("error:")), []);
    if (process.env.SCREENSHOT) await page.screenshot({ path: `${process.env.SCREENSHOT}-${transport.length}.png` });
    await page.close();
  });
}
